// Predicted seconds of one layer's parts; predict.cpp adds them up.
#pragma once
#include <vector>

#include "offload/plan/predict.h"
#include "offload/plan/rates.h"

namespace tandem {

// Expected load of the owners of a layer's experts in one step.
struct ExpertLoad {
  DeviceId owner;
  int kind = 0;                   // of its host
  double experts = 0;             // number held
  double used = 0, variance = 0;  // expected number used in this step, and its variance
  double bytes = 0;               // expected bytes of the used experts
  double op_seconds = 0;          // at the owner's arithmetic peak
  double stream_op_seconds = 0;   // at the arithmetic peak of the backbone's GPU
  double rows = 0;                // expected token rows
  DType format = DType::kBF16;    // format of the last group; selects the efficiency curve
};

// Tokens of a step. Neighbouring tokens of a sequence may choose fewer different experts than as
// many `independent` ones (RoutingStatistics::independent_tokens).
struct RoutedTokens {
  double all, independent;
};
// Loads in the order in which the groups name the owners. Replicas share an expert's tokens.
std::vector<ExpertLoad> expert_loads(const PlanInput& input, const Placement& placement,
                                     const LayerExperts& experts, int layer, RoutedTokens tokens,
                                     DeviceId backbone);

// True if two owners are of one kind and have equal loads.
bool alike(const ExpertLoad& a, const ExpertLoad& b);

// Expected seconds of the busiest of `n_alike` owners whose expected load is `load`.
double busiest_seconds(const Rates& rates, const ExpertLoad& load, int n_alike);

// Times of layers for one placement and one step shape.
class LayerModel {
 public:
  LayerModel(const PlanInput& input, const Placement& placement, StepShape shape);
  // `experts` is null in a dense layer.
  LayerTime layer(const Stage& stage, int layer, const LayerExperts* experts) const;
  // The layer without routed experts and their exchange.
  LayerTime backbone(const Stage& stage, int layer) const;

 private:
  // Experts of one layer as the busiest device of each kind sees them.
  struct ExpertTimes {
    double own = 0;    // on devices of the backbone
    double other = 0;  // on other devices
    double gpu = 0, cpu = 0;
    // The CPU's experts in a streamed chunk, if all were streamed to the GPUs: number, seconds on
    // the link, of the CPU copying them to pinned memory, and of the GPUs computing them; `cpu`:
    // seconds if the CPU computed them all.
    struct {
      double n = 0, link = 0, copy = 0, gpu = 0, cpu = 0;
    } streamed;
    // Fractions of a replica's expert rows that go to its host's CPUs, to its host's other GPUs, to
    // other hosts with a part of the backbone, and to those without, which have workers.
    double to_cpu = 0, to_near = 0, to_far = 0, to_workers = 0;
    // The expected numbers of other GPUs with a part of the backbone or on its host, and of other
    // hosts with a part of the backbone, to which a token's row goes.
    double gpus_a_token = 0, far_hosts_a_token = 0;
    // The expected number of workers that a token uses, and of those of the host that tokens use
    // most.
    double workers_a_token = 0, most_tokens = 0;
    // The share of tokens that use the GPU worker which most of them use.
    double most_tokens_of_gpu = 0;
    DeviceId busiest_gpu;
    int n_workers = 0;
    int far_host = 0;     // one of the other hosts
    int n_far_hosts = 1;  // hosts of the owners, the backbone's included if it has any
    int n_owners = 1;
    bool sliced = false;
  };
  LayerTime chain(const Stage& stage, int layer, const LayerExperts* experts, double tokens) const;
  LayerTime overlapped(const Stage& stage, int layer, const LayerExperts* experts,
                       double tokens) const;
  void add_backbone(const Stage& stage, int layer, double tokens, LayerTime& t) const;
  double divided_dense_seconds(const Stage& stage, double tokens, const Rates& rates) const;
  ExpertTimes expert_times(const Stage& stage, int layer, const LayerExperts& experts,
                           double tokens) const;
  void add_streamed(const Stage& stage, const ExpertLoad& load, const Rates& cpu,
                    ExpertTimes& e) const;
  static void add_divided(const ExpertTimes& e, LayerTime& t);
  void add_ways(const Stage& stage, const std::vector<ExpertLoad>& loads, ExpertTimes& e) const;
  double exchange_seconds(const Stage& stage, const ExpertTimes& e, double tokens) const;
  double worker_seconds(const Stage& stage, const ExpertTimes& e, double tokens) const;
  double worker_copy_seconds(const ExpertTimes& e, double tokens) const;
  double all_reduce_seconds(const Stage& stage, double tokens) const;

  const PlanInput& in_;
  const Placement& p_;
  const StepShape shape_;
};

// What a request to a worker costs where a machine's description does not say
// (Machine::request_seconds): measured over loopback (docs/measurements/workers.md).
constexpr double kRequestSeconds = 46e-6;

// Seconds of a layer's requests to n workers. One thread makes them all, and each worker answers
// its own: half of a request's cost is on either side.
double requests_seconds(double one_request, int n_workers);

// True if a chunk of this length streams its experts to the GPU.
bool streams(const Placement& placement, double chunk_tokens);

double embedding_seconds(const PlanInput& input, const Placement& placement, double tokens);
// Seconds of the output head for `rows` rows of logits in each of `n_replicas`.
double head_seconds(const PlanInput& input, const Placement& placement, double rows,
                    double n_replicas);
// Seconds to send a step's tokens from stage to stage.
double pipeline_seconds(const PlanInput& input, const Placement& placement, double tokens);

}  // namespace tandem
