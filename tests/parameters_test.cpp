// Counts of parameters against the published sizes of the models and against the list of tensors.
#include "model/parameters.h"

#include <gtest/gtest.h>

#include "model/kv_layout.h"
#include "model/weights.h"
#include "tests/config_families.h"

namespace tandem {
namespace {

struct Published {
  const char* family;
  int64_t embedding, attention_layer, dense_mlp, one_expert, shared_mlp, router, moe_layer;
  int64_t total, activated, activated_with_embedding, kv_bytes;
};

constexpr Published kPublished[] = {
    {"v2-lite", 209'715'200, 13'763'072, 67'239'936, 8'650'752, 17'301'504, 131'072, 584'847'872,
     15'706'484'224, 2'451'435'008, 2'661'150'208, 31'104},
    {"v2", 524'288'000, 149'227'520, 188'743'680, 23'592'960, 47'185'920, 819'200, 3'972'116'480,
     235'741'434'880, 20'851'512'320, 21'375'800'320, 69'120},
    {"r1", 926'679'040, 187'107'328, 396'361'728, 44'040'192, 44'040'192, 1'835'264, 11'507'286'272,
     671'026'419'200, 36'625'618'432, 37'552'297'472, 70'272},
    {"k2", 1'174'405'120, 101'124'096, 396'361'728, 44'040'192, 44'040'192, 2'752'896,
     17'059'365'248, 1'026'408'232'448, 31'687'095'808, 32'861'500'928, 70'272},
    {"moonlight", 335'544'320, 13'763'072, 69'206'016, 8'650'752, 17'301'504, 131'136, 584'847'936,
     15'960'110'208, 2'579'231'872, 2'914'776'192, 31'104},
};

TEST(Parameters, PublishedSizes) {
  for (const Published& p : kPublished) {
    SCOPED_TRACE(p.family);
    const ModelConfig config = parse(family(p.family));
    const LayerParameters moe = count_layer_parameters(config, true);
    EXPECT_EQ(moe.attention, p.attention_layer);
    EXPECT_EQ(moe.shared_experts, p.shared_mlp);
    EXPECT_EQ(moe.router, p.router);
    EXPECT_EQ(moe.routed_experts, config.router.n_experts * p.one_expert);
    EXPECT_EQ(moe.total(), p.moe_layer);
    const LayerParameters dense = count_layer_parameters(config, false);
    EXPECT_EQ(dense.dense_mlp, p.dense_mlp);
    EXPECT_EQ(dense.total(), p.attention_layer + p.dense_mlp + 2 * config.dim);

    const ParameterCounts counts = count_parameters(config);
    EXPECT_EQ(counts.embedding, p.embedding);
    EXPECT_EQ(counts.head, p.embedding);
    EXPECT_EQ(counts.one_expert, p.one_expert);
    EXPECT_EQ(counts.total, p.total);
    EXPECT_EQ(counts.activated, p.activated);
    EXPECT_EQ(counts.activated + counts.embedding, p.activated_with_embedding);
    EXPECT_EQ(kv_bytes_per_token(config), p.kv_bytes);
  }
}

TEST(Parameters, MtpLayerOfR1) {
  const ParameterCounts counts = count_parameters(parse(family("r1")));
  EXPECT_EQ(counts.mtp, 11'610'068'224);
  EXPECT_EQ(counts.mtp_stored, 13'463'426'304);
  EXPECT_EQ(counts.mtp_activated, 1'614'779'648);
  EXPECT_EQ(count_parameters(parse(family("k2"))).mtp_stored, 0);
}

// A model without experts has dense MTP layers, of which a token uses every parameter.
TEST(Parameters, MtpLayersWithoutExperts) {
  ModelConfig config = parse(family("r1"));
  config.n_layers = 1;
  config.n_mtp_layers = 2;
  config.router.n_experts = config.router.n_active = 0;
  const ParameterCounts counts = count_parameters(config);
  const int64_t layer = 187'107'328 + 396'361'728 + 2 * 7168;
  EXPECT_EQ(counts.total, 2 * counts.embedding + layer + 7168);
  EXPECT_EQ(counts.mtp, 2 * (layer + int64_t{7168} * (2 * 7168 + 3)));
  EXPECT_EQ(counts.mtp_stored, counts.mtp + 4 * counts.embedding);
  EXPECT_EQ(counts.mtp_activated, counts.mtp + 2 * counts.embedding);
  EXPECT_EQ(counts.activated, counts.total - counts.embedding);
}

TEST(Parameters, MoeLayersOfARange) {
  ModelConfig config = parse(family("v2-lite"));
  config.moe_layer_freq = 2;
  config.n_layers = 9;
  config.n_dense_layers = 3;
  EXPECT_EQ(moe_layers(config), 3) << "layers 4, 6 and 8";
  EXPECT_EQ(moe_layers(config, 0, 3), 0);
  EXPECT_EQ(moe_layers(config, 4, 4), 1);
  EXPECT_EQ(moe_layers(config, 4, 7), 2);
  EXPECT_EQ(moe_layers(config, 5, 8), 2);
}

// Elements of the whole R1 checkpoint without block scales; Hugging Face shows 685B, which includes
// 41.5M block scales.
TEST(Parameters, R1AsStored) {
  const ParameterCounts counts = count_parameters(parse(family("r1")));
  const int64_t fp8 = 680'571'043'840, bf16 = 3'918'786'560, bias = 59 * 256;
  EXPECT_EQ(counts.total + counts.mtp_stored, fp8 + bf16 + bias);
}

void expect_as_listed(const ModelConfig& config) {
  int64_t embedding = 0, head = 0, attention = 0, dense = 0, shared = 0, routed = 0, router = 0,
          norms = 0;
  ModelWeights weights;
  for_each_weight(weights, config, [&](const WeightSpec& spec, QuantView&) {
    const bool latent_norm = spec.name.ends_with("_a_layernorm.weight");
    int64_t& part = spec.use == WeightUse::kEmbedding                  ? embedding
                    : spec.use == WeightUse::kHead                     ? head
                    : spec.use == WeightUse::kAttention || latent_norm ? attention
                    : spec.use == WeightUse::kNorm                     ? norms
                    : spec.use == WeightUse::kDense                    ? dense
                    : spec.use == WeightUse::kShared                   ? shared
                    : spec.use == WeightUse::kExpert                   ? routed
                                                                       : router;
    part += spec.rows * spec.cols;
  });
  const ParameterCounts counts = count_parameters(config);
  EXPECT_EQ(counts.embedding, embedding);
  EXPECT_EQ(counts.head, head);
  EXPECT_EQ(counts.attention, attention);
  EXPECT_EQ(counts.dense_mlp, dense);
  EXPECT_EQ(counts.shared_experts, shared);
  EXPECT_EQ(counts.routed_experts, routed);
  EXPECT_EQ(counts.router, router);
  EXPECT_EQ(counts.norms, norms);
  EXPECT_EQ(counts.total, embedding + head + attention + dense + shared + routed + router + norms);
}

TEST(Parameters, PartsAreThoseOfTheListOfTensors) {
  for (const char* name : {"v2-lite", "v2", "r1", "k2", "moonlight"}) {
    SCOPED_TRACE(name);
    expect_as_listed(parse(family(name)));
  }
  ModelConfig config = parse(family("v2-lite"));
  config.moe_layer_freq = 2;
  config.n_shared_experts = 0;
  config.tied_head = true;
  expect_as_listed(config);
  config.router.n_experts = 0;
  expect_as_listed(config);
  // Each part has more than 2^31 parameters.
  config = parse(family("v2"));
  config.vocab = 1 << 18;
  config.dim = config.dense_dim = config.expert_dim = 1 << 16;
  config.mla = {.n_heads = 1 << 12,
                .q_rank = 1 << 14,
                .kv_rank = 1 << 14,
                .nope_dim = 128,
                .rope_dim = 64,
                .v_dim = 128};
  config.router.n_experts = 1 << 16;
  config.n_layers = 2;
  expect_as_listed(config);
}

// Products above 2^31 that are only a part of a count.
TEST(Parameters, CountsOfHugeMatrices) {
  ModelConfig config;
  config.n_layers = 0;
  config.n_mtp_layers = 1;
  config.router.n_experts = 0;
  config.vocab = config.dense_dim = 0;
  config.dim = 1 << 30;
  config.mla = {.n_heads = 1, .q_rank = 0, .kv_rank = 1, .nope_dim = 1, .rope_dim = 1, .v_dim = 1};
  const int64_t dim = config.dim, attention = 2 * dim + 2 * dim + 1 + 2 + dim;
  EXPECT_EQ(count_layer_parameters(config, false).attention, attention);
  EXPECT_EQ(count_parameters(config).mtp, 2 * dim * dim + 3 * dim + attention + 2 * dim);

  config.dim = 1;
  config.mla.n_heads = 1 << 12;
  config.mla.kv_rank = 1 << 20;
  const int64_t rank = 1 << 20, heads = 1 << 12;
  EXPECT_EQ(count_layer_parameters(config, false).attention,
            2 * heads + (rank + 1) + rank + 2 * rank * heads + heads);
}

TEST(Parameters, TiedHeadIsReadButNotStored) {
  ModelConfig config = parse(family("moonlight"));
  const ParameterCounts untied = count_parameters(config);
  config.tied_head = true;
  const ParameterCounts tied = count_parameters(config);
  EXPECT_EQ(tied.total, untied.total - untied.head);
  EXPECT_EQ(tied.activated, untied.activated);
}

}  // namespace
}  // namespace tandem
