#include "offload/plan/reasons.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/memory.h"
#include "model/cost.h"
#include "model/kv_layout.h"
#include "model/parameters.h"
#include "offload/plan/candidates.h"
#include "offload/plan/layer_time.h"
#include "offload/plan/moving_experts.h"
#include "offload/plan/placement.h"

namespace tandem {
namespace {

using Words = std::vector<std::string>;

double giga(double n) { return n * 1e-9; }

// The CPU, or the GPU, that has most experts of a layer; without any, the backbone's device.
DeviceId owner_of_kind(const Placement& p, bool cpu);

// Where the experts of all layers are, by kind of device.
struct ExpertLocations {
  int64_t on_cpu = 0, on_gpu = 0, copies = 0;  // (layer, expert) pairs; extra replicas
  int n_owners = 0;
  bool sliced = false;
  WeightFormat format = {DType::kBF16}, format_on_gpu = {DType::kBF16};
  int64_t bytes = 0;
};
ExpertLocations locations_of(const ModelConfig& c, const Placement& p);

void say_backbone(const PlanInput& in, const Placement& p, const Prediction& now, Words& words);
void say_embedding(const PlanInput& in, const Placement& p, Words& words);
void say_head(const PlanInput& in, const Placement& p, const Prediction& now, Words& words);
void say_cache(const PlanInput& in, const Placement& p, Words& words);
void say_experts(const PlanInput& in, const Placement& p, Words& words);
void say_hot_experts(const PlanInput& in, const Placement& p, const Prediction& now, Words& words);
void say_moving_experts(const Placement& p, const Prediction& now, Words& words);
void say_slices(const PlanInput& in, const Placement& p, const Prediction& now, Words& words);
void say_expert_parallel(const PlanInput& in, const Placement& p, Words& words);
void say_rows(const PlanInput& in, const Placement& p, const Prediction& now, Words& words);
void say_prefill(const PlanInput& in, const Placement& p, const Prediction& now, Words& words);
void say_overlap(const PlanInput& in, const Placement& p, const Prediction& now, Words& words);
void say_wish(const PlanInput& in, const Prediction& now, Words& words);
void say_efficiency(const PlanInput& in, const Placement& p, Words& words);

}  // namespace

Words reasons_in_words(const PlanInput& in, const Placement& p, const Prediction& now) {
  Words words;
  say_backbone(in, p, now, words);
  say_embedding(in, p, words);
  say_head(in, p, now, words);
  say_cache(in, p, words);
  if (in.config.router.n_experts > 0) {
    say_experts(in, p, words);
    say_slices(in, p, now, words);
    say_hot_experts(in, p, now, words);
    say_moving_experts(p, now, words);
    say_expert_parallel(in, p, words);
    say_rows(in, p, now, words);
  }
  say_prefill(in, p, now, words);
  say_overlap(in, p, now, words);
  say_wish(in, now, words);
  say_efficiency(in, p, words);
  return words;
}

std::string limit_in_words(const PlanInput& in, const Placement& p, const Prediction& now) {
  const Phase& d = now.decode;
  int best = 0;
  double most = 0;
  for (int i = 0; i < kNumParts; ++i) {
    const double all = d.n_dense * d.dense.parts[i] + d.n_moe * d.moe.parts[i];
    if (all > most) most = all, best = i;
  }
  const auto part = static_cast<Part>(best);
  std::string what = name_of(part);
  std::replace(what.begin(), what.end(), '_', ' ');
  const bool cpu = part == Part::kCpuExperts || p.stages[0].devices[0].is_cpu();
  const bool experts = part == Part::kCpuExperts || part == Part::kGpuExperts;
  const Rates rates = rates_of(in.machine, experts ? owner_of_kind(p, cpu) : p.stages[0].devices[0],
                               p.numa_columns);
  const std::string at =
      part == Part::kExchange || part == Part::kAllReduce || part == Part::kOverhead
          ? ""
          : fmt::format(" (a {} that reads {:.0f} GB/s)", cpu ? "CPU" : "GPU",
                        giga(rates.read_bytes_per_second));
  return fmt::format("decode: {}{} take {:.1f} of {:.1f} ms a step", what, at, milli(most),
                     milli(d.step_seconds));
}

namespace {

// Experts of GPUs go to the CPUs that have others of the layer, in proportion, or to `cpu`.
void give_to_cpus(LayerExperts& layer, DeviceId cpu) {
  std::vector<ExpertGroup> groups;
  std::vector<int> hot;
  double n_cold = 0;
  for (const ExpertGroup& g : layer.groups) {
    if (!g.owners[0].is_cpu()) {
      hot.insert(hot.end(), g.experts.begin(), g.experts.end());
      continue;
    }
    n_cold += static_cast<double>(g.experts.size());
    groups.push_back(g);
  }
  if (groups.empty()) groups.push_back({{}, layer.groups[0].format, {cpu}});
  size_t given = 0;
  double before = 0;
  for (ExpertGroup& g : groups) {
    before += static_cast<double>(g.experts.size());
    const size_t end =
        &g == &groups.back() ? hot.size() : static_cast<size_t>(before / n_cold * hot.size());
    for (; given < end; ++given) g.experts.push_back(hot[given]);
    std::sort(g.experts.begin(), g.experts.end());
  }
  layer.groups = std::move(groups);
}

DeviceId owner_of_kind(const Placement& p, bool cpu) {
  DeviceId best = p.stages[0].devices[0];
  size_t most = 0;
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& g : l.groups)
      for (const DeviceId d : g.owners)
        if (d.is_cpu() == cpu && g.experts.size() > most) most = g.experts.size(), best = d;
  return best;
}

ExpertLocations locations_of(const ModelConfig& c, const Placement& p) {
  ExpertLocations homes;
  std::vector<DeviceId> owners;
  for (const LayerExperts& l : p.layers) {
    const int64_t n_layers = moe_layers(c, l.first, l.last);
    for (const ExpertGroup& g : l.groups) {
      const auto n = n_layers * static_cast<int64_t>(g.experts.size());
      (g.owners[0].is_cpu() ? homes.on_cpu : homes.on_gpu) += n;
      if (!g.sliced) homes.copies += n * (static_cast<int64_t>(g.owners.size()) - 1);
      homes.sliced |= g.sliced;
      if (g.owners[0].is_cpu() || homes.on_cpu == 0) homes.format = g.format;
      if (!g.owners[0].is_cpu()) homes.format_on_gpu = g.format;
      homes.bytes += n * routed_expert_bytes(c, g.format);
      owners.insert(owners.end(), g.owners.begin(), g.owners.end());
    }
  }
  std::sort(owners.begin(), owners.end());
  homes.n_owners = static_cast<int>(std::unique(owners.begin(), owners.end()) - owners.begin());
  return homes;
}

void say_backbone(const PlanInput& in, const Placement& p, const Prediction& now, Words& words) {
  int64_t bytes = 0;
  for (int l = 0; l < in.config.n_layers; ++l)
    bytes += backbone_layer_bytes(in.config, in.config.is_moe(l), p.backbone).total();
  const Stage& s = p.stages[0];
  std::string text =
      fmt::format("backbone ({} in {}, {:.2f} GB) on {}", "attention, dense and shared FFN",
                  format_name(p.backbone), gigabytes(bytes), device_name(s.devices[0]));
  if (s.devices.size() > 1 || p.stages.size() > 1)
    text += fmt::format(" and {} more: {} stage(s) of {} replica(s) x {}-way tensor parallel",
                        p.stages.size() * s.devices.size() - 1, p.stages.size(), s.dp(), s.tp);
  text +=
      fmt::format(", {:.2f} ms of a {:.2f} ms step",
                  milli(now.decode.n_dense * now.decode.dense.seconds +
                        now.decode.n_moe *
                            (now.decode.moe[Part::kProjections] + now.decode.moe[Part::kAttention] +
                             now.decode.moe[Part::kRouter] + now.decode.moe[Part::kShared])),
                  milli(now.decode.step_seconds));
  words.push_back(text);
  for (int ways = 2; ways <= in.machine.n_all_gpus(); ways *= 2)
    if (const auto refusal = tensor_parallel_refusal(in.config, ways)) {
      words.push_back(fmt::format("tensor parallel {} refused: {}", ways, *refusal));
      break;
    }
}

void say_embedding(const PlanInput& in, const Placement& p, Words& words) {
  if (p.stages[0].devices[0].is_cpu()) return;
  Placement other = p;
  other.embedding_on_cpu = !p.embedding_on_cpu;
  constexpr double kTokens = 1024;
  const double cpu = embedding_seconds(in, p.embedding_on_cpu ? p : other, kTokens);
  const double gpu = embedding_seconds(in, p.embedding_on_cpu ? other : p, kTokens);
  const double gb = gigabytes(embedding_bytes(in.config)) / p.stages[0].tp;
  words.push_back(p.embedding_on_cpu
                      ? fmt::format("embedding on CPU: saves {:.2f} GB of GPU memory, costs {:.2f} "
                                    "ms per 1,024 tokens",
                                    gb, milli(cpu - gpu))
                      : fmt::format("embedding on GPU: takes {:.2f} GB of its memory, saves {:.2f} "
                                    "ms per 1,024 tokens",
                                    gb, milli(cpu - gpu)));
}

void say_head(const PlanInput& in, const Placement& p, const Prediction& now, Words& words) {
  const Stage& last = p.stages.back();
  const double gb = gigabytes(embedding_bytes(in.config));
  if (p.head_on_cpu && !last.devices[0].is_cpu())
    words.push_back(
        fmt::format("head on CPU: saves {:.2f} GB of GPU memory, takes {:.2f} ms a step", gb,
                    milli(now.decode.head_seconds)));
  if (last.devices.size() == 1 || p.head_on_cpu || last.devices[0].is_cpu()) return;
  Placement other = p;
  other.head_replicated = !p.head_replicated;
  const double then = predict(in, other).decode.head_seconds;
  words.push_back(fmt::format(
      "head {}: {:.2f} ms a step, {} it would take {:.2f}",
      p.head_replicated
          ? fmt::format("whole in each replica (DP head, {:.2f} GB each, no exchange of logits)",
                        gb)
          : std::string("shared by all devices"),
      milli(now.decode.head_seconds), p.head_replicated ? "shared" : "replicated", milli(then)));
}

void say_cache(const PlanInput& in, const Placement& p, Words& words) {
  const Stage& s = p.stages[0];
  const int64_t a_token = kv_bytes_per_token(in.config, p.kv_type);
  const bool fp8 = p.kv_type == DType::kF8E4M3;
  std::string text = fmt::format(
      "KV cache in {} where attention is computed: {} tokens x {} B = {:.2f} GB in each of {} "
      "replica(s)",
      fp8 ? "FP8" : "BF16", p.kv_tokens, a_token, gigabytes(p.kv_tokens * a_token), s.dp());
  if (fp8 && !in.workload.kv)
    text += fmt::format("; in BF16 it would take {:.2f} GB, and does not fit there",
                        gigabytes(p.kv_tokens * kv_bytes_per_token(in.config)));
  if (s.tp > 1)
    text += fmt::format(
        "; the latent is one head, so the {} ranks of a replica each hold all of it", s.tp);
  words.push_back(text);
}

void say_experts(const PlanInput& in, const Placement& p, Words& words) {
  const ExpertLocations homes = locations_of(in.config, p);
  const bool stored = homes.format.dtype == stored_expert_format(in.config).dtype;
  const bool alike = homes.on_gpu == 0 || homes.format_on_gpu == homes.format;
  const int64_t one = routed_expert_bytes(in.config, homes.format);
  words.push_back(fmt::format(
      "routed experts in {} ({}{}): {}{} = {:.1f} GB, {} in CPU memory, {} on GPUs",
      format_name(homes.format), stored ? "as stored" : "smaller than stored",
      alike ? "" : ", on GPUs in " + format_name(homes.format_on_gpu), homes.on_cpu + homes.on_gpu,
      alike ? fmt::format(" x {:.2f} MB", static_cast<double>(one) * 1e-6) : "",
      gigabytes(homes.bytes), homes.on_cpu, homes.on_gpu));
}

void say_hot_experts(const PlanInput& in, const Placement& p, const Prediction& now, Words& words) {
  const ExpertLocations homes = locations_of(in.config, p);
  if (homes.on_cpu == 0 || homes.on_gpu == 0) return;
  Placement without = p;
  for (LayerExperts& l : without.layers) give_to_cpus(l, owner_of_kind(p, true));
  const double then = predict(in, without).decode.step_seconds;
  words.push_back(fmt::format(
      "hot experts on GPU: {} ({}), as many as help and fit: {:.2f} ms a step instead of {:.2f}",
      homes.on_gpu, in.routing.uniform() ? "no statistics: any" : "by measured frequency",
      milli(now.decode.step_seconds), milli(then)));
}

void say_moving_experts(const Placement& p, const Prediction& now, Words& words) {
  if (!p.room_to_move) return;
  if (const auto why = why_experts_stay(p)) {
    words.push_back(fmt::format(
        "experts cannot move here while a server answers: {}; no memory is kept for it", *why));
    return;
  }
  int64_t most = 0;
  int n = 0;
  for (const DeviceMemory& m : now.memory)
    if (m.spare_bytes > most) most = m.spare_bytes, n = spare_experts(p, m.device);
  words.push_back(
      fmt::format("room for experts that move while a server answers: {} of {:.2f} MB on a device",
                  n, static_cast<double>(most) * 1e-6 / n));
}

void say_slices(const PlanInput& in, const Placement& p, const Prediction& now, Words& words) {
  if (locations_of(in.config, p).on_cpu == 0) return;
  const DeviceId owner = owner_of_kind(p, true);
  const int kind = in.machine.kind_of(owner.host);
  const size_t n_nodes = in.machine.of_kind(kind).nodes.size();
  if (n_nodes == 1) return;
  if (p.numa_columns.empty() || p.numa_columns[kind].empty()) {
    words.push_back(fmt::format(
        "experts not sliced: {} columns give {} NUMA nodes no parts that are multiples of {}",
        in.config.expert_dim, n_nodes, kSplitMultiple));
    return;
  }
  Placement without = p;
  without.numa_columns.clear();
  words.push_back(fmt::format(
      "CPU experts sliced by NUMA node ({} of {} columns): every node reads its own memory, {:.0f} "
      "GB/s together, {:.2f} ms a step instead of {:.2f} when interleaved",
      fmt::join(p.numa_columns[kind], " + "), in.config.expert_dim,
      giga(rates_of(in.machine, owner, p.numa_columns).read_bytes_per_second),
      milli(now.decode.step_seconds), milli(predict(in, without).decode.step_seconds)));
}

void say_expert_parallel(const PlanInput& in, const Placement& p, Words& words) {
  const ExpertLocations homes = locations_of(in.config, p);
  const ModelConfig& c = in.config;
  if (homes.sliced)
    words.push_back(fmt::format("experts tensor parallel: each of {} devices has {} of {} columns",
                                p.stages[0].tp, c.expert_dim / p.stages[0].tp, c.expert_dim));
  if (homes.sliced || homes.n_owners < 2 || p.stages.size() > 1) return;
  if (homes.on_cpu > 0 && homes.on_gpu > 0) return;
  const bool gpu = homes.on_gpu > 0;
  const Rates rates = rates_of(in.machine, owner_of_kind(p, !gpu), p.numa_columns);
  words.push_back(fmt::format(
      "expert parallel {} (useful up to {} = {} routed + {} shared{}), {} redundant experts a "
      "layer; no layer is faster than reading one expert, {:.1f} us",
      homes.n_owners, most_useful_ep(c), c.router.n_experts, c.n_shared_experts,
      homes.n_owners > most_useful_ep(c)
          ? ", and beyond it where arithmetic takes longer than reading"
          : "",
      homes.copies * c.router.n_experts / (homes.on_cpu + homes.on_gpu),
      one_expert_read_seconds(c, rates.read_bytes_per_second) * 1e6));
  const double batch = tokens_per_expert(c, in.workload.concurrency);
  const double width = static_cast<double>(bits_of(homes.format.dtype)) / 8;
  words.push_back(fmt::format(
      "an expert gets {:.1f} tokens a step; its arithmetic would take as long as reading it at "
      "{:.0f}, which needs at least {:.1f}-way data parallel",
      batch,
      ridge_tokens_per_expert(peak_for(rates, homes.format.dtype, gpu), rates.read_bytes_per_second,
                              width),
      least_dp_for_compute_bound(c)));
  std::vector<DeviceId> backbone;
  for (const Stage& s : p.stages)
    backbone.insert(backbone.end(), s.devices.begin(), s.devices.end());
  if (gpu && std::find(backbone.begin(), backbone.end(), p.layers[0].groups[0].owners[0]) ==
                 backbone.end())
    words.push_back(
        fmt::format("separate roles: {} GPUs hold only the backbone and KV cache, {} only "
                    "experts",
                    backbone.size(), homes.n_owners));
}

void say_rows(const PlanInput& in, const Placement& p, const Prediction& now, Words& words) {
  if (!rows_travel(p)) {
    if (in.workload.expert_rows != ExpertRows::kExact)
      words.push_back(fmt::format("--ep-rows {} changes nothing: no rows travel between ranks",
                                  name_of(in.workload.expert_rows)));
    return;
  }
  const bool fp8 = p.expert_rows == ExpertRows::kFp8;
  Placement other = p;
  other.expert_rows = fp8 ? ExpertRows::kExact : ExpertRows::kFp8;
  const Prediction then = predict(in, other);
  const auto kilobytes = [&](const Placement& placement) {
    return static_cast<double>(row_bytes(in.config, placement.expert_rows).both()) * 1e-3;
  };
  words.push_back(fmt::format(
      "rows between ranks {} ({:.1f} KB a row and its sum): {:.2f} ms a step, {:.1f} tokens/s of "
      "prompts; {}{:.1f} KB): {:.2f} ms, {:.1f} tokens/s",
      fp8 ? "in FP8, sums in BF16" : "exact", kilobytes(p), milli(now.decode.step_seconds),
      now.prefill.tokens_per_second, fp8 ? "exact (" : "with --ep-rows fp8 (less accurate, ",
      kilobytes(other), milli(then.decode.step_seconds), then.prefill.tokens_per_second));
}

void say_prefill(const PlanInput& in, const Placement& p, const Prediction& now, Words& words) {
  std::string text = fmt::format("prompts in chunks of {} tokens", p.prefill_chunk_tokens);
  if (locations_of(in.config, p).on_cpu > 0 && !p.stages[0].devices[0].is_cpu()) {
    if (p.stream_from_tokens > 0) {
      Placement without = p;
      without.stream_from_tokens = 0;
      text += fmt::format(
          "; from {} tokens on, streaming some of a layer's experts to the GPU at {:.0f} GB/s "
          "beats computing all on the CPU ({:.1f} tokens/s instead of {:.1f})",
          p.stream_from_tokens,
          giga(in.machine.host(p.stages[0].devices[0].host).gpus[0].h2d_bytes_per_second),
          now.prefill.tokens_per_second, predict(in, without).prefill.tokens_per_second);
    } else {
      const int threshold = least_streamed_chunk(in, p);
      text +=
          threshold > 0
              ? fmt::format("; streaming experts to the GPU would pay from {} tokens on", threshold)
              : std::string("; streaming experts to the GPU never pays: the CPU is faster");
    }
  }
  words.push_back(text);
}

void say_overlap(const PlanInput& in, const Placement& p, const Prediction& now, Words& words) {
  if (in.workload.concurrency < 2 || p.stages[0].devices[0].is_cpu()) return;
  const bool alone = p.stages.size() == 1 && p.stages[0].devices.size() == 1;
  if (!alone && p.stages[0].dp() == 1) return;  // its ranks add up sums, which nothing hides
  Placement other = p;
  other.micro_batches = 3 - p.micro_batches;
  const double then = predict(in, other).decode.step_seconds;
  words.push_back(
      fmt::format("{}: {:.2f} ms a step, {} {:.2f}",
                  p.micro_batches == 2 ? "two micro-batches overlap" : "one micro-batch",
                  milli(now.decode.step_seconds),
                  p.micro_batches == 2 ? "without" : "with two that overlap", milli(then)));
}

void say_wish(const PlanInput& in, const Prediction& now, Words& words) {
  const double wanted = in.workload.tokens_per_second_per_user;
  if (wanted > 0)
    words.push_back(fmt::format(
        "each user gets {:.1f} tokens/s, {} the {:.1f} wanted", now.tokens_per_second_per_user,
        now.tokens_per_second_per_user >= wanted ? "at least" : "less than", wanted));
  const double most = in.workload.first_token_seconds;
  if (most > 0)
    words.push_back(
        fmt::format("a request's first token comes after {:.2f} s, {} the {:g} s wanted",
                    now.time_to_first_token_seconds,
                    now.time_to_first_token_seconds <= most ? "within" : "later than", most));
}

// Reports efficiencies of CPUs only, because none of a GPU has been measured.
void say_efficiency(const PlanInput& in, const Placement& p, Words& words) {
  if (in.machine.n_unmeasured_gpus > 0)
    words.push_back(
        fmt::format("{} GPU(s) of this machine are not used: their rates are "
                    "unknown; describe them in a machine file",
                    in.machine.n_unmeasured_gpus));
  if (!p.stages[0].devices[0].is_cpu() && locations_of(in.config, p).on_cpu == 0) return;
  std::string measured;
  for (const EfficiencyCurve& c : in.machine.curves)
    measured += fmt::format("{}{}{}", measured.empty() ? "" : ", ",
                            c.format.empty() ? "attention " : c.format + " ", c.work);
  words.push_back(
      measured.empty()
          ? fmt::format("efficiency of the CPU's kernels relative to these rates: defaults of "
                        "{}; `tandem bench machine --curves` measures this machine's",
                        in.machine.isa)
          : fmt::format("efficiency of the CPU's kernels relative to these rates: as measured "
                        "on this machine for {}; otherwise defaults of {}",
                        measured, in.machine.isa));
}

}  // namespace

std::string balance_in_words(const PlacedBalance& b) {
  const std::string eplb =
      b.eplb == 0 ? "EPLB's needs as many on every rank"
                  : fmt::format("EPLB's {:.3f}, better in {} layers", b.eplb, b.n_by_eplb);
  return fmt::format(
      "by measured use, the mean load of ranks is {:.3f} of the busiest one's (mean of {} layers); "
      "the planner's own assignment reaches {:.3f}, {}",
      b.placed, b.n_layers, b.own, eplb);
}

}  // namespace tandem
