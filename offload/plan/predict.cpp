#include "offload/plan/predict.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "offload/plan/layer_time.h"

namespace tandem {
namespace {

using Step = std::function<Phase(const StepShape& shape)>;

void predict_speed(const PlanInput& in, const Placement& p, const Step& step, Prediction& out);
double prefill_seconds(const PlanInput& in, const Placement& p, const Step& step, Prediction& out);
void add_layers(const PlanInput& in, const Placement& p, const StepShape& shape, Phase& phase);
void finish(const PlanInput& in, const Placement& p, const StepShape& shape, Phase& phase);
// Seconds that the slowest host takes to load; 0: the speed of a disk is unknown.
double load_seconds(const Machine& machine, const Prediction& prediction);

}  // namespace

const char* name_of(Part part) {
  constexpr const char* kNames[kNumParts] = {
      "projections", "attention", "dense",    "router",     "shared",  "gpu_experts",
      "cpu_experts", "streaming", "exchange", "all_reduce", "overhead"};
  return kNames[static_cast<int>(part)];
}

Prediction predict(const PlanInput& in, const Placement& p) {
  Prediction out;
  out.memory = memory_by_device(in.config, in.machine, p);
  out.load_seconds = load_seconds(in.machine, out);
  predict_speed(
      in, p, [&](const StepShape& shape) { return predict_step(in, p, shape); }, out);
  return out;
}

Phase predict_step(const PlanInput& in, const Placement& p, StepShape shape) {
  Phase phase;
  add_layers(in, p, shape, phase);
  finish(in, p, shape, phase);
  return phase;
}

StepShape decode_step_shape(const Workload& w, const Placement& p) {
  const double replicas = p.stages.front().dp();
  const double stages = static_cast<double>(p.stages.size());
  // In a pipeline the sequences form one group per stage.
  const double a_replica = std::max(1.0, w.concurrency / replicas / stages);
  return {a_replica, w.prompt_tokens + w.output_tokens / 2.0, false,
          std::min<double>(replicas, w.concurrency)};
}

// All rows of a mixed step pass the layers together, and the sequences' attention comes on top.
double served_step_seconds(const PlanInput& in, const Placement& p, int sequences,
                           int prompt_tokens) {
  const double replicas = p.stages.front().dp();
  Workload w = in.workload;
  w.concurrency = sequences * p.stages.front().dp();
  const auto decode = [&] { return predict_step(in, p, decode_step_shape(w, p)); };
  if (prompt_tokens == 0) return decode().step_seconds;
  const double rows = sequences + prompt_tokens;
  const double context = (std::max(w.prompt_tokens, prompt_tokens) + prompt_tokens) / 2.0;
  const Phase all = predict_step(in, p, {rows, context, true, replicas});
  if (sequences == 0) return all.step_seconds;
  const Phase next = decode();
  return all.step_seconds - all.head_seconds + next.head_seconds +
         next.n_dense * next.dense[Part::kAttention] + next.n_moe * next.moe[Part::kAttention];
}

int Prediction::gpus_used() const {
  return static_cast<int>(std::ranges::count_if(
      memory, [](const DeviceMemory& m) { return !m.device.is_cpu() && m.weights_bytes > 0; }));
}

Prediction StepMemo::speed(const PlanInput& in, const Placement& p, int64_t home) {
  Prediction out;
  predict_speed(
      in, p, [&](const StepShape& shape) { return step(in, p, shape, home); }, out);
  return out;
}

Phase StepMemo::step(const PlanInput& in, const Placement& p, StepShape shape, int64_t home) {
  const bool streamed = shape.prefill && streams(p, shape.tokens_per_replica);
  const Key key = {home,          shape.tokens_per_replica,
                   shape.context, shape.replicas,
                   shape.prefill, shape.prefill ? 1 : p.micro_batches,
                   streamed};
  const auto [known, is_new] = layers_.try_emplace(key);
  if (is_new) {
    PlanInput with = in;
    with.known = &chances_;
    add_layers(with, p, shape, known->second);
  }
  Phase phase = known->second;
  finish(in, p, shape, phase);
  return phase;
}

const std::vector<double>& ChanceCache::of(const RoutingStatistics& routing, int layer,
                                           double tokens, int n_experts) {
  std::vector<double>& chances = known_[{layer, tokens}];
  if (chances.empty())
    for (int e = 0; e < n_experts; ++e) chances.push_back(routing.chance(layer, e, tokens));
  return chances;
}

namespace {

void predict_speed(const PlanInput& in, const Placement& p, const Step& step, Prediction& out) {
  const Workload& w = in.workload;
  out.decode = step(decode_step_shape(w, p));
  out.decode.tokens = w.concurrency;
  out.decode.tokens_per_second = w.concurrency / out.decode.step_seconds;
  out.tokens_per_second_per_user = 1 / out.decode.step_seconds;

  out.time_to_first_token_seconds = prefill_seconds(in, p, step, out);
  out.request_seconds = out.time_to_first_token_seconds + w.output_tokens * out.decode.step_seconds;
  const double all_prompts =
      double{1} * w.concurrency * w.prompt_tokens / out.prefill.tokens_per_second;
  out.output_tokens_per_second = double{1} * w.concurrency * w.output_tokens /
                                 (all_prompts + w.output_tokens * out.decode.step_seconds);
  out.score =
      w.objective == Objective::kLatency ? out.request_seconds : 1 / out.output_tokens_per_second;
}

// Adds the parts of a step outside its layers.
void finish(const PlanInput& in, const Placement& p, const StepShape& shape, Phase& phase) {
  phase.tokens = shape.tokens_per_replica * shape.replicas;
  phase.streamed = shape.prefill && streams(p, shape.tokens_per_replica);
  phase.embedding_seconds = embedding_seconds(in, p, shape.tokens_per_replica);
  const double rows = shape.prefill ? 1 : shape.tokens_per_replica;
  phase.head_seconds = head_seconds(in, p, rows, shape.replicas);
  phase.step_seconds = phase.n_dense * phase.dense.seconds + phase.n_moe * phase.moe.seconds +
                       phase.embedding_seconds + phase.head_seconds +
                       pipeline_seconds(in, p, shape.tokens_per_replica);
  phase.tokens_per_second = phase.tokens / phase.step_seconds;
}

// Returns the seconds of one prompt and sets the prefill phase to its mean step.
double prefill_seconds(const PlanInput& in, const Placement& p, const Step& step, Prediction& out) {
  const Workload& w = in.workload;
  const double chunk = std::min(p.prefill_chunk_tokens, w.prompt_tokens);
  const double n_chunks = std::ceil(w.prompt_tokens / chunk);
  const double mean = w.prompt_tokens / n_chunks;  // tokens per chunk
  const double active = std::min<double>(p.stages.front().dp(), w.concurrency);
  out.prefill = step({mean, (w.prompt_tokens + mean) / 2, true, active});
  const double alone = n_chunks * out.prefill.step_seconds;
  // Stages process different chunks concurrently while there are enough chunks.
  const double in_flight =
      std::min<double>(static_cast<double>(p.stages.size()), n_chunks * w.concurrency / active);
  out.prefill.tokens_per_second *= in_flight;
  return alone / std::min(in_flight, n_chunks);
}

void add_layers(const PlanInput& in, const Placement& p, const StepShape& shape, Phase& phase) {
  const auto add = [](LayerTime& sum, const LayerTime& one, int n) {
    for (int i = 0; i < kNumParts; ++i) sum.parts[i] += n * one.parts[i];
    sum.seconds += n * one.seconds;
  };
  const LayerModel model(in, p, shape);
  for (const Stage& stage : p.stages)
    for (int l = stage.first; l <= stage.last;) {
      // Without statistics, layers with the same placement take the same time.
      int end = l + 1;
      const LayerExperts* home = in.config.is_moe(l) ? experts_of_layer(p, l) : nullptr;
      const int last_alike = home ? std::min(home->last, stage.last) : stage.last;
      if (in.routing.uniform() || !home)
        while (end <= last_alike && in.config.is_moe(end) == in.config.is_moe(l)) ++end;
      const LayerTime time = model.layer(stage, l, home);
      const int n = end - l;
      add(home ? phase.moe : phase.dense, time, n);
      (home ? phase.n_moe : phase.n_dense) += n;
      l = end;
    }
  const auto mean = [](LayerTime& sum, int n) {
    for (double& part : sum.parts) part /= std::max(1, n);
    sum.seconds /= std::max(1, n);
  };
  mean(phase.dense, phase.n_dense);
  mean(phase.moe, phase.n_moe);
}

double load_seconds(const Machine& machine, const Prediction& prediction) {
  std::vector<double> bytes(machine.n_hosts(), 0);
  for (const DeviceMemory& m : prediction.memory)
    bytes[m.device.host] += static_cast<double>(m.weights_bytes);
  double seconds = 0;
  for (int host = 0; host < machine.n_hosts(); ++host) {
    const double rate = machine.host(host).disk_read_bytes_per_second;
    if (bytes[host] == 0) continue;
    if (rate <= 0) return 0;
    seconds = std::max(seconds, bytes[host] / rate);
  }
  return seconds;
}

}  // namespace
}  // namespace tandem
