#include "bench/gpu/hybrid_steps.h"

#include <cstring>
#include <random>

#include "bench/machine/machine_speed.h"
#include "bench/random_inputs.h"

namespace tandem {
namespace {

constexpr int kMinTimingRounds = 3;
constexpr int kSteps = 4;  // with different tokens, so that their experts come from memory

// kSteps steps with the next tokens of sequences at the end of `context`.
class DecodeSteps {
 public:
  DecodeSteps(int vocab, int context, int n) : pages_(first_pages(n * pages_for(context))) {
    std::mt19937 rng(context + n);
    for (int i = 0; i < kSteps; ++i) {
      steps_.emplace_back(context, 1, pages_, n);
      steps_.back().tokens = random_tokens(n, vocab, rng);
    }
  }
  DecodeSteps(const DecodeSteps&) = delete;
  DecodeSteps& operator=(const DecodeSteps&) = delete;

  Batch at(int step) const { return steps_[step].batch(); }

 private:
  const std::vector<int32_t> pages_;
  std::vector<LastTokens> steps_;
};

TensorView copy_of(const TensorView& from, std::vector<Buffer>& memory) {
  TensorView to = from;
  const int64_t bytes = from.rows * from.stride * size_of(from.dtype);
  to.data = memory.emplace_back(bytes).data();
  std::memcpy(to.data, from.data, static_cast<size_t>(bytes));
  return to;
}

}  // namespace

// Intercepts the expert batches that a shared step submits to the CPU.
class CpuPart final : public ExpertPool {
 public:
  enum class Does { kAll, kRemembers, kNothing };
  CpuPart(CpuExperts& experts, std::function<void()> before, const ModelConfig& config, int rows)
      : experts_(experts), before_(std::move(before)) {
    arena_ = Arena::holding([&](auto visit) { visit(sum_, rows, config.dim, DType::kF32); });
  }

  void add_to(Ticket ticket, TensorView y) override {
    if (does != Does::kNothing) experts_.add_to(ticket, y);
  }

  // The batches recorded in mode kRemembers, for repetition.
  struct Asked {
    std::vector<ExpertBatch> batches;
    std::vector<Buffer> memory;
  };
  Asked take_remembered() { return std::move(asked_); }
  void repeat(const Asked& asked) {
    for (const ExpertBatch& batch : asked.batches) {
      const Ticket ticket = submit(batch);
      const TensorView sum = sum_.rows_from(0, batch.x.rows);
      std::memset(sum.data, 0, static_cast<size_t>(sum.rows * sum.row_bytes()));
      add_to(ticket, sum);
    }
  }

  Does does = Does::kAll;

 private:
  Ticket start(const ExpertBatch& batch) override {
    if (does == Does::kNothing) return 0;
    if (does == Does::kRemembers) remember(batch);
    if (before_) before_();
    return experts_.submit(batch);
  }
  void remember(const ExpertBatch& batch) {
    ExpertBatch& kept = asked_.batches.emplace_back(batch);
    kept.x = copy_of(batch.x, asked_.memory);
    kept.routing.ids = copy_of(batch.routing.ids, asked_.memory);
    kept.routing.weights = copy_of(batch.routing.weights, asked_.memory);
    const TensorView scales = {const_cast<float*>(batch.x_scales), batch.x.rows, 1, 1, DType::kF32};
    kept.x_scales = copy_of(scales, asked_.memory).row<float>(0);
  }

  CpuExperts& experts_;
  const std::function<void()> before_;
  Arena arena_;
  TensorView sum_;
  Asked asked_;
};

HybridSteps::HybridSteps(const Parts& p)
    : config_(p.config),
      gpu_model_(p.gpu_model),
      device_(p.gpu_model.bench_model()->device()),
      limits_(p.limits),
      cpu_(new CpuPart(p.experts, p.before_cpu, p.config, p.limits.max_tokens)),
      shared_(p.gpu_model.bench_model()->share(p.experts, *cpu_, p.limits.max_tokens)),
      model_({p.config, p.gpu_model.bench_model()->weights(), device_,
              p.gpu_model.bench_model()->ops(), shared_->experts()},
             p.limits, AttentionForm::kAuto) {}

HybridSteps::~HybridSteps() = default;

void HybridSteps::forward(StepRunner& model, const Batch& batch) {
  model.forward(batch, *gpu_model_.cache());
  device_.wait();
}

HybridSteps::Decode HybridSteps::decode(int context, int n_sequences, double seconds) {
  const DecodeSteps steps(config_.vocab, context, n_sequences);
  std::vector<CpuPart::Asked> asked;
  shared_->micro_batches_from(0);
  for (int i = 0; i < kSteps; ++i) {
    cpu_->does = CpuPart::Does::kRemembers;
    forward(model_, steps.at(i));
    asked.push_back(cpu_->take_remembered());
  }

  // In turns, so that a disturbance affects all of them.
  enum Kind { kStep, kHalves, kNoCpu, kGpu, kCpu, kKinds };
  std::array<std::vector<double>, kKinds> times;
  const auto run = [&](Kind kind, int step) {
    cpu_->does = kind == kNoCpu ? CpuPart::Does::kNothing : CpuPart::Does::kAll;
    shared_->micro_batches_from(kind == kHalves ? 2 : 0);
    return seconds_of([&] {
      if (kind == kCpu)
        cpu_->repeat(asked[step]);
      else
        forward(kind == kGpu ? *gpu_model_.model() : model_, steps.at(step));
    });
  };
  int gpu_nodes = 0, gpu_early = 0;
  for (int kind = 0; kind < kKinds; ++kind) {  // warm-up: records graphs, loads kernels
    run(Kind(kind), 0);
    if (kind != kGpu) continue;
    gpu_nodes = gpu_model_.bench_model()->n_nodes_of_last_step();
    gpu_early = gpu_model_.bench_model()->n_early_of_last_step();
  }
  double spent = 0;
  for (int round = 0; round < kMinTimingRounds || spent < seconds; ++round)
    for (int kind = 0; kind < kKinds; ++kind) {
      times[kind].push_back(run(Kind(kind), round % kSteps));
      spent += times[kind].back();
    }
  return {median(times[kStep]),
          median(times[kHalves]),
          median(times[kNoCpu]),
          median(times[kGpu]),
          median(times[kCpu]),
          gpu_nodes,
          gpu_early};
}

std::optional<HybridSteps::Prefill> HybridSteps::prefill(int n, double seconds) {
  constexpr int64_t kCopied = 32 << 20;
  cpu_->does = CpuPart::Does::kAll;
  if (!crossover_) crossover_ = shared_->measure_crossover(limits_.max_tokens);
  if (!crossover_) return {};
  const std::vector<int32_t> pages = first_pages(pages_for(n));
  LastTokens prompt(n, n, pages);
  std::mt19937 rng(n);
  prompt.tokens = random_tokens(n, config_.vocab, rng);
  const Buffer pinned = device_.allocate_on_host(kCopied), there = device_.allocate(kCopied);

  std::vector<double> streamed, on_cpu, copies;
  int64_t bytes = 0;
  const auto chunk = [&](int from) {
    shared_->stream_from(from);
    const int64_t before = shared_->bytes_streamed();
    const double taken = seconds_of([&] { forward(model_, prompt.batch()); });
    bytes = shared_->bytes_streamed() - before;
    return taken;
  };
  const auto copy = [&] {
    return seconds_of([&] {
      device_.copy(pinned.data(), kCopied, there.data());
      device_.wait();
    });
  };
  constexpr int kNever = 0;
  chunk(kNever);
  chunk(n);  // warm-up: streaming learns which experts are likely
  copy();
  double spent = 0;
  for (int round = 0; round < kMinTimingRounds || spent < seconds; ++round) {
    on_cpu.push_back(chunk(kNever));
    copies.push_back(copy());
    streamed.push_back(chunk(n));
    spent += on_cpu.back() + copies.back() + streamed.back();
  }
  shared_->stream_from(kNever);
  return Prefill{median(streamed), median(on_cpu), bytes,
                 static_cast<double>(kCopied) / median(copies), *crossover_};
}

}  // namespace tandem
