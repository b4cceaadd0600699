#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/check.h"
#include "io/json.h"
#include "model/config_json.h"
#include "model/rope.h"

namespace tandem {
namespace {

constexpr int64_t kMaxFileBytes = 10'000'000;
// Far above the sizes of any model, and low enough that sums of products of two sizes fit int64.
constexpr int kMaxSize = 1 << 24;
constexpr int kMaxHeads = 1 << 16;
constexpr int kMaxLayers = 1024;
constexpr int kMaxExperts = 4096;
constexpr double kMaxParameters = 1e15;
constexpr double kMaxFactor = 1e6;  // limit of scales and ratios

const char* const kArchitectures =
    "supported are DeepseekV2ForCausalLM, DeepseekV3ForCausalLM and KimiK2ForCausalLM";

// Defaults of the models' own configuration classes (configuration_deepseek.py) for missing keys.
struct FamilyDefaults {
  int n_dense_layers, max_context;
  int n_shared_experts, n_groups, n_active_groups;
  const char* scoring;
  const char* topk_method;
  bool normalize;
  double scale;
};
constexpr FamilyDefaults kV2 = {0, 2048, 0, 1, 1, "softmax", "greedy", false, 1.0};
constexpr FamilyDefaults kV3 = {3, 4096, 1, 8, 4, "sigmoid", "noaux_tc", true, 2.5};

std::string read_architecture(const ConfigJson& json);
void refuse_variants(const ConfigJson& json);
MlaConfig read_attention(const ConfigJson& json);
RopeConfig read_rope(const ConfigJson& json);
RouterConfig read_router(const ConfigJson& json, const FamilyDefaults& defaults);
void read_quantization(const ConfigJson& json, ModelConfig& config);
void read_token_ids(const ConfigJson& json, ModelConfig& config);
void check_sizes(const ModelConfig& config, std::string_view source);

}  // namespace

ModelConfig ModelConfig::from_directory(const std::string& directory) {
  require_folder(directory);
  const std::filesystem::path folder(directory);
  const std::string path = (folder / "config.json").string();
  std::error_code unreadable;
  require(std::filesystem::exists(path, unreadable) || unreadable,
          "{} has no config.json: name the folder of a checkpoint", directory);
  ModelConfig config = from_json(read_text_file(path, kMaxFileBytes), path);
  const std::string generation = (folder / "generation_config.json").string();
  if (std::filesystem::exists(generation))
    read_token_ids(ConfigJson(read_text_file(generation, kMaxFileBytes), generation), config);
  return config;
}

ModelConfig ModelConfig::from_json(std::string_view text, std::string_view source_name) {
  const ConfigJson json(text, source_name);
  ModelConfig c;
  c.architecture = read_architecture(json);
  refuse_variants(json);
  const FamilyDefaults& defaults = c.architecture == "DeepseekV2ForCausalLM" ? kV2 : kV3;

  c.dim = json.integer("hidden_size", 1, kMaxSize);
  c.vocab = json.integer("vocab_size", 1, kMaxSize);
  c.n_layers = json.integer("num_hidden_layers", 1, kMaxLayers);
  c.n_dense_layers = json.integer("first_k_dense_replace", 0, c.n_layers,
                                  std::min(defaults.n_dense_layers, c.n_layers));
  c.moe_layer_freq = json.integer("moe_layer_freq", 1, kMaxLayers, 1);
  c.dense_dim = json.integer("intermediate_size", 1, kMaxSize);
  c.n_mtp_layers = json.integer("num_nextn_predict_layers", 0, kMaxLayers, 0);
  c.max_context = json.integer("max_position_embeddings", 1, kMaxSize, defaults.max_context);
  c.tied_head = json.boolean("tie_word_embeddings", false);
  c.norm_eps = static_cast<float>(json.number("rms_norm_eps", 1e-30, 1, 1e-6));
  c.mla = read_attention(json);
  c.rope = read_rope(json);

  c.router = read_router(json, defaults);
  c.router.scale_normalized = c.architecture != "DeepseekV2ForCausalLM";
  const bool moe = c.router.n_experts > 0;
  c.expert_dim = moe ? json.integer("moe_intermediate_size", 1, kMaxSize) : 0;
  // An explicit null means no shared experts; only a missing key takes the default.
  const int n_shared = json.mentions("n_shared_experts") ? 0 : defaults.n_shared_experts;
  c.n_shared_experts = moe ? json.integer("n_shared_experts", 0, kMaxExperts, n_shared) : 0;
  read_quantization(json, c);

  c.eos_ids.clear();
  read_token_ids(json, c);
  check_sizes(c, source_name);
  return c;
}

namespace {

std::string read_architecture(const ConfigJson& json) {
  const nlohmann::json& names = json.array("architectures");
  std::string name = names[0].is_string() ? names[0].get<std::string>() : "";
  const std::string index_key = json.key_with_prefix("index_");
  if (name == "DeepseekV32ForCausalLM" || !index_key.empty())
    json.refuse(index_key.empty() ? "architectures" : index_key,
                "DeepSeek-V3.2's sparse-attention indexer is not implemented; use a V3 or V3.1 "
                "checkpoint");
  if (name != "DeepseekV2ForCausalLM" && name != "DeepseekV3ForCausalLM" &&
      name != "KimiK2ForCausalLM")
    json.refuse("architectures", kArchitectures);
  return name;
}

// Refuses settings that no released model has and that would change every layer.
void refuse_variants(const ConfigJson& json) {
  if (json.text("hidden_act", "silu") != "silu")
    json.refuse("hidden_act", "only \"silu\" is supported");
  if (json.boolean("attention_bias", false))
    json.refuse("attention_bias", "biases in the attention are not supported, only false");
  if (!json.boolean("rope_interleave", true))
    json.refuse("rope_interleave",
                "only weights with interleaved rotary pairs, true, are supported");
}

MlaConfig read_attention(const ConfigJson& json) {
  MlaConfig mla;
  mla.n_heads = json.integer("num_attention_heads", 1, kMaxHeads);
  const int missing_q_rank = json.mentions("q_lora_rank") ? 0 : mla.q_rank;
  mla.q_rank = json.integer("q_lora_rank", 0, kMaxSize, missing_q_rank);
  mla.kv_rank = json.integer("kv_lora_rank", 1, kMaxSize);
  mla.nope_dim = json.integer("qk_nope_head_dim", 1, kMaxSize);
  mla.rope_dim = json.integer("qk_rope_head_dim", 2, kMaxSize);
  if (mla.rope_dim % 2 != 0)
    json.refuse("qk_rope_head_dim", "expected an even number: it is rotated in pairs");
  mla.v_dim = json.integer("v_head_dim", 1, kMaxSize);
  return mla;
}

RopeConfig read_scaling(const ConfigJson& json);

// Older files have rope_theta and rope_scaling, newer ones have both inside rope_parameters, some
// have all three.
RopeConfig read_rope(const ConfigJson& json) {
  constexpr double kMinTheta = 1 + 1e-6, kMaxTheta = 1e15;
  RopeConfig rope;
  rope.yarn = false;
  rope.factor = 1;
  if (json.has("rope_scaling")) rope = read_scaling(json.object("rope_scaling"));
  rope.theta = json.number("rope_theta", kMinTheta, kMaxTheta, 10000);
  if (!json.has("rope_parameters")) return rope;

  const ConfigJson parameters = json.object("rope_parameters");
  RopeConfig newer = read_scaling(parameters);
  newer.theta = parameters.number("rope_theta", kMinTheta, kMaxTheta, rope.theta);
  if (json.has("rope_theta") && newer.theta != rope.theta)
    json.refuse("rope_theta", fmt::format("rope_parameters.rope_theta is {}: make them equal or "
                                          "remove one",
                                          newer.theta));
  rope.theta = newer.theta;
  if (json.has("rope_scaling") && newer != rope)
    json.refuse("rope_scaling", "differs from rope_parameters: make them equal or remove one");
  return newer;
}

// Reads rope_scaling or rope_parameters, except theta.
RopeConfig read_scaling(const ConfigJson& json) {
  RopeConfig rope;
  const char* const key = json.has("rope_type") || !json.has("type") ? "rope_type" : "type";
  const std::string type = json.text(key);
  if (json.has("type") && json.text("type") != type)
    json.refuse("type", fmt::format("rope_type is {}: make them equal or remove one",
                                    shown(json.value(key))));
  if (type == "default") {
    rope.yarn = false;
    rope.factor = 1;
    return rope;
  }
  if (type != "yarn") json.refuse(key, "supported are \"yarn\" and \"default\"");

  rope.factor = json.number("factor", 1, kMaxFactor);
  rope.original_context = json.integer("original_max_position_embeddings", 1, kMaxSize);
  rope.beta_fast = json.number("beta_fast", 1e-6, kMaxFactor, 32);
  rope.beta_slow = json.number("beta_slow", 1e-6, kMaxFactor, 1);
  if (rope.beta_fast < rope.beta_slow)
    json.refuse("beta_fast", fmt::format("expected at least beta_slow, {}", rope.beta_slow));
  rope.mscale = json.number("mscale", 0, kMaxFactor, 1);
  rope.mscale_all_dim = json.number("mscale_all_dim", 0, kMaxFactor, 0);

  if (!json.boolean("truncate", true))
    json.refuse("truncate", "only true, whole bounds of the YaRN ramp, is supported");
  const double amplitude = rope_amplitude(rope);
  if (std::abs(json.number("attention_factor", 0, kMaxFactor, amplitude) - amplitude) > 1e-6)
    json.refuse(
        "attention_factor",
        fmt::format("not supported; without it mscale and mscale_all_dim give {}", amplitude));
  return rope;
}

Scoring read_scoring(const ConfigJson& json, const FamilyDefaults& defaults) {
  const std::string name = json.text("scoring_func", defaults.scoring);
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  json.refuse("scoring_func", "supported are \"softmax\" and \"sigmoid\"");
}

TopkMethod read_topk_method(const ConfigJson& json, const FamilyDefaults& defaults) {
  const std::string name = json.text("topk_method", defaults.topk_method);
  if (name == "greedy") return TopkMethod::kGreedy;
  if (name == "group_limited_greedy") return TopkMethod::kGroupLimitedGreedy;
  if (name == "noaux_tc") return TopkMethod::kNoauxTc;
  json.refuse("topk_method", "supported are \"greedy\", \"group_limited_greedy\" and \"noaux_tc\"");
}

void read_groups(const ConfigJson& json, const FamilyDefaults& defaults, RouterConfig& router) {
  const auto read = [&](const char* key, int missing) {
    return json.integer(key, 1, kMaxExperts, json.mentions(key) ? 1 : missing);
  };
  router.n_groups = read("n_group", defaults.n_groups);
  router.n_active_groups = read("topk_group", std::min(defaults.n_active_groups, router.n_groups));
  if (router.n_groups > 1 && !json.has("topk_method") && router.method == TopkMethod::kGreedy)
    json.refuse("topk_method", fmt::format("n_group is {}: say whether the choice is \"greedy\" or "
                                           "\"group_limited_greedy\"",
                                           router.n_groups));
  if (router.method == TopkMethod::kGreedy) {  // ignores groups
    router.n_groups = router.n_active_groups = 1;
    return;
  }
  if (router.n_experts % router.n_groups != 0)
    json.refuse("n_group",
                fmt::format("expected a divisor of n_routed_experts, {}", router.n_experts));
  if (router.n_active_groups > router.n_groups)
    json.refuse("topk_group", fmt::format("expected at most n_group, {}", router.n_groups));
}

RouterConfig read_router(const ConfigJson& json, const FamilyDefaults& defaults) {
  RouterConfig router;
  if (!json.mentions("n_routed_experts"))
    json.refuse("n_routed_experts", "expected a whole number, or null for a model without experts");
  router.n_experts = json.integer("n_routed_experts", 0, kMaxExperts, 0);
  router.scoring = read_scoring(json, defaults);
  router.method = read_topk_method(json, defaults);
  router.normalize = json.boolean("norm_topk_prob", defaults.normalize);
  router.scale =
      static_cast<float>(json.number("routed_scaling_factor", 1e-6, kMaxFactor, defaults.scale));
  if (router.n_experts == 0) {
    router.n_active = 0;
    router.n_groups = router.n_active_groups = 1;
    return router;
  }
  read_groups(json, defaults, router);
  router.n_active = json.integer("num_experts_per_tok", 1, kMaxExperts);
  const int n_candidates = router.n_experts / router.n_groups * router.n_active_groups;
  if (router.n_active > n_candidates)
    json.refuse("num_experts_per_tok",
                fmt::format("n_routed_experts, n_group and topk_group leave only {} experts to "
                            "choose from",
                            n_candidates));
  return router;
}

int read_scale_block(const ConfigJson& quantization);
int read_expert_group(const ConfigJson& quantization);

void read_quantization(const ConfigJson& json, ModelConfig& c) {
  c.scale_block = c.expert_group = 0;
  if (!json.has("quantization_config")) return;
  const ConfigJson quantization = json.object("quantization_config");
  const std::string method = quantization.text("quant_method");
  if (method == "fp8") {
    c.scale_block = read_scale_block(quantization);
  } else if (method == "compressed-tensors") {
    c.expert_group = read_expert_group(quantization);
    if (c.dim % c.expert_group != 0 || c.expert_dim % c.expert_group != 0)
      json.refuse("quantization_config",
                  fmt::format("its group_size {} must divide hidden_size, {}, and "
                              "moe_intermediate_size, {}",
                              c.expert_group, c.dim, c.expert_dim));
  } else {
    quantization.refuse("quant_method",
                        "only \"fp8\" with block scales, \"compressed-tensors\" with INT4 experts, "
                        "or an unquantised checkpoint, is supported");
  }
}

int read_scale_block(const ConfigJson& quantization) {
  if (quantization.text("fmt", "e4m3") != "e4m3")
    quantization.refuse("fmt", "only \"e4m3\" is supported");
  const nlohmann::json& block = quantization.array("weight_block_size");
  if (block.size() != 2 || block[0] != block[1] || !is_whole(block[0], 1, kMaxSize))
    quantization.refuse("weight_block_size", "expected two equal whole numbers such as [128, 128]");
  return block[0].get<int>();
}

// Accepts the one scheme of compressed-tensors (quantization/quant_args.py) that Kimi-K2-Thinking
// uses. Its "ignore" list is not read: the tensors themselves show which weights are packed.
int read_expert_group(const ConfigJson& quantization) {
  const char* const supported =
      "of compressed-tensors only \"pack-quantized\" routed experts are supported: symmetric INT4 "
      "in groups of 32, 64 or 128 columns with one scale each, activations not quantised";
  if (quantization.text("format") != "pack-quantized") quantization.refuse("format", supported);
  const ConfigJson groups = quantization.object("config_groups");
  const std::string only = groups.key_with_prefix("");
  if (quantization.value("config_groups").size() != 1 || only.empty())
    quantization.refuse("config_groups", supported);
  const ConfigJson group = groups.object(only);
  if (group.text("format", "pack-quantized") != "pack-quantized") group.refuse("format", supported);
  for (const char* key : {"input_activations", "output_activations"})
    if (group.has(key)) group.refuse(key, supported);
  const ConfigJson weights = group.object("weights");
  if (weights.integer("num_bits", 1, 32) != 4) weights.refuse("num_bits", supported);
  if (weights.text("type", "int") != "int") weights.refuse("type", supported);
  if (weights.text("strategy", "group") != "group") weights.refuse("strategy", supported);
  if (!weights.boolean("symmetric", true)) weights.refuse("symmetric", supported);
  for (const char* key : {"actorder", "block_structure"})
    if (weights.has(key)) weights.refuse(key, supported);
  const int size = weights.integer("group_size", 1, kMaxSize);
  if (size != 32 && size != 64 && size != 128) weights.refuse("group_size", supported);
  return size;
}

// Keeps the present ids for keys that the file does not have.
void read_token_ids(const ConfigJson& json, ModelConfig& config) {
  config.bos_id = json.integer("bos_token_id", 0, config.vocab - 1, config.bos_id);
  if (!json.has("eos_token_id")) return;
  config.eos_ids.clear();
  if (!json.value("eos_token_id").is_array()) {
    config.eos_ids.push_back(json.integer("eos_token_id", 0, config.vocab - 1));
    return;
  }
  for (const nlohmann::json& id : json.value("eos_token_id")) {
    if (!is_whole(id, 0, config.vocab - 1))
      json.refuse("eos_token_id", fmt::format("expected ids of tokens, 0 .. {}", config.vocab - 1));
    config.eos_ids.push_back(id.get<int>());
  }
}

// Checks sizes that are products or sums of several keys.
void check_sizes(const ModelConfig& c, std::string_view source) {
  const int64_t heads = c.mla.n_heads;
  const auto require_size = [&](const char* keys, int64_t size) {
    require(size <= kMaxSize, "{}: {} is {}: expected at most {}", source, keys, size, kMaxSize);
  };
  require_size("kv_lora_rank + qk_rope_head_dim", c.mla.cache_dim());
  require_size("num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
               heads * c.mla.qk_dim());
  require_size("num_attention_heads * (qk_nope_head_dim + v_head_dim)",
               heads * (c.mla.nope_dim + c.mla.v_dim));
  require_size("n_shared_experts * moe_intermediate_size",
               static_cast<int64_t>(c.n_shared_experts) * c.expert_dim);

  // An upper bound in double: every layer is counted both as dense and as MoE.
  const double widths = 3.0 * c.dense_dim + 3.0 * c.shared_dim() +
                        c.router.n_experts * (3.0 * c.expert_dim + 1) + c.mla.cache_dim() +
                        heads * (c.mla.qk_dim() + c.mla.v_dim) + c.mla.q_rank;
  const double latent = static_cast<double>(c.mla.q_rank) * heads * c.mla.qk_dim() +
                        static_cast<double>(c.mla.kv_rank) * heads * (c.mla.nope_dim + c.mla.v_dim);
  const double n_parameters = (c.n_layers + c.n_mtp_layers) * (widths * c.dim + latent);
  require(n_parameters <= kMaxParameters,
          "{}: hidden_size {}, num_hidden_layers {}, n_routed_experts {} and the other sizes make "
          "{:.2g} parameters: expected at most {:.2g}",
          source, c.dim, c.n_layers, c.router.n_experts, n_parameters, kMaxParameters);
}

}  // namespace
}  // namespace tandem
