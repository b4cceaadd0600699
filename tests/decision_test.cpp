// Where a small model's experts go when memory is short, and what contradicts a placement.
#include "loader/decision.h"

#include <gtest/gtest.h>

#include "comm/alone.h"
#include "core/machine_info.h"
#include "loader/loaded_model.h"
#include "loader/weights/pack_weights.h"
#include "loader/weights/spare_experts.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "offload/ranks/exchanged_experts.h"
#include "tests/error_of.h"
#include "tests/hybrid_placements.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

class OnTheCpu : public ::testing::Test {
 protected:
  const std::string directory_ = kGolden + "v2_lite";  // experts in BF16
  const ModelConfig config_ = ModelConfig::from_directory(directory_);
  const WeightStore store_{directory_};
  ModelWeights stored_ = stored_weights(store_, config_);
  const Topology topology_ = with_threads(this_topology(), 1);
  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  const CpuWeights home_{kernels_, topology_};
  std::vector<std::string> warnings_;
  ModelOptions options_ = {.directory = directory_, .context = 64};

  Decision decide_with(int64_t memory_bytes) {
    warnings_.clear();
    options_.warn = [this](const std::string& line) { warnings_.push_back(line); };
    return decide(options_, {config_, stored_, topology_, kernels_, home_, memory_bytes});
  }
  int64_t bytes(std::optional<WeightFormat> format) {
    return packed_bytes(stored_, config_, home_, ExpertsLayout(format)) +
           KvCache::bytes_for(config_, options_.context, cache_type_for(kernels_));
  }
};

TEST_F(OnTheCpu, ExpertsAreNarrowedWithAWarning) {
  const int64_t stored = bytes({}), int8 = bytes(weight_format("int8"));
  ASSERT_LT(int8, stored);
  ASSERT_LT(int8, bytes(weight_format("int4"))) << "rows are shorter than a group";
  EXPECT_EQ(decide_with(stored).parts.experts.format(1), std::nullopt);
  EXPECT_TRUE(warnings_.empty());
  EXPECT_EQ(decide_with(stored - 1).parts.experts.format(1), weight_format("int8"));
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_TRUE(says(warnings_[0], "they are kept as int8"));
  EXPECT_TRUE(says(error_of([&] { decide_with(int8 - 1); }), "use a smaller model"));
  options_.experts = weight_format("int8");
  EXPECT_EQ(decide_with(stored).parts.experts.format(1), weight_format("int8"));
  EXPECT_TRUE(warnings_.empty()) << "as requested";
}

// What workers have needs no memory here, and too little memory for the others is said with their
// numbers.
TEST_F(OnTheCpu, ExpertsOfWorkersAreElsewhere) {
  const int n_experts = config_.router.n_experts;
  std::vector<std::vector<bool>> on_workers(config_.n_all_layers());
  for (int layer = 0; layer < config_.n_all_layers(); ++layer)
    for (int e = 0; config_.is_moe(layer) && e < n_experts; ++e)
      on_workers[layer].push_back(e >= 2);
  options_.experts = weight_format("int8");
  ExpertsLayout layout(weight_format("int8"));
  layout.keep_elsewhere({.experts = on_workers, .backbone = false});
  const int64_t needed = packed_bytes(stored_, config_, home_, layout) +
                         KvCache::bytes_for(config_, options_.context, cache_type_for(kernels_));
  ASSERT_LT(needed, bytes(weight_format("int8")));
  const auto decide_in = [&](int64_t memory_bytes) {
    return decide(options_,
                  {config_, stored_, topology_, kernels_, home_, memory_bytes, {}, on_workers});
  };
  EXPECT_EQ(decide_in(needed).parts.experts.elsewhere().experts, on_workers);
  EXPECT_TRUE(says(error_of([&] { decide_in(needed - 1); }),
                   "no worker has experts 0-1, and with them the model needs"));
  options_.context = -1;
  EXPECT_TRUE(error_of([&] { decide_in(needed); }).starts_with("--ctx -1")) << "for another reason";
}

TEST(ExchangedMicroBatches, AreAsAskedOrAsPlaced) {
  ExecutedParts placed;
  ModelOptions of_three;
  of_three.micro_batches = 3;
  EXPECT_EQ(exchanged_micro_batches({}, placed), ExpertPool::kMeasured);
  placed.micro_batches = 2;
  EXPECT_EQ(exchanged_micro_batches({}, placed), 2);
  EXPECT_EQ(exchanged_micro_batches(of_three, {}), 3);
}

// The least memory with which experts stay as they are stored grows with the buffers of
// micro-batches.
TEST_F(OnTheCpu, RowsThatTravelBetweenRanksTakeMemory) {
  const auto alone = make_alone();  // only that there is a group matters here
  options_.ranks.group = alone.get();
  options_.n_replicas = 2;
  options_.step_tokens = 64;
  options_.max_kv_tokens = 64;
  const auto is_stored = [&](int64_t memory_bytes) {
    try {
      return !decide(options_,
                     {config_, stored_, topology_, kernels_, home_, memory_bytes, {0, 2, 2}})
                  .parts.experts.format(1);
    } catch (const Error&) {
      return false;
    }
  };
  const auto least = [&](int micro_batches) {
    options_.micro_batches = micro_batches;
    int64_t low = 0, high = bytes({}) * 4 + 1'000'000'000;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (is_stored(middle) ? high : low) = middle;
    }
    return high;
  };
  const auto buffers = [&](int micro_batches) {
    return ExchangedExperts::bytes_for(config_, {.n_replicas = 2}, HostLayout::one_host(2), 64, {},
                                       micro_batches);
  };
  EXPECT_GT(buffers(1), int64_t{2} * 2 * 64 * config_.dim * 4) << "rows and sums of both ranks";
  EXPECT_GT(buffers(4), buffers(1));
  EXPECT_EQ(least(4) - least(1), buffers(4) - buffers(1));
  options_.n_replicas = 1;
  EXPECT_LT(least(0), buffers(0) + bytes({})) << "ranks that add their sums have none";
}

// 15 % of the memory stay free, and the experts' formats stay those without the layer.
TEST(DecideWithMtp, TheLayerDisplacesNothing) {
  const std::string directory = embedded_model();
  ModelConfig without = ModelConfig::from_directory(directory), with = without;
  with.n_used_mtp_layers = 1;
  const WeightStore store(directory);
  ModelWeights stored = stored_weights(store, without), all = stored_weights(store, with);
  const Topology topology = with_threads(this_topology(), 1);
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const CpuWeights home(kernels, topology);
  const ModelOptions options = {.directory = directory, .context = 64};
  const auto bytes = [&](ModelWeights& weights, const ModelConfig& config) {
    return packed_bytes(weights, config, home, ExpertsLayout(std::nullopt)) +
           KvCache::bytes_for(config, options.context, cache_type_for(kernels));
  };
  ASSERT_GT(bytes(all, with), bytes(stored, without));
  const auto fits = [&](int64_t memory_bytes) {
    const Decision plain =
        decide(options, {without, stored, topology, kernels, home, memory_bytes});
    return decide_with_mtp(options, {with, all, topology, kernels, home, memory_bytes}, plain)
        .has_value();
  };
  const auto enough = static_cast<int64_t>(static_cast<double>(bytes(all, with)) / 0.85);
  EXPECT_TRUE(fits(enough + 2));
  EXPECT_FALSE(fits(enough - 2));
  EXPECT_FALSE(fits(bytes(all, with) - 1)) << "the experts would be narrowed";
  EXPECT_FALSE(fits(bytes(stored, without))) << "narrowed experts may not be enough";
}

TEST_F(OnTheCpu, StepsAreBoundedByTheirContext) {
  EXPECT_EQ(decide_with(bytes({})).limits.max_tokens, 64);
  options_.max_kv_tokens = 256;
  EXPECT_EQ(decide_with(bytes({})).limits.max_tokens, 256);
  options_.step_tokens = 100;
  options_.max_logits = 1000;
  const StepLimits limits = decide_with(bytes({})).limits;
  EXPECT_EQ(limits.max_tokens, 100);
  EXPECT_EQ(limits.max_logits, 100);
}

// A placement has memory for its steps: smaller ones are obeyed, and a larger one is not, with a
// warning.
TEST_F(OnTheCpu, StepsAreBoundedByThePlacement) {
  Placement p;
  p.backbone = stored_format(config_);
  p.stages = {{0, config_.n_layers - 1, {kCpu}, 1}};
  p.embedding_on_cpu = p.head_on_cpu = true;
  p.kv_tokens = 64;
  p.prefill_chunk_tokens = 17;
  LayerExperts layers = {1, config_.n_layers - 1, {{{}, stored_expert_format(config_), {kCpu}}}};
  for (int e = 0; e < config_.router.n_experts; ++e) layers.groups[0].experts.push_back(e);
  p.layers = {layers};
  const PlacementFile file(p);
  options_.placement = file.path();
  const auto most = [&](std::optional<int> asked) {
    options_.step_tokens = asked;
    return decide_with(int64_t{1} << 40).limits.max_tokens;
  };
  EXPECT_EQ(most({}), 17);
  EXPECT_EQ(most(9), 9);
  EXPECT_TRUE(warnings_.empty());
  EXPECT_EQ(most(18), 17);
  EXPECT_EQ(warnings_, (std::vector<std::string>{
                           "steps of 18 tokens: the placement has memory for 17, which are used"}));
}

// What only a GPU can do, in the order in which it is refused.
TEST_F(OnTheCpu, WhatNeedsAGpuIsRefused) {
  const auto refusal = [&] { return error_of([&] { decide_with(int64_t{1} << 40); }); };
  const std::string own = cache_type_for(kernels_) == DType::kF32 ? "fp32" : "bf16";
  options_.fp8_activations = true;
  EXPECT_EQ(refusal(),
            "--activations fp8: the CPU does not support them; leave it out, or use --device cuda");
  options_.kv = DType::kF8E4M3;
  EXPECT_EQ(refusal(),
            "--kv fp8: on the CPU the KV cache is " + own + "; leave it out, or use --device cuda");
  options_.record_timeline = true;
  EXPECT_EQ(refusal(),
            "--timeline shows GPU and CPU side by side, or CPU and network of ranks that exchange "
            "rows (--dp): use --device cuda");
  options_ = {.directory = directory_, .context = 64, .kv = cache_type_for(kernels_)};
  EXPECT_EQ(refusal(), "no error");
}

TEST_F(OnTheCpu, ContextsHaveBounds) {
  options_.context = 0;
  EXPECT_EQ(decide_with(int64_t{1} << 40).context,
            std::min<int64_t>(config_.max_context, kDefaultContext));
  options_.context = (int64_t{1} << 30) + 1;
  EXPECT_EQ(error_of([&] { decide_with(0); }), "--ctx 1073741825: must be between 1 and 2^30");
  options_.context = -1;
  EXPECT_EQ(error_of([&] { decide_with(0); }), "--ctx -1: must be between 1 and 2^30");
  options_.context = int64_t{1} << 30;
  EXPECT_EQ(decide_with(int64_t{1} << 50).context, options_.context);
  EXPECT_EQ(decide_with(int64_t{1} << 50).limits.max_tokens, kStepTokens);
}

// One context, and more as the fraction of the free memory allows, up to a limit.
TEST(LoadedOnTheCpu, HasTheTokensThatFit) {
  const auto n_pages = [](double fraction, int64_t most) {
    ModelOptions options = tiny_r1(DeviceChoice::kCpu);
    options.kv_fraction = fraction;
    options.max_kv_tokens = most;
    LoadedModel loaded(options);
    EXPECT_EQ(loaded.context(), 256);
    EXPECT_EQ(loaded.device(), "cpu");
    return loaded.cache().n_pages();
  };
  EXPECT_EQ(n_pages(0, 0), 4);
  EXPECT_EQ(n_pages(1, 0), 4);
  EXPECT_EQ(n_pages(1, 256), 4);
  EXPECT_EQ(n_pages(0, 2000), 4);
  EXPECT_EQ(n_pages(1, 257), 5);
  EXPECT_EQ(n_pages(1, 2000), 32);
  const ModelConfig config = ModelConfig::from_directory(kRoot + "/models/tiny-r1");
  const auto page_bytes = static_cast<double>(
      KvCache::bytes_for(config, kPageSize, cache_type_for(cpu::kernels_for(cpu::best_isa()))));
  const int n = n_pages(20.5 * page_bytes / static_cast<double>(available_memory_bytes()), 6400);
  EXPECT_GE(n, 14);
  EXPECT_LE(n, 27) << "other programs take and free memory, too";
}

// The least memory of a rank in which the model is taken.
TEST(Decision, ExpertsThatMoveNeedRoom) {
  const ModelConfig config = ModelConfig::from_directory(kTinyR1);
  const WeightStore store(kTinyR1);
  ModelWeights stored = stored_weights(store, config);
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const Topology topology = {};
  const CpuWeights home(kernels, topology);
  const auto least = [&](bool moves) {
    ModelOptions options;
    options.context = 64;
    options.experts = weight_format("int8");
    options.moves_experts = moves;
    int64_t low = 0, high = 100'000'000;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      const Subject subject = {config, stored, topology, kernels, home, middle, {1, 2, 2}};
      const std::string error = error_of([&] { decide(options, subject); });
      (error == "no error" ? high : low) = middle;
    }
    EXPECT_LT(high, 100'000'000) << error_of([&] {
      decide(options, {config, stored, topology, kernels, home, high, {1, 2, 2}});
    });
    return high;
  };
  ExpertsLayout half(weight_format("int8"));
  std::vector<std::vector<bool>> elsewhere(config.n_all_layers());
  for (int l = 0; l < config.n_all_layers(); ++l)
    for (int e = 0; config.is_moe(l) && e < config.router.n_experts; ++e)
      elsewhere[l].push_back(e % 2 == 0);
  half.keep_elsewhere({.experts = elsewhere, .backbone = false});
  EXPECT_EQ(least(true) - least(false),
            SpareExperts::bytes_for(stored, config, home, half, config.router.n_experts / 2));
}

}  // namespace
}  // namespace tandem::test
