// How fast a model would run as it is placed, and where the time would go. Pure: the placement
// need not come from plan().
#pragma once
#include <array>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "offload/plan/placement.h"
#include "offload/plan/workload.h"

namespace tandem {

enum class Part {
  kProjections,  // of attention
  kAttention,    // over the cache
  kDense,
  kRouter,
  kShared,
  kGpuExperts,
  kCpuExperts,
  kStreaming,  // of experts to the GPU
  kExchange,   // of tokens between backbone and experts
  kAllReduce,  // of tensor-parallel parts
  kOverhead,   // starting kernels
};
constexpr int kNumParts = 11;
const char* name_of(Part part);  // "cpu_experts"

struct LayerTime {
  std::array<double, kNumParts> parts{};  // seconds each takes by itself; some overlap
  double seconds = 0;                     // from one layer's start to the next one's
  double& operator[](Part p) { return parts[static_cast<int>(p)]; }
  double operator[](Part p) const { return parts[static_cast<int>(p)]; }
};

// One step: every sequence's next token, or a chunk of prompts.
struct Phase {
  double tokens = 0;     // of all replicas
  LayerTime dense, moe;  // the mean of such layers
  int n_dense = 0, n_moe = 0;
  double embedding_seconds = 0, head_seconds = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;
  bool streamed = false;
};

struct Prediction {
  Phase decode, prefill;
  double time_to_first_token_seconds = 0;  // of a request alone
  double request_seconds = 0;              // with all others beside it
  double output_tokens_per_second = 0;     // of all requests, their prompts' time included
  double tokens_per_second_per_user = 0;
  double load_seconds = 0;  // 0: the disk is unknown
  std::vector<DeviceMemory> memory;
  double score = 0;  // seconds a request or, for throughput, an output token: less is better
};

// What routing.chance() says of a layer's experts, kept for who asks again and again.
class KnownChances {
 public:
  const std::vector<double>& of(const RoutingStatistics& routing, int layer, double tokens,
                                int n_experts);

 private:
  std::map<std::pair<int, double>, std::vector<double>> known_;
};

// The placement is sound (check_placement) but may not fit the memory.
struct PlanInput {
  const ModelConfig& config;
  const Machine& machine;
  const Workload& workload;  // concurrency at least 1
  const RoutingStatistics& routing;
  KnownChances* known = nullptr;  // of this routing; null: computed each time
};
Prediction predict(const PlanInput& input, const Placement& placement);

// One step of `tokens` in each replica: next tokens of as many sequences that end at `context`, or
// `prefill` of one.
struct StepShape {
  double tokens_per_replica, context;
  bool prefill;
  double replicas;  // that have tokens
};
Phase predict_step(const PlanInput& input, const Placement& placement, StepShape shape);

// The layers' times of steps, for placements that differ only in embedding, head, chunks and
// micro-batches: those with the same stages and experts are given the same `home`.
class StepMemo {
 public:
  // As predict(), without memory and load time.
  Prediction speed(const PlanInput& input, const Placement& placement, int64_t home);

 private:
  using Key = std::tuple<int64_t, double, double, double, bool, int, bool>;
  Phase step(const PlanInput& input, const Placement& placement, StepShape shape, int64_t home);
  std::map<Key, Phase> layers_;
  KnownChances chances_;  // with the routing that is not even
};

}  // namespace tandem
