#include "cli/inspect.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "model/checkpoint.h"
#include "model/kv_layout.h"
#include "model/parameters.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json config_json(const ModelConfig& c) {
  const RouterConfig& r = c.router;
  Json json = {
      {"hidden_size", c.dim},
      {"vocab_size", c.vocab},
      {"dense_layers", std::min(c.n_dense_layers, c.n_layers)},
      {"dense_width", c.dense_dim},
      {"attention_heads", c.mla.n_heads},
      {"q_lora_rank", c.mla.q_rank},
      {"kv_lora_rank", c.mla.kv_rank},
      {"head_dims", {{"nope", c.mla.nope_dim}, {"rope", c.mla.rope_dim}, {"v", c.mla.v_dim}}},
      {"routed_experts", r.n_experts},
      {"experts_per_token", r.n_active},
      {"expert_groups", r.n_groups},
      {"groups_per_token", r.n_active_groups},
      {"expert_width", c.expert_dim},
      {"shared_experts", c.n_shared_experts},
      {"mtp_layers", c.n_mtp_layers},
      {"tied_head", c.tied_head},
      {"rope_theta", c.rope.theta},
      {"yarn_factor", c.rope.yarn ? Json(c.rope.factor) : Json(nullptr)},
      {"max_context", c.max_context},
      {"fp8_block", c.scale_block > 0 ? Json(c.scale_block) : Json(nullptr)},
      {"expert_int4_group", c.expert_group > 0 ? Json(c.expert_group) : Json(nullptr)}};
  return json;
}

Json parameters_json(const ModelConfig& config) {
  const ParameterCounts n = count_parameters(config);
  return {{"total", n.total},
          {"activated", n.activated},
          {"routed_experts", n.routed_experts},
          {"attention", n.attention},
          {"shared_experts", n.shared_experts},
          {"dense_mlp", n.dense_mlp},
          {"embedding", n.embedding},
          {"head", n.head},
          {"router", n.router},
          {"norms", n.norms},
          {"mtp", n.mtp},
          {"mtp_stored", n.mtp_stored}};
}

std::string_view class_of(WeightUse use) {
  switch (use) {
    case WeightUse::kEmbedding:
      return "embedding";
    case WeightUse::kHead:
      return "head";
    case WeightUse::kMtpProjection:
      return "mtp";
    case WeightUse::kNorm:
      return "norms";
    case WeightUse::kAttention:
      return "attention";
    case WeightUse::kDense:
      return "dense_mlp";
    case WeightUse::kShared:
      return "shared_experts";
    case WeightUse::kExpert:
      return "routed_experts";
    case WeightUse::kRouter:
    case WeightUse::kRouterBias:
      return "router";
  }
  return "";
}

// Scales are counted with the weights that they scale.
Json bytes_by_class(ModelWeights& weights, const ModelConfig& config, int64_t total) {
  constexpr std::string_view kClasses[] = {"routed_experts", "attention", "shared_experts",
                                           "dense_mlp",      "embedding", "head",
                                           "router",         "norms"};
  std::map<std::string_view, int64_t> bytes;
  for_each_weight(weights, config, [&](const WeightSpec& spec, const QuantView& w) {
    const bool latent_norm = spec.name.find(".self_attn.") != std::string::npos;
    bytes[latent_norm ? "attention" : class_of(spec.use)] +=
        w.q.rows * w.q.row_bytes() + w.scale.rows * w.scale.row_bytes();
  });
  Json json;
  for (const std::string_view name : kClasses) {
    json[std::string(name)] = bytes[name];
    total -= bytes[name];
  }
  json["not_loaded"] = total;
  return json;
}

Json kv_alternatives_json(const ModelConfig& config) {
  const KvAlternatives kv = kv_alternatives(config);
  return {{"latent", kv_bytes_per_token(config)},
          {"restored", kv.restored},
          {"multi_head", kv.multi_head},
          {"grouped_query", kv.grouped_query},
          {"groups", kv.groups},
          {"multi_query", kv.multi_query}};
}

Json tensors_json(const WeightStore& store) {
  Json list = Json::array();
  for (const StoredTensor& t : store.tensors())
    list.push_back({{"name", t.name},
                    {"dtype", t.type->name},
                    {"shape", t.shape},
                    {"bytes", t.bytes},
                    {"file", store.files()[t.file].path()}});
  return list;
}

}  // namespace

Json inspect_report(const ModelConfig& config, const WeightStore& store, bool list_tensors) {
  ModelWeights weights = stored_weights(store, config);
  std::map<std::string_view, int64_t> by_dtype;
  for (const StoredTensor& t : store.tensors()) by_dtype[t.type->name] += t.bytes;

  Json report = {{"architecture", config.architecture},
                 {"directory", store.directory()},
                 {"layers", config.n_layers},
                 {"config", config_json(config)},
                 {"parameters", parameters_json(config)},
                 {"bytes", Json::object()},
                 {"bytes_by_class", bytes_by_class(weights, config, store.total_bytes())},
                 {"total_bytes", store.total_bytes()},
                 {"kv_bytes_per_token", kv_bytes_per_token(config)},
                 {"kv_alternatives", kv_alternatives_json(config)},
                 {"files", store.files().size()},
                 {"n_tensors", store.tensors().size()},
                 {"warnings", checkpoint_warnings(weights)}};
  for (const auto& [dtype, bytes] : by_dtype) report["bytes"][std::string(dtype)] = bytes;
  if (list_tensors) report["tensors"] = tensors_json(store);
  return report;
}

}  // namespace tandem
