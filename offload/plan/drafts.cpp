#include "offload/plan/drafts.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/memory.h"
#include "model/cost.h"
#include "offload/plan/layer_time.h"

namespace tandem {
namespace {

constexpr int kMostDrafts = 4;  // considered where the user names no number

StepShape decode_shape(const PlanInput& in, const Placement& p, int n_drafts);
double different_experts(const PlanInput& in, int n_drafts);
double pass_seconds(const PlanInput& in, const Placement& p);
int64_t mtp_layer_bytes(const ModelConfig& c, const Placement& p);
int64_t free_bytes(const std::vector<DeviceMemory>& memory);
bool is_pipeline(const Placement& p) { return p.stages.size() > 1; }

}  // namespace

double expected_tokens(int n_drafts, double acceptance) {
  double tokens = 1, all_accepted = 1;
  for (int i = 0; i < n_drafts; ++i) tokens += all_accepted *= acceptance;
  return tokens;
}

const DraftedStep& DraftPlan::best() const {
  return *std::ranges::find(steps, n_best, &DraftedStep::n_drafts);
}

DraftPlan plan_drafts(const PlanInput& in, const Placement& p,
                      const std::vector<DeviceMemory>& memory) {
  const Workload& w = in.workload;
  DraftPlan plan = {.acceptance = w.acceptance, .steps = {}};
  if (in.config.n_mtp_layers > 0) plan.mtp_bytes = mtp_layer_bytes(in.config, p);
  plan.with_mtp = plan.mtp_bytes > 0 && !is_pipeline(p) && plan.mtp_bytes <= free_bytes(memory);
  const double pass = plan.with_mtp ? pass_seconds(in, p) : 0;
  const int first = w.draft_tokens.value_or(1), last = w.draft_tokens.value_or(kMostDrafts);
  const auto add = [&](int n) {
    const double tokens = expected_tokens(n, w.acceptance), draft_seconds = n * pass;
    const double seconds = predict_step(in, p, decode_shape(in, p, n)).step_seconds + draft_seconds;
    plan.steps.push_back({.n_drafts = n,
                          .tokens = tokens,
                          .experts = different_experts(in, n),
                          .draft_seconds = draft_seconds,
                          .step_seconds = seconds,
                          .tokens_per_second = w.concurrency * tokens / seconds});
  };
  add(0);
  for (int n = std::max(1, first); n <= last; ++n) add(n);
  plan.n_best = std::ranges::max_element(plan.steps, {}, &DraftedStep::tokens_per_second)->n_drafts;
  return plan;
}

std::string drafts_in_words(const DraftPlan& d) {
  if (d.steps.size() == 1) return "off";
  if (d.n_best > 0)
    return fmt::format("k = {} at acceptance {:g}: {:.2f} times the tokens/s ({:.2f})", d.n_best,
                       d.acceptance, d.times(d.best()), d.best().tokens_per_second);
  const DraftedStep& least = d.steps[1];
  return fmt::format("off: k = {} at acceptance {:g} costs, {:.2f} times the tokens/s",
                     least.n_drafts, d.acceptance, d.times(least));
}

std::string why_in_words(const PlanInput& in, const Placement& p, const DraftPlan& d) {
  if (d.steps.size() == 1) return "no drafts, as asked";
  const DraftedStep& step = d.n_best > 0 ? d.best() : d.steps[1];
  const DraftedStep& without = d.steps[0];
  std::string text = fmt::format(
      "drafts from {}: k = {} {} {:.2f} tokens in a step of {:.2f} ms, {:.2f} of which are "
      "drafting, instead of 1 in {:.2f} ms",
      d.with_mtp ? "the MTP layer" : "prompt lookup", step.n_drafts,
      d.n_best > 0 ? "brings" : "would bring", step.tokens, step.step_seconds * 1e3,
      step.draft_seconds * 1e3, without.step_seconds * 1e3);
  if (step.experts > 0)
    text += fmt::format("; a layer uses {:.1f} different experts instead of {:.1f}, {}",
                        step.experts, without.experts,
                        in.routing.knows_neighbours() ? "as measured of neighbouring tokens"
                                                      : "if tokens choose independently");
  if (d.with_mtp)
    text += fmt::format("; the MTP layer takes {:.1f} GB more", gigabytes(d.mtp_bytes));
  else if (d.mtp_bytes > 0 && is_pipeline(p))
    text += "; the stages of a pipeline do not compute the MTP layer";
  else if (d.mtp_bytes > 0)
    text += fmt::format("; there is no room for the MTP layer, {:.1f} GB", gigabytes(d.mtp_bytes));
  return text;
}

namespace {

StepShape decode_shape(const PlanInput& in, const Placement& p, int n_drafts) {
  StepShape shape = decode_step_shape(in.workload, p);
  shape.n_drafts = n_drafts;
  shape.tokens_per_replica *= shape.tokens_per_sequence();
  return shape;
}

// The mean over MoE layers of the different experts that all sequences choose.
double different_experts(const PlanInput& in, int n_drafts) {
  const ModelConfig& c = in.config;
  const double tokens = in.workload.concurrency * in.routing.independent_tokens(1 + n_drafts);
  double sum = 0;
  int n_layers = 0;
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    ++n_layers;
    for (int e = 0; e < c.router.n_experts; ++e) sum += in.routing.chance(l, e, tokens);
  }
  return sum / std::max(1, n_layers);
}

// The MTP layer drafts one token of every sequence: eh_proj [dim, 2 dim] in BF16, a layer of the
// model, and the output head.
double pass_seconds(const PlanInput& in, const Placement& p) {
  const ModelConfig& c = in.config;
  const StepShape shape = decode_shape(in, p, 0);
  const Stage& stage = p.stages.back();
  const int layer = c.n_layers - 1;
  const LayerExperts* experts = c.is_moe(layer) ? experts_of_layer(p, layer) : nullptr;
  const double weights = 2.0 * c.dim * c.dim / stage.tp;
  const double n = shape.tokens_per_replica;
  const Rates rates = rates_of(in.machine, stage.devices[0], p.numa_columns);
  return product_seconds(rates, Product::kDense, DType::kBF16,
                         {weights * kBf16Bytes, 2 * weights * n, n}) +
         LayerModel(in, p, shape).layer(stage, layer, experts).seconds +
         head_seconds(in, p, n, shape.replicas);
}

int64_t mtp_layer_bytes(const ModelConfig& c, const Placement& p) {
  const int layer = c.n_layers - 1;
  int64_t bytes = 2 * int64_t{c.dim} * c.dim * kBf16Bytes +
                  backbone_layer_bytes(c, c.is_moe(layer), p.backbone).total();
  if (const LayerExperts* experts = c.is_moe(layer) ? experts_of_layer(p, layer) : nullptr)
    for (const ExpertGroup& group : experts->groups)
      bytes += std::ssize(group.experts) * routed_expert_bytes(c, group.format);
  return c.n_mtp_layers * bytes;
}

// The free bytes of the devices that the placement uses.
int64_t free_bytes(const std::vector<DeviceMemory>& memory) {
  int64_t bytes = 0;
  for (const DeviceMemory& m : memory)
    if (m.weights_bytes > 0) bytes += m.free_bytes();
  return bytes;
}

}  // namespace
}  // namespace tandem
