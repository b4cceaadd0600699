// Our BF16 product beside oneDNN's matmul, weights from memory, both against the roofline of the
// same minute: why the engine does without the library (docs/dependencies.md).
//   OMP_WAIT_POLICY=passive dense_bench     threads of OpenMP must not spin while ours run
#include <fmt/core.h>

#include <cstring>
#include <dnnl.hpp>
#include <random>

#include "bench/bench_model.h"
#include "bench/roofline.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

constexpr int64_t kOutputs = 7168, kInputs = 16384;  // R1's attention output
constexpr int kMatrices = 10;                        // 2.3 GB: more than any cache
constexpr double kSeconds = 2;                       // a row of the table

dnnl::matmul::primitive_desc matmul(const dnnl::engine& engine, const dnnl::memory::desc& x,
                                    const dnnl::memory::desc& w, const dnnl::memory::desc& y) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, x, w, y};
#else
  return {{x, w, y}, engine};
#endif
}

// y = x w^T with weights in the layout that the library asks for.
class OneDnn {
 public:
  using Type = dnnl::memory::data_type;
  using Tag = dnnl::memory::format_tag;

  explicit OneDnn(int n_tokens)
      : x_({{n_tokens, kInputs}, Type::bf16, Tag::ab}, engine_),
        y_({{n_tokens, kOutputs}, Type::f32, Tag::ab}, engine_),
        description_(matmul(engine_, x_.get_desc(), {{kInputs, kOutputs}, Type::bf16, Tag::any},
                            y_.get_desc())),
        product_(description_) {
    const int64_t bytes = static_cast<int64_t>(description_.weights_desc().get_size());
    room_ = Buffer(bytes * kMatrices);
    std::memset(room_.data(), 0, room_.bytes());
    std::memset(x_.get_data_handle(), 0, x_.get_desc().get_size());
    for (int i = 0; i < kMatrices; ++i)
      weights_.emplace_back(description_.weights_desc(), engine_, room_.data() + i * bytes);
  }
  void run(int64_t i) {
    product_.execute(
        stream_,
        {{DNNL_ARG_SRC, x_}, {DNNL_ARG_WEIGHTS, weights_[i % kMatrices]}, {DNNL_ARG_DST, y_}});
    stream_.wait();
  }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::memory x_, y_;
  dnnl::matmul::primitive_desc description_;
  dnnl::matmul product_;
  Buffer room_;  // in huge pages, as ours
  std::vector<dnnl::memory> weights_;
};

ModelConfig attention_outputs() {
  ModelConfig config = bench_config("r1");
  config.n_layers = config.n_dense_layers = kMatrices;
  return config;
}

void run() {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  Team team(0);
  MachineSpeed speed(team, MachineSpeed::enough_bytes(team));
  const ModelConfig config = attention_outputs();
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {{DType::kBF16}, {DType::kBF16}},
      [](const WeightSpec& spec) { return spec.name.ends_with(".o_proj.weight"); }, home, team);
  fmt::print("R1's attention output, BF16, {} threads, {}; oneDNN {}.{}\n\n", team.size(),
             kernels.name, dnnl_version()->major, dnnl_version()->minor);
  fmt::print(
      "| tokens | ours ms | of the roofline | oneDNN ms | of the roofline | ours faster |\n");
  fmt::print("|---:|---:|---:|---:|---:|---:|\n");
  for (const int n : {1, 4, 16, 64, 256, 512}) {
    CpuOps ops(kernels, config, n, team);
    OneDnn other(n);
    TensorView x, y;
    const Arena arena = Arena::holding([&](auto visit) {
      visit(x, n, kInputs, DType::kF32);
      visit(y, n, kOutputs, DType::kF32);
    });
    const Cost cost = {2 * kInputs * kOutputs, 2 * kInputs * kOutputs * n};
    const Work works[] = {
        {cost, [&](int64_t i) { ops.linear(x, weights.layers[i % kMatrices].attn.o, y); }},
        {cost, [&](int64_t i) { other.run(i); }}};
    const auto measured =
        measure(speed, peak_of_products(speed, kernels, DType::kBF16), works, kSeconds);
    fmt::print("| {} | {:.2f} | {:.0f} % | {:.2f} | {:.0f} % | {:.2f}x |\n", n,
               measured[0].seconds * 1e3, measured[0].roofline_ratio * 1e2,
               measured[1].seconds * 1e3, measured[1].roofline_ratio * 1e2,
               measured[1].seconds / measured[0].seconds);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tandem

int main() {
  tandem::run();
  return 0;
}
