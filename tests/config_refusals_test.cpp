// Invalid and unsupported values of config.json: each message names the key and its value.
#include <gtest/gtest.h>

#include "tests/config_families.h"

namespace tandem {
namespace {

using nlohmann::json;

TEST(ConfigRefusals, RefusesOtherModels) {
  const json sparse = {{"architectures", {"DeepseekV32ForCausalLM"}}};
  expect_says(message(with("v3", sparse)), {"architectures", "DeepseekV32ForCausalLM", "indexer"});
  expect_says(message(with("v3", {{"index_topk", 2048}})), {"index_topk", "2048", "indexer"});
  expect_says(message(with("v3", {{"architectures", {"LlamaForCausalLM"}}})),
              {"architectures", "LlamaForCausalLM", "DeepseekV2ForCausalLM",
               "DeepseekV3ForCausalLM", "KimiK2ForCausalLM"});
  expect_says(message(without("v3", {"architectures"})), {"architectures is missing"});
  expect_says(message(with("v3", {{"architectures", json::array()}})), {"architectures is []"});
  expect_says(message(with("v3", {{"hidden_act", "gelu"}})), {"hidden_act", "gelu", "silu"});
  expect_says(message(with("v3", {{"attention_bias", true}})), {"attention_bias", "true"});
  expect_says(message(with("v3", {{"rope_interleave", false}})), {"rope_interleave", "false"});
  expect_says(message(with("v3", {{"scoring_func", "tanh"}})),
              {"scoring_func", "tanh", "softmax", "sigmoid"});
  expect_says(message(with("v3", {{"topk_method", "aux"}})),
              {"topk_method", "aux", "greedy", "group_limited_greedy", "noaux_tc"});
}

TEST(ConfigRefusals, RefusesOtherQuantisation) {
  const auto refusal = [](const json& changes) {
    return message(with_inner("v3", "quantization_config", changes));
  };
  for (const char* method : {"awq", "gptq", "bitsandbytes"})
    expect_says(refusal({{"quant_method", method}}),
                {"quantization_config.quant_method", method, "fp8", "compressed-tensors"});
  expect_says(refusal({{"quant_method", "compressed-tensors"}}),
              {"quantization_config.format is missing"});
  expect_says(refusal({{"fmt", "e5m2"}}), {"quantization_config.fmt", "e5m2", "e4m3"});
  expect_says(refusal({{"weight_block_size", nullptr}}), {"weight_block_size is null"});
  for (const json& block :
       {json{128, 64}, json{128}, json{0, 0}, json{-1, -1}, json{128.5, 128.5}, json{"a", "a"}})
    expect_says(refusal({{"weight_block_size", block}}), {"weight_block_size is " + block.dump()});
  json config = family("v3");
  config["quantization_config"].erase("fmt");
  EXPECT_EQ(parse(config).scale_block, 128);
  config["quantization_config"].erase("quant_method");
  expect_says(message(config), {"quantization_config.quant_method is missing"});
}

// Each message names the key, its value and what is supported.
TEST(ConfigRefusals, RefusesOtherCompressedTensors) {
  const std::string supported =
      "only \"pack-quantized\" routed experts are supported: symmetric INT4";
  const json given = family("k2-thinking");
  const auto refusal = [&](const std::string& where, const json& value) {
    json config = given;
    config["quantization_config"][json::json_pointer(where)] = value;
    return message(config);
  };
  for (const char* format : {"int-quantized", "float-quantized", "nvfp4-pack-quantized"})
    expect_says(refusal("/format", format), {"quantization_config.format is", format, supported});
  const std::string group = "/config_groups/group_0", weights = group + "/weights/";
  const std::string name = "quantization_config.config_groups.group_0.";
  expect_says(refusal(weights + "num_bits", 8), {name + "weights.num_bits is 8", supported});
  expect_says(refusal(weights + "symmetric", false),
              {name + "weights.symmetric is false", supported});
  expect_says(refusal(weights + "type", "float"), {name + "weights.type is \"float\"", supported});
  expect_says(refusal(weights + "strategy", "channel"), {"strategy is \"channel\"", supported});
  expect_says(refusal(weights + "actorder", "group"), {"actorder is \"group\"", supported});
  for (const int size : {16, 48, 256})
    expect_says(refusal(weights + "group_size", size), {"group_size is", supported});
  expect_says(refusal(weights + "group_size", -1), {"group_size is -1"});
  expect_says(refusal(group + "/input_activations", json{{"num_bits", 8}}),
              {name + "input_activations is {", supported});
  expect_says(refusal(group + "/format", "marlin-24"), {name + "format is", supported});
  expect_says(refusal("/config_groups/group_1", json::object()), {"config_groups is", supported});
  expect_says(refusal("/config_groups", json::object()), {"config_groups is {}", supported});
  expect_says(refusal("/config_groups", "all"), {"config_groups is \"all\""});
  expect_says(refusal(group, nullptr), {"config_groups is", supported});
  expect_says(refusal(group, 3), {"config_groups.group_0 is 3: expected an object"});
  expect_says(refusal(group + "/weights", nullptr), {name + "weights is null"});

  expect_says(message(with("k2-thinking", {{"moe_intermediate_size", 2040}})),
              {"group_size 32 must divide hidden_size, 7168, and moe_intermediate_size, 2040"});
  expect_says(message(with("k2-thinking", {{"hidden_size", 7152}})), {"hidden_size, 7152"});
  json wide = given;
  wide["quantization_config"][json::json_pointer(weights + "group_size")] = 128;
  EXPECT_EQ(parse(wide).expert_group, 128);
}

TEST(ConfigRefusals, RefusesOtherRope) {
  const auto refusal = [](const json& changes) {
    return message(with_inner("v3", "rope_scaling", changes));
  };
  for (const char* type : {"linear", "dynamic", "llama3", "longrope"})
    expect_says(refusal({{"type", type}}), {"rope_scaling.type", type, "yarn"});
  expect_says(refusal({{"rope_type", "linear"}}), {"rope_scaling.type is \"yarn\"", "linear"});
  expect_says(refusal({{"truncate", false}}), {"rope_scaling.truncate is false"});
  expect_says(refusal({{"attention_factor", 1.5}}), {"rope_scaling.attention_factor is 1.5"});
  expect_says(refusal({{"factor", 0.5}}), {"rope_scaling.factor is 0.5"});
  expect_says(refusal({{"factor", nullptr}}), {"rope_scaling.factor is null"});
  expect_says(refusal({{"beta_fast", 0.25}}), {"rope_scaling.beta_fast is 0.25", "beta_slow"});
  expect_says(refusal({{"beta_slow", 0}}), {"rope_scaling.beta_slow is 0"});
  expect_says(refusal({{"mscale", -1}}), {"rope_scaling.mscale is -1"});
  expect_says(refusal({{"original_max_position_embeddings", 0}}),
              {"rope_scaling.original_max_position_embeddings is 0"});
  expect_says(message(with("v3", {{"rope_scaling", json::object()}})),
              {"rope_scaling.rope_type is missing"});
  expect_says(message(with("v3", {{"rope_scaling", 40}})), {"rope_scaling is 40", "object"});
  expect_says(message(with("v3", {{"rope_theta", 1}})), {"rope_theta is 1"});
  const json plain = {{"rope_type", "default"}, {"rope_theta", 50000}};
  expect_says(message(with("v3", {{"rope_parameters", plain}})), {"rope_theta is 10000", "50000"});
  expect_says(message(with("v3", {{"rope_parameters", {{"rope_type", "default"}}}})),
              {"rope_scaling is {", "rope_parameters"});
}

TEST(ConfigRefusals, RefusesSizesOutOfRange) {
  for (const char* key :
       {"hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "kv_lora_rank",
        "moe_intermediate_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "num_experts_per_tok"}) {
    for (const json& value : {json(0), json(-3), json(1.5), json("8"), json(1 << 25), json(nullptr),
                              json(18446744073709551615u), json(1e300)})
      expect_says(message(with("v3", {{key, value}})), {key + (" is " + value.dump())});
    expect_says(message(without("v3", {key})), {key + std::string(" is missing")});
  }
  expect_says(message(without("v3", {"n_routed_experts"})), {"n_routed_experts is missing"});
  const json bad = {{"q_lora_rank", -1},
                    {"n_routed_experts", 5000},
                    {"n_shared_experts", -1},
                    {"num_hidden_layers", 1025},
                    {"first_k_dense_replace", -1},
                    {"moe_layer_freq", 0},
                    {"max_position_embeddings", 0},
                    {"qk_rope_head_dim", 63},
                    {"n_group", 7},
                    {"topk_group", 9},
                    {"num_experts_per_tok", 129},
                    {"rms_norm_eps", 0},
                    {"routed_scaling_factor", 0},
                    {"norm_topk_prob", 1},
                    {"tie_word_embeddings", "no"},
                    {"num_nextn_predict_layers", -1}};
  for (const auto& [key, value] : bad.items())
    expect_says(message(with("v3", {{key, value}})), {key + " is " + value.dump()});
  expect_says(message(with("v3", {{"first_k_dense_replace", 62}})),
              {"first_k_dense_replace is 62"});
  EXPECT_NO_THROW(parse(with("v3", {{"num_experts_per_tok", 128}})));
  expect_says(message(with("v2", {{"topk_method", nullptr}})),
              {"topk_method is null", "n_group is 8"});
}

// The smallest and the largest values that are taken.
TEST(ConfigRefusals, TakesTheLimitsThemselves) {
  const auto takes = [](const json& changes) { return message(with("v3", changes)); };
  const std::pair<const char*, json> limits[] = {
      {"rms_norm_eps", 1e-30},          {"rms_norm_eps", 1},
      {"routed_scaling_factor", 1e-6},  {"routed_scaling_factor", 1e6},
      {"rope_theta", 1.000001},         {"rope_theta", 1e15},
      {"max_position_embeddings", 1},   {"max_position_embeddings", 1 << 24},
      {"num_hidden_layers", 1024},      {"first_k_dense_replace", 61},
      {"moe_layer_freq", 1024},         {"num_nextn_predict_layers", 1024},
      {"num_attention_heads", 52428},  // times 320 is 16,776,960
      {"intermediate_size", 1 << 24},   {"n_shared_experts", 4096},
      {"n_routed_experts", 4096},       {"kv_lora_rank", (1 << 24) - 64},
      {"q_lora_rank", 1 << 20},         {"bos_token_id", 129279},
      {"eos_token_id", json{0, 129279}}};
  for (const auto& [key, value] : limits) {
    const auto found = takes({{key, value}});
    EXPECT_TRUE(found == "(no error)" || found.find("parameters: expected") != found.npos)
        << key << " " << value << ": " << found;
  }
  json one = {{"num_hidden_layers", 1},
              {"first_k_dense_replace", 1},
              {"moe_layer_freq", 1},
              {"hidden_size", 1},
              {"vocab_size", 2},
              {"intermediate_size", 1},
              {"num_attention_heads", 1},
              {"qk_nope_head_dim", 1},
              {"qk_rope_head_dim", 2},
              {"v_head_dim", 1},
              {"kv_lora_rank", 1},
              {"q_lora_rank", 1},
              {"moe_intermediate_size", 1},
              {"n_routed_experts", 1},
              {"n_shared_experts", 0},
              {"num_experts_per_tok", 1},
              {"n_group", 1},
              {"topk_group", 1},
              {"max_position_embeddings", 1}};
  EXPECT_EQ(takes(one), "(no error)");
  const auto scaling = [](const json& changes) {
    return message(with_inner("v3", "rope_scaling", changes));
  };
  EXPECT_EQ(scaling({{"factor", 1}, {"mscale", 0}, {"mscale_all_dim", 0}}), "(no error)");
  EXPECT_EQ(scaling({{"factor", 1e6}, {"beta_fast", 1e6}, {"beta_slow", 1e6}}), "(no error)");
  EXPECT_EQ(scaling({{"beta_fast", 1e-6}, {"beta_slow", 1e-6}}), "(no error)");
  EXPECT_EQ(scaling({{"original_max_position_embeddings", 1}}), "(no error)");
  // An amplitude that is given may differ from the computed one, 1, by rounding.
  EXPECT_EQ(scaling({{"attention_factor", 1 + 9e-7}}), "(no error)");
  EXPECT_NE(scaling({{"attention_factor", 1 + 11e-7}}), "(no error)");
}

TEST(ConfigRefusals, RefusesProductsOutOfRange) {
  expect_says(message(with("v3", {{"num_attention_heads", 65536}, {"v_head_dim", 4096}})),
              {"num_attention_heads * (qk_nope_head_dim + v_head_dim)"});
  expect_says(message(with("v3", {{"num_attention_heads", 65536}, {"qk_rope_head_dim", 4096}})),
              {"num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"});
  expect_says(message(with("v3", {{"n_shared_experts", 4096}, {"moe_intermediate_size", 8192}})),
              {"n_shared_experts * moe_intermediate_size"});
  expect_says(message(with("v3", {{"kv_lora_rank", 1 << 24}})),
              {"kv_lora_rank + qk_rope_head_dim"});
  expect_says(message(with("v3", {{"moe_intermediate_size", 1 << 22}, {"hidden_size", 1 << 22}})),
              {"hidden_size 4194304", "parameters"});
  // 62 layers of 65,536 heads, each of 192 + 128 rows of 2^20 numbers.
  expect_says(message(with("v3", {{"num_attention_heads", 65536}, {"hidden_size", 1 << 20}})),
              {"hidden_size 1048576", "make 1.5e+15 parameters: expected at most 1e+15"});
  // If several are too large, the message names the first.
  expect_says(message(with("v3", {{"num_attention_heads", 65536},
                                  {"qk_rope_head_dim", 4096},
                                  {"v_head_dim", 4096},
                                  {"kv_lora_rank", 1 << 24}})),
              {"kv_lora_rank + qk_rope_head_dim is 16781312"});
  expect_says(message(with("v3", {{"num_attention_heads", 65536},
                                  {"qk_rope_head_dim", 4096},
                                  {"v_head_dim", 4096}})),
              {"num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim) is 276824064"});
}

// The bound on parameters counts every part. In each of these models of 61 layers and one MTP layer
// of V3's other sizes, one part alone is most of them.
TEST(ConfigRefusals, CountsEveryPartOfTheParameters) {
  const auto refusal = [](nlohmann::json changes) {
    return message(with("v3", std::move(changes)));
  };
  constexpr int kDim = 1 << 23;
  // The first is 62 * 2^23 * (3 * 2^21 + 3 * 2048 + 256 * (3 * 2048 + 1) + 576 + 128 * 320 + 1536).
  expect_says(refusal({{"hidden_size", kDim}, {"intermediate_size", 1 << 21}}),
              {"n_routed_experts 256", "make 4.1e+15 parameters"});
  expect_says(refusal({{"hidden_size", kDim}, {"moe_intermediate_size", 1 << 13}}),
              {"make 3.3e+15 parameters"});
  expect_says(refusal({{"hidden_size", kDim}, {"n_shared_experts", 1024}}),
              {"make 4.1e+15 parameters"});
  expect_says(refusal({{"hidden_size", kDim}, {"kv_lora_rank", 1 << 22}}),
              {"make 3.1e+15 parameters"});
  expect_says(refusal({{"hidden_size", kDim}, {"q_lora_rank", 1 << 22}}),
              {"make 3.1e+15 parameters"});
  // The latents of 65,536 heads: 62 * 2^16 * 2^21 * 192, and * 256.
  expect_says(refusal({{"num_attention_heads", 65536}, {"q_lora_rank", 1 << 21}}),
              {"make 1.6e+15 parameters"});
  expect_says(refusal({{"num_attention_heads", 65536}, {"kv_lora_rank", 1 << 21}}),
              {"make 2.2e+15 parameters"});
}

TEST(ConfigRefusals, RefusesTokenIdsOutsideTheVocabulary) {
  for (const json& id : {json(129280), json(-1), json("1"), json{1, 129280}, json{1, "x"}})
    expect_says(message(with("v3", {{"eos_token_id", id}})), {"eos_token_id is " + id.dump()});
  expect_says(message(with("v3", {{"bos_token_id", 129280}})), {"bos_token_id is 129280"});
}

TEST(ConfigRefusals, BrokenJson) {
  const std::string good = family("v3").dump();
  expect_says(text_message(good.substr(0, 100)), {"line 1", "column 101"});
  expect_says(text_message(""), {"broken JSON"});
  expect_says(text_message("[1, 2]"), {"object", "[1,2]"});
  expect_says(text_message("{\"rms_norm_eps\": NaN}"), {"broken JSON", "column"});
  expect_says(text_message("{\"hidden_size\": 1e999}"), {"1e999"});
  expect_says(text_message("{\"a\": " + std::string(100, '[') + std::string(100, ']') + "}"),
              {"64 levels"});
  expect_says(text_message("{\"hidden_size\": 1, \"hidden_size\": 2}"), {"hidden_size"});
  expect_says(text_message("{\"a\": \"\xff\"}"), {"broken JSON"});
}

}  // namespace
}  // namespace tandem
