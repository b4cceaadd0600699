// What the formats of routed experts cost in accuracy: random normal experts of DeepSeek-R1's
// shape, stored in FP8 as R1 is and in BF16, kept in each format. Prints relative errors (root of
// the mean square over that of the numbers as stored) of the weights and of an expert's output.
//   quantisation_bench [SEED]
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <random>

#include "core/check.h"
#include "loader/weights/pack_weights.h"
#include "offload/cpu_experts.h"

namespace tandem {
namespace {

constexpr int kTokens = 16;
constexpr int kBlock = 128;          // of FP8 scales
constexpr float kMaxE4M3 = 448;      // of FP8
constexpr float kDeviation = 0.02f;  // of weights; errors do not depend on it

// One layer with a single expert, all else as small as it may be.
ModelConfig one_expert() {
  ModelConfig c;
  c.vocab = c.n_layers = 1;
  c.n_dense_layers = c.n_shared_experts = c.n_mtp_layers = 0;
  c.mla = {.n_heads = 1, .q_rank = 0, .kv_rank = 1, .nope_dim = 1, .rope_dim = 2, .v_dim = 1};
  c.router.n_experts = c.router.n_active = c.router.n_groups = c.router.n_active_groups = 1;
  c.router.method = TopkMethod::kGreedy;
  return c;
}

const cpu::KernelTable kReference = cpu::kernels_for(cpu::Isa::kReference);

// The expert as a checkpoint holds it.
class Stored {
 public:
  Stored(DType dtype, int seed) : dtype_(dtype), random_(seed) {
    for (int code = 0; code < 0x7f; ++code) codes_[code] = static_cast<uint8_t>(code);
    kReference.decode({codes_, cpu::WeightType::kF8E4M3, values_, 0x7f});
    for_each_weight(weights_, config_, [&](const WeightSpec& spec, QuantView& slot) {
      slot = spec.use == WeightUse::kExpert
                 ? matrix(spec.rows, spec.cols)
                 : QuantView{.q = room(spec.rows, spec.cols, DType::kBF16), .scale = {}};
    });
  }
  const ModelConfig& config() const { return config_; }
  ModelWeights& weights() { return weights_; }

 private:
  TensorView room(int64_t rows, int64_t cols, DType dtype) {
    storage_.emplace_back(rows * cols * size_of(dtype));
    return {storage_.back().data(), rows, cols, cols, dtype};
  }

  QuantView matrix(int64_t rows, int64_t cols) {
    std::vector<float> numbers(rows * cols);
    std::normal_distribution<float> normal(0, kDeviation);
    for (float& number : numbers) number = normal(random_);
    QuantView w{.q = room(rows, cols, dtype_), .scale = {}};
    if (dtype_ == DType::kBF16) {
      kReference.encode_bf16({numbers.data(), static_cast<cpu::bf16*>(w.q.data), rows * cols});
      return w;
    }
    w.scale = room(rows / kBlock, cols / kBlock, DType::kF32);
    w.block_rows = w.block_cols = kBlock;
    for (int64_t r = 0; r < rows; r += kBlock)
      for (int64_t c = 0; c < cols; c += kBlock) encode_block(numbers, r, c, w);
    return w;
  }

  // The largest number of a block becomes the largest of FP8, the others are rounded to nearest.
  void encode_block(const std::vector<float>& numbers, int64_t first_row, int64_t first_col,
                    QuantView& w) {
    const auto each = [&](auto visit) {
      for (int64_t r = first_row; r < first_row + kBlock; ++r)
        for (int64_t c = first_col; c < first_col + kBlock; ++c)
          visit(numbers[r * w.q.cols + c], w.q.row_data(r)[c]);
    };
    float largest = 0;
    each([&](float number, std::byte&) { largest = std::max(largest, std::fabs(number)); });
    const float scale = largest / kMaxE4M3;
    w.scale.row<float>(first_row / kBlock)[first_col / kBlock] = scale;
    each([&](float number, std::byte& code) {
      const float magnitude = std::fabs(number) / scale;
      int at = static_cast<int>(std::lower_bound(values_, values_ + 0x7f, magnitude) - values_);
      at = std::min(at, 0x7e);
      if (at > 0 && magnitude - values_[at - 1] < values_[at] - magnitude) --at;
      code = static_cast<std::byte>(at | (number < 0 ? 0x80 : 0));
    });
  }

  const DType dtype_;
  const ModelConfig config_ = one_expert();
  ModelWeights weights_;
  std::mt19937 random_;
  std::deque<std::vector<std::byte>> storage_;
  uint8_t codes_[0x7f];
  float values_[0x7f];  // of the codes, ascending
};

// The same kept by one instruction set in one format; nothing: as stored.
struct Kept {
  cpu::KernelTable kernels;
  CpuWeights home{kernels};
  PackedModel packed;

  Kept(cpu::Isa isa, Stored& stored, std::optional<WeightFormat> format)
      : kernels(cpu::kernels_for(isa)),
        packed(reserve_packed(stored.weights(), stored.config(), home, format)) {
    for (const LoadJob& job : load_jobs(packed, home).rest) job.run(job.source);
  }

  // Row by row as floats; of the reference table only.
  std::vector<float> numbers() const {
    std::vector<float> all;
    const FfnWeights& expert = packed.weights.layers[0].experts[0];
    for (const QuantView& w : {expert.gate, expert.up, expert.down}) {
      std::vector<float> row(w.q.cols);
      for (int64_t r = 0; r < w.q.rows; ++r) {
        kernels.decode({w.q.row_data(r), kernel_type(w.q.dtype), row.data(), w.q.cols});
        for (int64_t c = 0; c < w.q.cols && !w.scale.empty(); ++c)
          row[c] *= w.scale.row<float>(r / w.block_rows)[c / w.block_cols];
        all.insert(all.end(), row.begin(), row.end());
      }
    }
    return all;
  }

  // What the expert makes of x [kTokens, dim].
  std::vector<float> output(const ModelConfig& config, std::vector<float> x) const {
    Team team(Topology{});  // one node, as `home` has
    CpuExperts experts(kernels, config, packed.weights, kTokens, team);
    std::vector<int32_t> ids(kTokens, 0);
    std::vector<float> weights(kTokens, 1), y(x.size(), 0);
    const auto rows = [&](std::vector<float>& v, int64_t cols) {
      return TensorView{v.data(), kTokens, cols, cols, DType::kF32};
    };
    const Ticket ticket = experts.submit(
        {0,
         rows(x, config.dim),
         {.ids = {ids.data(), kTokens, 1, 1, DType::kI32}, .weights = rows(weights, 1)}});
    experts.add_to(ticket, rows(y, config.dim));
    return y;
  }
};

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    size += double{want[i]} * want[i];
  }
  return std::sqrt(error / size);
}

void print_rows(DType stored_as, int seed) {
  Stored stored(stored_as, seed);
  const ModelConfig& config = stored.config();
  std::mt19937 random(seed + 1);
  std::normal_distribution<float> normal;
  std::vector<float> x(int64_t{kTokens} * config.dim);
  for (float& number : x) number = normal(random);

  const Kept exact(cpu::Isa::kReference, stored, {});
  const std::vector<float> numbers = exact.numbers(), output = exact.output(config, x);
  for (const char* name : {"as stored", "fp8", "bf16", "int8", "int4-32", "int4", "int4-128"}) {
    std::optional<WeightFormat> format;
    if (name != std::string_view("as stored")) format = weight_format(name);
    if (format && format->dtype == stored_as) continue;
    const Kept reference(cpu::Isa::kReference, stored, format);
    const Kept fast(cpu::best_isa(), stored, format);
    fmt::print("| {} | {} | {:.3f} % | {:.3f} % | {:.3f} % |\n", name_of(stored_as), name,
               100 * relative_error(reference.numbers(), numbers),
               100 * relative_error(reference.output(config, x), output),
               100 * relative_error(fast.output(config, x), output));
  }
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  using namespace tandem;
  const int seed = argc > 1 ? std::atoi(argv[1]) : 1;
  fmt::print(
      "| stored | kept | weights | output, reference | output, {} |\n|---|---|---|---|---|\n",
      cpu::name_of(cpu::best_isa()));
  for (const DType stored : {DType::kF8E4M3, DType::kBF16}) print_rows(stored, seed);
}
