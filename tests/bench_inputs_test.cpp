// What benchmarks measure with: random tokens, caches, routings and weights, the size of models,
// and costs counted by hand.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "bench/costs.h"
#include "bench/random_inputs.h"
#include "core/machine_info.h"
#include "model/cost.h"
#include "tests/error_of.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

TEST(RandomInputs, TokensAreOfTheWholeVocabulary) {
  std::mt19937 rng(1), same(1);
  const std::vector<int32_t> tokens = random_tokens(1000, 7, rng);
  ASSERT_EQ(tokens.size(), 1000u);
  for (int32_t token = -1; token <= 7; ++token)
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), token) > 80, token >= 0 && token < 7);
  EXPECT_EQ(random_tokens(1000, 7, same), tokens);
  EXPECT_EQ(first_pages(3), (std::vector<int32_t>{0, 1, 2}));
}

// The numbers of std::minstd_rand, whose first is 48271 and which are below 2^31, row by row.
TEST(RandomInputs, CachesAreFilledWithNumbersFromMinusOneToOne) {
  ModelConfig config = small_config();
  for (const DType type : {DType::kF32, DType::kBF16}) {
    const KvCache cache(config, kPageSize, type);
    fill_with_random(cache, config);
    std::minstd_rand rng(1);
    for (int l = 0; l < config.n_layers; ++l)
      for (int64_t r = 0; r < kPageSize; ++r)
        for (int64_t i = 0; i < config.mla.cache_dim(); ++i) {
          const auto wanted = static_cast<float>(static_cast<double>(rng()) / (1 << 30)) - 1;
          const TensorView layer = cache.layer(l);
          if (type == DType::kF32)
            ASSERT_EQ(layer.row<float>(r)[i], wanted) << l << ", " << r << ", " << i;
          else
            ASSERT_EQ(layer.row<uint16_t>(r)[i], std::bit_cast<uint32_t>(wanted) >> 16);
        }
  }
}

TEST(RandomInputs, RoutingsChooseDistinctExperts) {
  RouterConfig router;
  router.n_experts = 9;
  router.n_active = 4;
  constexpr int kTokens = 200;
  for (const bool skew : {false, true}) {
    std::mt19937 rng(1);
    const RandomRouting routing(router, kTokens, skew, rng);
    const Routing r = routing.routing();
    ASSERT_TRUE(r.ids.rows == kTokens && r.ids.cols == 4 && r.ids.stride == 4);
    ASSERT_TRUE(r.weights.rows == kTokens && r.weights.cols == 4 && r.weights.stride == 4);
    for (int64_t t = 0; t < kTokens; ++t) {
      const int32_t* ids = r.ids.row<int32_t>(t);
      EXPECT_EQ(std::set<int32_t>(ids, ids + 4).size(), 4u) << t;
      for (int k = 0; k < 4; ++k) {
        EXPECT_TRUE(ids[k] >= 0 && ids[k] < 9) << ids[k];
        EXPECT_EQ(r.weights.row<float>(t)[k], 0.25f);
      }
      if (skew) {
        EXPECT_EQ(std::count(ids, ids + 4, 0), t % 2 == 0 ? 1 : 0) << t;
      }
    }
    const std::vector<int> rows = rows_of_experts(router, r.ids);
    ASSERT_EQ(rows.size(), 9u);
    if (skew) {
      EXPECT_EQ(rows[0], kTokens / 2);
    }
    for (int e = skew ? 1 : 0; e < 9; ++e)  // 89 or 88 of 200 are expected
      EXPECT_TRUE(rows[e] > 55 && rows[e] < 125) << e << ": " << rows[e];
  }
}

// Those of 33 random routings that use the median number of experts, at most eight.
TEST(RandomInputs, RoutingsOfEqualCost) {
  RouterConfig router;
  router.n_experts = 32;
  router.n_active = 4;
  for (const int n : {1, 6}) {
    std::mt19937 rng(5), same(5);
    const std::vector<RandomRouting> kept = routings_of_equal_cost(router, n, false, rng);
    const auto n_used = [&](const RandomRouting& one) {
      const std::vector<int> rows = rows_of_experts(router, one.routing().ids);
      return 32 - std::count(rows.begin(), rows.end(), 0);
    };
    std::vector<int64_t> drawn;
    for (int i = 0; i < 33; ++i) drawn.push_back(n_used(RandomRouting(router, n, false, same)));
    EXPECT_EQ(rng(), same()) << "33 are drawn";
    std::sort(drawn.begin(), drawn.end());
    EXPECT_EQ(std::ssize(kept),
              std::min<int64_t>(8, std::count(drawn.begin(), drawn.end(), drawn[16])));
    for (const RandomRouting& one : kept) EXPECT_EQ(n_used(one), drawn[16]);
  }
  EXPECT_DOUBLE_EQ(expected_experts(router, 1), 4);
  EXPECT_DOUBLE_EQ(expected_experts(router, 2), 32 * (1 - std::pow(1 - 4. / 32, 2)));
}

// small_r1() with 3 layers, of which 1 is dense: dimension 256, 4 heads of 32 + 16 and 32, query
// rank 64, latent 128, 512 tokens. FP8 weights with a scale for each 128 x 128 numbers.
constexpr int64_t kAttention = 64 * 256 + 192 * 64 + 144 * 256 + 256 * 128 + 256 * 128;
constexpr int64_t kAttentionScales = 2 + 2 + 4 + 2 + 2;
constexpr int64_t kDense = 3 * 384 * 256, kDenseScales = 3 * 6;
constexpr int64_t kShared = 3 * 128 * 256, kSharedScales = 3 * 2;
constexpr int64_t kRouter = 32 * 256;
constexpr int64_t kHead = 512 * 256;

TEST(Costs, OfAStep) {
  ModelConfig c = small_r1();
  const WeightFormats formats = {{DType::kF8E4M3}, {DType::kBF16}};
  constexpr int64_t kVectors = 3 * (256 + 64 + 128 + 256) + 256 + 2 * 32;
  for (const bool tied : {false, true}) {
    c.tied_head = tied;
    const CostOfParts cost = cost_of_step(c, formats, {1000, 5}, 4);
    EXPECT_EQ(cost.matrices.bytes,
              5 * 256 * 2 + 2 * kHead + 3 * (kAttention + 4 * kAttentionScales) + kDense +
                  4 * kDenseScales + 2 * (kShared + 4 * kSharedScales + 2 * kRouter) + 4 * kVectors)
        << tied;
    EXPECT_EQ(cost.matrices.ops,
              2 * 5 * (kHead + 3 * kAttention + kDense + 2 * (kShared + kRouter)));
    const double experts = 2 * 32 * (1 - std::pow(1 - 4. / 32, 5));
    EXPECT_EQ(cost.experts.bytes, std::llround(experts * 2 * 3 * 128 * 256));
    EXPECT_EQ(cost.experts.ops, 2 * 3 * 2 * 5 * 4 * 128 * 256);
    EXPECT_EQ(cost.attention.bytes, 5 * 3 * 1000 * 144 * 4);
    EXPECT_EQ(cost.attention.ops, 5 * 3 * 2 * 1000 * 4 * (144 + 128));
    EXPECT_EQ(cost.sum().bytes, cost.matrices.bytes + cost.experts.bytes + cost.attention.bytes);
    EXPECT_EQ(cost.sum().ops, cost.matrices.ops + cost.experts.ops + cost.attention.ops);
  }
  c.router.n_experts = 0;
  c.n_dense_layers = 3;
  EXPECT_EQ(cost_of_step(c, formats, {1000, 5}, 4).experts.bytes, 0);
}

TEST(Costs, OfALayer) {
  const ModelConfig c = small_r1();
  const WeightFormats formats = {{DType::kF8E4M3}, {DType::kBF16}};
  for (const bool moe : {false, true}) {
    const CostOfParts cost = cost_of_layer(c, formats, moe, 10, 3, 2);
    EXPECT_EQ(cost.matrices.bytes,
              kAttention + 4 * kAttentionScales +
                  (moe ? kShared + 4 * kSharedScales + 2 * kRouter : kDense + 4 * kDenseScales));
    EXPECT_EQ(cost.matrices.ops, 2 * 3 * (kAttention + (moe ? kShared + kRouter : kDense)));
    EXPECT_EQ(cost.experts.ops, moe ? 2 * 3 * 3 * 4 * 128 * 256 : 0);
    EXPECT_EQ(cost.attention.bytes, 10 * 144 * 2);
    // Absorbed; restoring keys and values of all ten tokens would need 655,360 operations.
    EXPECT_EQ(cost.attention.ops, 3 * 2 * 10 * 4 * (144 + 128));
  }
  // For 40 of 40 tokens: all pairs of a token and one before it, or itself, and 40 tokens restored.
  EXPECT_EQ(cost_of_layer(c, formats, true, 40, 40, 2).attention.ops,
            2 * (40 * 41 / 2 * 4 * (48 + 32) + 40 * 128 * 256));
}

// More numbers than 32 bits count: a cache of 4 million tokens of 576 numbers.
TEST(Costs, OfALongContext) {
  MlaConfig r1 = small_r1().mla;
  r1.kv_rank = 512;
  r1.rope_dim = 64;
  EXPECT_EQ(cost_of_naive(r1, 4'000'000, 1, 2, 7).bytes, 4'000'000LL * 576 * 2 + 7);
  const Cost four = cost_of_absorbed(r1, 4'000'000, 4, 2);
  EXPECT_EQ(four.bytes, 4'000'000LL * 576 * 2) << "read once for four tokens";
  EXPECT_EQ(four.ops, 4 * cost_of_absorbed(r1, 4'000'000, 1, 2).ops);
}

TEST(BenchModels, ExpertsThatFit) {
  const ModelConfig r1 = bench_config("r1");
  const WeightFormat fp8 = {DType::kF8E4M3};
  const int64_t bytes = routed_expert_bytes(r1, fp8);
  EXPECT_EQ(resident_experts(r1, fp8, 16 * bytes, 0).experts, 16) << "twice the eight of a token";
  EXPECT_EQ(error_of([&] { resident_experts(r1, fp8, 16 * bytes - 1, 0); }),
            "the experts do not fit: 16 of 44.1 MB need 0.70 GB and 0.70 GB may be used; choose a "
            "smaller format or raise --memory");
  EXPECT_EQ(resident_experts(r1, fp8, 24 * bytes - 1, 0).experts, 16);
  EXPECT_EQ(resident_experts(r1, fp8, 1000 * bytes, 0).layers, 1);
  EXPECT_EQ(resident_experts(r1, fp8, 1000 * bytes, 256 * bytes).layers, 1);
  EXPECT_EQ(resident_experts(r1, fp8, 1000 * bytes, 256 * bytes + 1).layers, 2);
  EXPECT_EQ(resident_experts(r1, fp8, 1000 * bytes, 10'000 * bytes).layers, 3);
  ModelConfig few = r1;
  few.router.n_experts = 8;
  few.router.n_groups = 1;
  EXPECT_EQ(resident_experts(few, fp8, 8 * bytes, 0).experts, 8) << "all that there are";
  few.router.n_experts = 0;
  EXPECT_EQ(error_of([&] { resident_experts(few, fp8, bytes, 0); }),
            "this model has no routed experts: choose another --config");
  EXPECT_EQ(cold_bytes(),
            std::max(int64_t{2'000'000'000}, 4 * machine_info().last_level_cache_bytes));

  const ModelConfig three = with_layers(r1, 3);
  EXPECT_EQ(with_resident_experts(three, fp8, 2 * 40 * bytes).router.n_experts, 40);
  EXPECT_EQ(with_resident_experts(three, fp8, 2 * 40 * bytes - 1).router.n_experts, 32);
  EXPECT_EQ(with_resident_experts(with_layers(r1, 1), fp8, 0).router.n_experts, 0);
}

TEST(BenchModels, LayersThatAreKept) {
  ModelConfig r1 = bench_config("r1");
  r1.n_mtp_layers = 1;
  const ModelConfig cut = with_layers(r1, 5);
  EXPECT_TRUE(cut.n_layers == 5 && cut.n_dense_layers == 1 && cut.n_mtp_layers == 0);
  EXPECT_EQ(with_layers(r1, 1).n_dense_layers, 1);
  r1.n_dense_layers = 0;
  EXPECT_EQ(with_layers(r1, 5).n_dense_layers, 0);
  for (const int n : {1, 1000}) EXPECT_EQ(error_of([&] { check_layers(n); }), "no error");
  for (const int n : {0, 1001})
    EXPECT_EQ(error_of([&] { check_layers(n); }),
              "--layers " + std::to_string(n) + ": must be between 1 and 1000");
  EXPECT_EQ(most_of({}), 0);
  EXPECT_EQ(most_of({3, 9, 4}), 9);
  nlohmann::ordered_json report;
  add_cut_model(report, "avx2", 3, cut, {{DType::kF8E4M3}, weight_format("int4-128")});
  EXPECT_EQ(report.dump(),
            R"({"isa":"avx2","threads":3,"layers":5,"dense_layers":1,"experts":"int4-128",)"
            R"("format":"fp8","resident_experts":256})");
}

std::vector<float> row_of(DType dtype, WeightUse use, int64_t row, int64_t cols) {
  const ModelConfig config = small_r1();
  RandomTensor random({{dtype}, {dtype}}, config);
  const QuantView w = random.stored({"w", 0, -1, use, row + 1, cols});
  std::vector<std::byte> bytes(w.q.row_bytes());
  RandomTensor::write_rows(w, use, row, 1, bytes.data());
  std::vector<float> values;
  for (int64_t i = 0; i < cols; ++i) {
    uint32_t bits = 0;
    const int64_t size = size_of(w.q.dtype);
    std::memcpy(&bits, bytes.data() + i * size, size == 2 ? 2 : 4);
    if (w.q.dtype == DType::kF16) {  // all are normal or 0
      const float value = std::ldexp(static_cast<float>(bits & 0x3ff) / 1024 + 1,
                                     static_cast<int>(bits >> 10 & 31) - 15);
      values.push_back((bits & 0x7fff) == 0 ? 0 : bits >> 15 ? -value : value);
    } else {
      values.push_back(std::bit_cast<float>(size == 2 ? bits << 16 : bits));
    }
  }
  return values;
}

double deviation(const std::vector<float>& values) {
  double squares = 0;
  for (const float v : values) squares += double{v} * v;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

TEST(RandomWeights, HaveTheirDeviation) {
  constexpr int64_t kCols = 1 << 14;
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const std::vector<float> row = row_of(type, WeightUse::kAttention, 2, kCols);
    EXPECT_NEAR(deviation(row), 1. / 128, 0.02 / 128);
    for (const float v : row) ASSERT_LE(std::abs(v), std::sqrt(3.f) / 128);
    double sum = 0;
    for (const float v : row) sum += v;
    EXPECT_NEAR(sum / kCols, 0, 0.05 / 128);
  }
  const std::vector<float> embedding = row_of(DType::kBF16, WeightUse::kEmbedding, 2, kCols);
  EXPECT_NEAR(deviation(embedding), 32, 0.64);

  const std::vector<float> exact = row_of(DType::kF32, WeightUse::kAttention, 2, kCols),
                           half = row_of(DType::kF16, WeightUse::kAttention, 2, kCols),
                           brain = row_of(DType::kBF16, WeightUse::kAttention, 2, kCols);
  EXPECT_NE(exact, row_of(DType::kF32, WeightUse::kAttention, 3, kCols)) << "rows differ";
  for (int64_t i = 0; i < kCols; ++i) {  // truncated
    const float least_half =
        std::abs(exact[i]) < 0x1p-14f ? 0 : std::abs(exact[i]) * (1 - 0x1p-10f);
    ASSERT_LE(std::abs(half[i]), std::abs(exact[i]));
    ASSERT_GE(std::abs(half[i]), least_half);
    ASSERT_GE(half[i] * exact[i], 0) << "the same sign";
    ASSERT_EQ(std::bit_cast<uint32_t>(brain[i]), std::bit_cast<uint32_t>(exact[i]) & 0xffff0000);
  }
}

// xorshift64* of Vigna 2016, begun with the row's number; 24 bits of each product are a number
// from -1 to 1. The largest number of a matrix with four columns is the root of 3 over 2.
TEST(RandomWeights, AreThePublishedGenerators) {
  for (const int64_t row : {0, 1, 77}) {
    uint64_t state = 0x9E3779B97F4A7C15 ^ static_cast<uint64_t>(row) * 256;
    for (const float number : row_of(DType::kF32, WeightUse::kDense, row, 4)) {
      state ^= state >> 12;
      state ^= state << 25;
      state ^= state >> 27;
      const auto bits = static_cast<double>(state * 2685821657736338717u >> 40);
      EXPECT_FLOAT_EQ(number, static_cast<float>((bits / (1 << 23) - 1) * std::sqrt(3.) / 2));
    }
  }
}

// A trained matrix has few codes with an exponent of 0, which some kernels widen more slowly.
TEST(RandomWeights, Fp8HasScalesAndCodesOfATrainedMatrix) {
  const ModelConfig config = small_r1();
  RandomTensor random({{DType::kF8E4M3}, {DType::kBF16}}, config);
  const QuantView w = random.stored({"w", 0, -1, WeightUse::kDense, 129, 400});
  EXPECT_TRUE(w.block_rows == 128 && w.block_cols == 128);
  ASSERT_TRUE(w.scale.rows == 2 && w.scale.cols == 4 && w.scale.stride == 4);
  for (int64_t r = 0; r < 2; ++r)
    for (int64_t i = 0; i < 4; ++i) EXPECT_FLOAT_EQ(w.scale.row<float>(r)[i], 1.f / (100 * 20));
  std::vector<uint8_t> codes(40 * 400), row(400);
  RandomTensor::write_rows(w, WeightUse::kDense, 10, 40,
                           reinterpret_cast<std::byte*>(codes.data()));
  RandomTensor::write_rows(w, WeightUse::kDense, 13, 1, reinterpret_cast<std::byte*>(row.data()));
  EXPECT_TRUE(std::equal(row.begin(), row.end(), codes.begin() + 3 * 400));
  EXPECT_EQ(std::count(codes.begin(), codes.end(), 0x7f), 0);
  EXPECT_EQ(std::count(codes.begin(), codes.end(), 0xff), 0);
  double sum = 0, squares = 0;
  for (const uint8_t code : codes) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    sum += code & 0x80 ? -size : size;
    squares += size * size;
  }
  const auto n = static_cast<double>(codes.size());
  EXPECT_NEAR(sum / n, 0, 3);
  EXPECT_NEAR(std::sqrt(squares / n), 100, 3);
  EXPECT_LT(std::count_if(codes.begin(), codes.end(), [](uint8_t c) { return (c & 0x78) == 0; }),
            20)
      << "of 16,000";

  for (const auto& [use, value] :
       {std::pair(WeightUse::kNorm, 1.f), {WeightUse::kRouterBias, 0.f}}) {
    const QuantView v = random.stored({"v", 0, -1, use, 1, 5});
    std::vector<float> values(5, -1);
    RandomTensor::write_rows(v, use, 0, 1, reinterpret_cast<std::byte*>(values.data()));
    EXPECT_EQ(values, std::vector<float>(5, value));
  }
  EXPECT_EQ(random.stored({"w", 0, 0, WeightUse::kExpert, 8, 8}).q.dtype, DType::kBF16);
  EXPECT_EQ(random.stored({"w", 0, 0, WeightUse::kRouter, 8, 8}).q.dtype, DType::kBF16);
}

// Matrices of more than a megabyte are copied in pieces.
TEST(RandomWeights, CopiesAreWhole) {
  ModelConfig c = small_r1();
  c.dim = 1024;
  c.expert_dim = 640;
  c.n_layers = 2;
  c.router.n_experts = 8;
  for (const WeightFormat format : {WeightFormat{DType::kBF16}, WeightFormat{DType::kF8E4M3}}) {
    const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
    Team team(2);
    CpuWeights home(kernels);
    const ModelWeights weights = random_weights(
        c, {format, format}, [](const WeightSpec& s) { return s.use == WeightUse::kExpert; }, home,
        team);
    EXPECT_TRUE(weights.layers[1].attn.o.empty()) << "not wanted";
    const auto bytes_of = [&](const TensorView& m) {
      return std::string_view(reinterpret_cast<const char*>(m.row_data(0)),
                              static_cast<size_t>(m.rows * m.row_bytes()));
    };
    const auto& experts = weights.layers[1].experts;
    for (const auto part : {&FfnWeights::gate, &FfnWeights::up, &FfnWeights::down})
      for (int e = 0; e < 8; ++e) {
        const QuantView& first = experts[0].*part;
        EXPECT_EQ(bytes_of((experts[e].*part).q), bytes_of(first.q)) << e;
        if (format.dtype == DType::kBF16) continue;
        EXPECT_EQ(bytes_of((experts[e].*part).scale), bytes_of(first.scale)) << e;
      }
    EXPECT_EQ(bytes_of(experts[0].up.q), bytes_of(experts[0].gate.q)) << "of one shape";
  }
}

TEST(RandomWeights, ThatDoNotFitAreRefused) {
  const ModelConfig r1 = bench_config("r1");
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  Team team(1);
  CpuWeights home(kernels);
  if (available_memory_bytes() > 600'000'000'000) GTEST_SKIP() << "R1 fits this machine";
  EXPECT_TRUE(says(error_of([&] {
                     random_weights(
                         r1, {{DType::kF8E4M3}, {DType::kF8E4M3}},
                         [](const WeightSpec&) { return true; }, home, team);
                   }),
                   "choose fewer --layers or a smaller format"));
}

TEST(RandomWeights, NormalNumbers) {
  TensorView x;
  const Arena arena = Arena::holding([&](auto visit) { visit(x, 20, 500, DType::kF32); });
  fill_with_normal(x);
  std::vector<float> values(x.row<float>(0), x.row<float>(0) + 20 * 500);
  EXPECT_NEAR(deviation(values), 1, 0.03);
  EXPECT_EQ(std::count(values.begin(), values.end(), 0.f), 0) << "all are filled";
}

}  // namespace
}  // namespace tandem
