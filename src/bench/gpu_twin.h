// The model of a benchmark a second time, on a GPU: the same shapes and formats, so that the same
// verbs can be timed there. src/with_gpu makes them.
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "bench/bench_model.h"
#include "bench/random_routing.h"
#include "offload/cpu_experts.h"
#include "ops/device.h"
#include "ops/ops.h"

namespace tandem {

// A twin's routed experts in host memory, computed by the CPU in the twin's steps (HybridExperts),
// with what a benchmark varies.
class HybridTwin {
 public:
  virtual ~HybridTwin() = default;
  virtual ExpertPool& experts() = 0;
  // Steps in which so many sequences and more decode have two micro-batches; 0: none.
  virtual void micro_batches_from(int n_sequences) = 0;
  // Prepares to bring experts to the card in steps of up to max_tokens, at rates that are measured
  // here and now: from how many tokens on that is faster, 0: never. Nothing: not in their format.
  virtual std::optional<int> measure_crossover(int max_tokens) = 0;
  // Once it was measured: in steps of so many tokens and more.
  virtual void stream_from(int n_tokens) = 0;
  virtual int64_t bytes_brought() const = 0;  // so far
};

class GpuTwin {
 public:
  virtual ~GpuTwin() = default;
  virtual const ModelWeights& weights() const = 0;
  virtual Device& device() = 0;
  virtual Ops& ops() = 0;
  virtual ExpertPool& experts() = 0;
  // The routed experts of all layers, none of which is on the card; `on_cpu` takes what is handed
  // down to `experts`, and all outlive the result. For steps of up to max_tokens.
  virtual std::unique_ptr<HybridTwin> share(CpuExperts& experts, ExpertPool& on_cpu,
                                            int max_tokens) = 0;
  // A matrix of n_rows rows on the card, in BF16 as those given, which are repeated.
  virtual QuantView repeated(TensorView rows, int64_t n_rows) = 0;
  // Kernels and copies of the recorded graph that the last step was; 0: it was none.
  virtual int n_nodes_of_last_step() const = 0;
  // Starts to copy a matrix without gaps between its rows.
  virtual void to_card(TensorView from, TensorView to) = 0;
  virtual void wait() = 0;
};

struct GpuTwinOptions {
  ModelConfig config;
  WeightFormats formats;
  std::function<bool(const WeightSpec&)> wanted;  // tensors; the others stay empty
  int max_tokens = 1;                             // of a step
  int64_t context = 1;                            // tokens of a sequence
};
// Null where there is no GPU, or not for this: too little memory, formats that it does not have.
using GpuTwins = std::function<std::unique_ptr<GpuTwin>(const GpuTwinOptions&)>;

// A matrix with what lies between its rows, which begins at the first of these.
inline TensorView whole_rows(TensorView m) {
  m.cols = m.stride;
  return m;
}
// A matrix of the host on the card, whole rows; `memory` keeps it.
TensorView on_card(GpuTwin& twin, TensorView from, std::vector<Buffer>& memory);

// Routings of steps, on the card.
class RoutingsOnCard {
 public:
  RoutingsOnCard(GpuTwin& twin, std::span<const RandomRouting> steps) {
    for (const RandomRouting& step : steps) {
      const Routing r = step.routing();
      routings_.push_back({on_card(twin, r.ids, memory_), on_card(twin, r.weights, memory_)});
    }
  }
  const Routing& of_run(int64_t run) const { return routings_[run % std::ssize(routings_)]; }

 private:
  std::vector<Buffer> memory_;
  std::vector<Routing> routings_;
};

// Median of a run, of so many together that it takes a millisecond, measured for about `seconds`.
double seconds_on_card(GpuTwin& twin, const std::function<void(int64_t run)>& run, double seconds);
// .. of whatever is done when `wait` returns.
double seconds_of_runs(const std::function<void(int64_t run)>& run,
                       const std::function<void()>& wait, double seconds);

}  // namespace tandem
