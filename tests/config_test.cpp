#include "model/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/config_families.h"

namespace tandem {
namespace {

using nlohmann::json;

TEST(Config, V2Lite) {
  const ModelConfig c = parse(family("v2-lite"));
  EXPECT_EQ(c.architecture, "DeepseekV2ForCausalLM");
  EXPECT_EQ(c.dim, 2048);
  EXPECT_EQ(c.vocab, 102400);
  EXPECT_EQ(c.n_layers, 27);
  EXPECT_EQ(c.n_dense_layers, 1);
  EXPECT_EQ(c.dense_dim, 10944);
  EXPECT_EQ(c.expert_dim, 1408);
  EXPECT_EQ(c.n_shared_experts, 2);
  EXPECT_EQ(c.n_mtp_layers, 0);
  EXPECT_EQ(c.max_context, 163840);
  EXPECT_EQ(c.scale_block, 0);
  EXPECT_FALSE(c.tied_head);
  EXPECT_EQ(c.mla.n_heads, 16);
  EXPECT_EQ(c.mla.q_rank, 0);
  EXPECT_EQ(c.mla.kv_rank, 512);
  EXPECT_EQ(c.mla.nope_dim, 128);
  EXPECT_EQ(c.mla.rope_dim, 64);
  EXPECT_EQ(c.mla.v_dim, 128);
  EXPECT_EQ(c.router.n_experts, 64);
  EXPECT_EQ(c.router.n_active, 6);
  EXPECT_EQ(c.router.n_groups, 1);
  EXPECT_EQ(c.router.n_active_groups, 1);
  EXPECT_EQ(c.router.scoring, Scoring::kSoftmax);
  EXPECT_EQ(c.router.method, TopkMethod::kGreedy);
  EXPECT_FALSE(c.router.normalize);
  EXPECT_FALSE(c.router.scale_normalized);
  EXPECT_EQ(c.router.scale, 1.0f);
  EXPECT_EQ(c.rope, (RopeConfig{.mscale = 0.707, .mscale_all_dim = 0.707}));
  EXPECT_EQ(c.eos_ids, std::vector<int>{100001});
  EXPECT_EQ(c.bos_id, 100000);
}

TEST(Config, V2) {
  const ModelConfig c = parse(family("v2"));
  EXPECT_EQ(c.dim, 5120);
  EXPECT_EQ(c.n_layers, 60);
  EXPECT_EQ(c.n_dense_layers, 1);
  EXPECT_EQ(c.dense_dim, 12288);
  EXPECT_EQ(c.expert_dim, 1536);
  EXPECT_EQ(c.n_shared_experts, 2);
  EXPECT_EQ(c.mla.n_heads, 128);
  EXPECT_EQ(c.mla.q_rank, 1536);
  EXPECT_EQ(c.router.n_experts, 160);
  EXPECT_EQ(c.router.n_active, 6);
  EXPECT_EQ(c.router.n_groups, 8);
  EXPECT_EQ(c.router.n_active_groups, 3);
  EXPECT_EQ(c.router.method, TopkMethod::kGroupLimitedGreedy);
  EXPECT_FALSE(c.router.scale_normalized);
  EXPECT_EQ(c.router.scale, 16.0f);
  EXPECT_EQ(c.rope.mscale_all_dim, 0.707);
  EXPECT_EQ(parse(family("v2.5")).rope, (RopeConfig{}));
}

TEST(Config, V3AndR1) {
  for (const char* name : {"v3", "r1", "v3.1"}) {
    const ModelConfig c = parse(family(name));
    EXPECT_EQ(c.architecture, "DeepseekV3ForCausalLM");
    EXPECT_EQ(c.dim, 7168);
    EXPECT_EQ(c.vocab, 129280);
    EXPECT_EQ(c.n_layers, 61);
    EXPECT_EQ(c.n_dense_layers, 3);
    EXPECT_EQ(c.dense_dim, 18432);
    EXPECT_EQ(c.expert_dim, 2048);
    EXPECT_EQ(c.n_shared_experts, 1);
    EXPECT_EQ(c.n_mtp_layers, 1);
    EXPECT_EQ(c.max_context, 163840);
    EXPECT_EQ(c.scale_block, 128);
    EXPECT_EQ(c.norm_eps, 1e-6f);
    EXPECT_EQ(c.mla.n_heads, 128);
    EXPECT_EQ(c.mla.q_rank, 1536);
    EXPECT_EQ(c.router.n_experts, 256);
    EXPECT_EQ(c.router.n_active, 8);
    EXPECT_EQ(c.router.n_groups, 8);
    EXPECT_EQ(c.router.n_active_groups, 4);
    EXPECT_EQ(c.router.scoring, Scoring::kSigmoid);
    EXPECT_EQ(c.router.method, TopkMethod::kNoauxTc);
    EXPECT_TRUE(c.router.normalize);
    EXPECT_TRUE(c.router.scale_normalized);
    EXPECT_EQ(c.router.scale, 2.5f);
    EXPECT_EQ(c.rope, RopeConfig{});
    EXPECT_EQ(c.eos_ids, std::vector<int>{1});
    EXPECT_EQ(c.bos_id, 0);
    EXPECT_FALSE(c.is_moe(2));
    EXPECT_TRUE(c.is_moe(3));
  }
}

TEST(Config, KimiK2) {
  const ModelConfig c = parse(family("k2"));
  EXPECT_EQ(c.architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(c.vocab, 163840);
  EXPECT_EQ(c.n_dense_layers, 1);
  EXPECT_EQ(c.n_mtp_layers, 0);
  EXPECT_EQ(c.max_context, 131072);
  EXPECT_EQ(c.scale_block, 128);
  EXPECT_EQ(c.mla.n_heads, 64);
  EXPECT_EQ(c.router.n_experts, 384);
  EXPECT_EQ(c.router.n_groups, 1);
  EXPECT_EQ(c.router.n_active_groups, 1);
  EXPECT_EQ(c.router.scale, 2.827f);
  EXPECT_EQ(c.rope, (RopeConfig{.theta = 50000, .factor = 32, .beta_fast = 1}));
  EXPECT_EQ(c.eos_ids, std::vector<int>{163585});
  EXPECT_TRUE(
      parse(with("k2", {{"architectures", {"KimiK2ForCausalLM"}}})).router.scale_normalized);
}

TEST(Config, KimiK2Thinking) {
  const ModelConfig c = parse(family("k2-thinking"));
  EXPECT_EQ(c.expert_group, 32);
  EXPECT_EQ(c.scale_block, 0);
  EXPECT_EQ(c.max_context, 262144);
  EXPECT_EQ(c.norm_eps, 1e-5f);
  EXPECT_EQ(c.rope, (RopeConfig{.theta = 50000, .factor = 64, .beta_fast = 1}));
  EXPECT_EQ(parse(family("k2")).expert_group, 0);
}

TEST(Config, Moonlight) {
  const ModelConfig c = parse(family("moonlight"));
  EXPECT_EQ(c.dense_dim, 11264);
  EXPECT_EQ(c.max_context, 8192);
  EXPECT_EQ(c.norm_eps, 1e-5f);
  EXPECT_EQ(c.latent_norm_eps, 1e-6f);
  EXPECT_EQ(c.scale_block, 0);
  EXPECT_EQ(c.mla.q_rank, 0);
  EXPECT_EQ(c.router.scale, 2.446f);
  EXPECT_EQ(c.router.method, TopkMethod::kNoauxTc);
  EXPECT_EQ(c.rope, (RopeConfig{.theta = 50000, .yarn = false, .factor = 1}));
}

TEST(Config, DefaultsOfTheClasses) {
  const std::vector<std::string> optional = {"first_k_dense_replace",
                                             "moe_layer_freq",
                                             "scoring_func",
                                             "topk_method",
                                             "norm_topk_prob",
                                             "routed_scaling_factor",
                                             "n_group",
                                             "topk_group",
                                             "n_shared_experts",
                                             "q_lora_rank",
                                             "rms_norm_eps",
                                             "rope_theta",
                                             "tie_word_embeddings",
                                             "hidden_act",
                                             "attention_bias",
                                             "rope_scaling",
                                             "quantization_config",
                                             "max_position_embeddings",
                                             "bos_token_id",
                                             "eos_token_id",
                                             "num_nextn_predict_layers"};
  const ModelConfig v3 = parse(without("v3", optional));
  EXPECT_EQ(v3.n_dense_layers, 3);
  EXPECT_EQ(v3.n_shared_experts, 1);
  EXPECT_EQ(v3.mla.q_rank, 1536);
  EXPECT_EQ(v3.router.n_groups, 8);
  EXPECT_EQ(v3.router.n_active_groups, 4);
  EXPECT_EQ(v3.router.method, TopkMethod::kNoauxTc);
  EXPECT_EQ(v3.router.scale, 2.5f);
  EXPECT_TRUE(v3.router.normalize);
  EXPECT_EQ(v3.max_context, 4096);
  EXPECT_EQ(v3.norm_eps, 1e-6f);
  EXPECT_EQ(v3.n_mtp_layers, 0);
  EXPECT_EQ(v3.bos_id, -1);
  EXPECT_TRUE(v3.eos_ids.empty());
  EXPECT_EQ(v3.rope, (RopeConfig{.yarn = false, .factor = 1}));

  const ModelConfig v2 = parse(without("v2", optional));
  EXPECT_EQ(v2.n_dense_layers, 0);
  EXPECT_EQ(v2.n_shared_experts, 0);
  EXPECT_EQ(v2.router.n_groups, 1);
  EXPECT_EQ(v2.router.scoring, Scoring::kSoftmax);
  EXPECT_EQ(v2.router.method, TopkMethod::kGreedy);
  EXPECT_EQ(v2.router.scale, 1.0f);
  EXPECT_FALSE(v2.router.normalize);
}

TEST(Config, Nulls) {
  EXPECT_EQ(parse(with("v3", {{"q_lora_rank", nullptr}})).mla.q_rank, 0);
  EXPECT_EQ(parse(with("v3", {{"q_lora_rank", 0}})).mla.q_rank, 0);
  EXPECT_EQ(parse(with("v3", {{"n_shared_experts", nullptr}})).n_shared_experts, 0);
  EXPECT_EQ(parse(with("v3", {{"quantization_config", nullptr}})).scale_block, 0);
  const ModelConfig flat = parse(with("v3", {{"n_group", nullptr}, {"topk_group", nullptr}}));
  EXPECT_EQ(flat.router.n_groups, 1);
  EXPECT_EQ(flat.router.n_active_groups, 1);
  const ModelConfig dense = parse(with("v3", {{"n_routed_experts", nullptr}}));
  EXPECT_EQ(dense.router.n_experts, 0);
  for (int l = 0; l < dense.n_layers; ++l) EXPECT_EQ(dense.ffn_dim(l), 18432);
  EXPECT_EQ(parse(with("v3", {{"eos_token_id", {1, 5}}})).eos_ids, (std::vector<int>{1, 5}));
}

TEST(Config, RopeOfNewerFiles) {
  json config = family("k2");
  const ModelConfig older = parse(config);
  json scaling = config["rope_scaling"];
  scaling.erase("type");
  scaling["rope_type"] = "yarn";
  config["rope_scaling"] = scaling;
  EXPECT_EQ(parse(config).rope, older.rope);

  scaling["rope_theta"] = 50000;
  config["rope_parameters"] = scaling;
  EXPECT_EQ(parse(config).rope, older.rope);
  config.erase("rope_theta");
  config.erase("rope_scaling");
  EXPECT_EQ(parse(config).rope, older.rope);

  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 50000}};
  EXPECT_EQ(parse(config).rope, (RopeConfig{.theta = 50000, .yarn = false, .factor = 1}));

  const json defaults = {
      {"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 4096}};
  EXPECT_EQ(parse(with("v3", {{"rope_scaling", defaults}})).rope,
            (RopeConfig{.factor = 4, .mscale_all_dim = 0}));
  EXPECT_NO_THROW(parse(with_inner("v3", "rope_scaling", {{"truncate", true}})));
  EXPECT_NO_THROW(parse(with_inner("v3", "rope_scaling", {{"attention_factor", 1.0}})));
}

class Directory : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::path(testing::TempDir()) /
            ("config_test_" +
             std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
    std::filesystem::create_directories(path_);
  }
  void TearDown() override { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  ModelConfig read() const { return ModelConfig::from_directory(path_.string()); }
  std::filesystem::path path_;
};

TEST_F(Directory, GenerationConfigWins) {
  write("config.json", family("k2").dump());
  EXPECT_EQ(read().eos_ids, std::vector<int>{163585});
  write("generation_config.json", R"({"eos_token_id": [163586, 163585], "temperature": 0.6})");
  EXPECT_EQ(read().eos_ids, (std::vector<int>{163586, 163585}));
  EXPECT_EQ(read().bos_id, 163584);
  write("generation_config.json", R"({"eos_token_id": null, "bos_token_id": 7})");
  EXPECT_EQ(read().eos_ids, std::vector<int>{163585});
  EXPECT_EQ(read().bos_id, 7);
}

TEST_F(Directory, NamesTheFileAtFault) {
  const auto error = [&] { return message([&] { read(); }); };
  EXPECT_NE(error().find(path_.string() + " is empty"), std::string::npos) << error();
  write("tokenizer.json", "{}");
  const std::string missing = error();
  EXPECT_NE(missing.find(path_.string()), std::string::npos) << missing;
  EXPECT_NE(missing.find("config.json"), std::string::npos) << missing;
  write("config.json", family("v3").dump());
  write("generation_config.json", R"({"eos_token_id": 200000})");
  EXPECT_NE(error().find("generation_config.json: eos_token_id is 200000"), std::string::npos)
      << error();
  std::filesystem::remove(path_ / "generation_config.json");
  write("config.json", std::string(10'000'001, ' '));
  EXPECT_NE(error().find("10000000"), std::string::npos) << error();
}

TEST_F(Directory, ReadsTheModelsOfThisRepository) {
  for (const char* root : {"/models", "/tests/golden"})
    for (const auto& entry :
         std::filesystem::directory_iterator(TANDEM_SOURCE_DIR + std::string(root)))
      if (std::filesystem::exists(entry.path() / "config.json")) {
        EXPECT_NO_THROW(ModelConfig::from_directory(entry.path().string())) << entry.path();
      }
}

}  // namespace
}  // namespace tandem
