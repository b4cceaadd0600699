// Predicted speed of a model in a given placement, and where the time goes. Pure; the placement
// need not come from plan().
#pragma once
#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "offload/plan/placement.h"
#include "offload/plan/workload.h"

namespace tandem {

enum class Part {
  kProjections,  // linear projections of attention
  kAttention,    // attention over the cache
  kDense,
  kRouter,
  kShared,
  kGpuExperts,
  kCpuExperts,
  kStreaming,  // streaming experts to the GPU
  kExchange,   // exchange of tokens between backbone and experts
  kAllReduce,  // tensor-parallel sums
  kOverhead,   // kernel launches
};
constexpr int kNumParts = 11;
const char* name_of(Part part);  // "cpu_experts"

struct LayerTime {
  std::array<double, kNumParts> parts{};  // seconds of each part by itself; some overlap
  double seconds = 0;                     // from the start of one layer to the start of the next
  double& operator[](Part p) { return parts[static_cast<int>(p)]; }
  double operator[](Part p) const { return parts[static_cast<int>(p)]; }
};

// One step: the next token of every sequence, or a chunk of prompts.
struct Phase {
  double tokens = 0;     // over all replicas
  LayerTime dense, moe;  // means over the layers of the kind
  int n_dense = 0, n_moe = 0;
  double embedding_seconds = 0, head_seconds = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;
  bool streamed = false;
};

struct Prediction {
  Phase decode, prefill;
  double time_to_first_token_seconds = 0;  // for a single request
  double request_seconds = 0;              // with all other requests running
  double output_tokens_per_second = 0;     // over all requests, including their prefill time
  double tokens_per_second_per_user = 0;
  double load_seconds = 0;  // 0: disk speed unknown
  std::vector<DeviceMemory> memory;
  int gpus_used() const;  // that hold weights; `memory` must be known
  double score = 0;  // seconds per request or, for throughput, per output token: lower is better
};

// Caches routing.chance() of a layer's experts.
class ChanceCache {
 public:
  const std::vector<double>& of(const RoutingStatistics& routing, int layer, double tokens,
                                int n_experts);

 private:
  std::map<std::pair<int, double>, std::vector<double>> known_;
};

// The placement must be sound (check_placement) but need not fit the memory.
struct PlanInput {
  const ModelConfig& config;
  const Machine& machine;
  const Workload& workload;  // concurrency at least 1
  const RoutingStatistics& routing;
  ChanceCache* known = nullptr;  // cache for this routing; null: computed each time
};
Prediction predict(const PlanInput& input, const Placement& placement);

// One step of `tokens_per_replica` tokens in each replica: the next tokens and drafts of sequences,
// each ending at `context`, or a prefill chunk of one sequence.
struct StepShape {
  double tokens_per_replica, context;
  bool prefill;
  double replicas;   // number of replicas that have tokens
  int n_drafts = 0;  // of each sequence; 1 + n_drafts of the tokens belong to one sequence
  double tokens_per_sequence() const { return prefill ? tokens_per_replica : 1.0 + n_drafts; }
};
// A decode step of the workload's sequences in the middle of their answers, without drafts.
StepShape decode_step_shape(const Workload& workload, const Placement& placement);
Phase predict_step(const PlanInput& input, const Placement& placement, StepShape shape);
// Seconds of a server's step, in which each replica computes the next tokens of `sequences`
// sequences and `prompt_tokens` of a prompt; one of both may be 0.
double served_step_seconds(const PlanInput& input, const Placement& placement, int sequences,
                           int prompt_tokens);

// Caches layer times of steps, for placements that differ only in embedding, head, chunks and
// micro-batches. Placements with the same stages and experts must have the same `home`.
class StepMemo {
 public:
  // Like predict(), without memory and load time.
  Prediction speed(const PlanInput& input, const Placement& placement, int64_t home);

 private:
  using Key = std::tuple<int64_t, double, double, double, bool, int, bool>;
  Phase step(const PlanInput& input, const Placement& placement, StepShape shape, int64_t home);
  std::map<Key, Phase> layers_;
  ChanceCache chances_;  // for routing that is not even
};

}  // namespace tandem
