// Grids of the largest steps that options allow. CUDA takes at most 65,535 blocks along y and z, so
// a step of 65,536 tokens reveals launchers that exceed that. On an emulated GPU few blocks run.
#include <gtest/gtest.h>

#include <cstdlib>

#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/plain_attention.h"
#include "gpu_kernels/exchange/hand_off.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/products/plain_products.h"
#include "gpu_kernels/router.h"
#include "gpu_kernels/sampling.h"
#include "gpu_kernels/unpack.h"
#include "model/batch.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu::test {
namespace {

// On an emulated GPU only the first and the last n blocks of each grid run.
class FewBlocks {
 public:
  explicit FewBlocks(int n) { setenv("TANDEM_GPU_BLOCKS", std::to_string(n).c_str(), 1); }
  ~FewBlocks() { unsetenv("TANDEM_GPU_BLOCKS"); }
  FewBlocks(const FewBlocks&) = delete;
};

// Every number that was written must have the expected value, and the last one must be written.
template <class Wanted>
void expect_written(const std::vector<float>& got, double relative, Wanted wanted) {
  ASSERT_FALSE(std::isnan(got.back())) << "the last was not written";
  for (int64_t i = 0; i < std::ssize(got); ++i) {
    if (std::isnan(got[i])) continue;
    const double want = wanted(i);
    ASSERT_NEAR(got[i], want, relative * std::abs(want)) << i;
  }
}

class GpuGrids : public testing::Test {
 protected:
  const FewBlocks few_{2};
  Stream stream_;
  std::mt19937 rng_{5};

  std::vector<float> integers(int64_t n) {  // exact in BF16, with exact sums in float
    std::vector<float> v(n);
    for (float& x : v) x = static_cast<float>(static_cast<int>(rng_() % 9) - 4);
    return v;
  }
};

TEST_F(GpuGrids, CombineExperts) {
  constexpr int kTokens = kMaxStepTokens, kRows = 97;
  std::vector<int32_t> row_of(kTokens);
  std::vector<float> weights(kTokens);
  for (int t = 0; t < kTokens; ++t) {
    row_of[t] = t * 5 % kRows;
    weights[t] = static_cast<float>(t + 1);
  }
  const std::vector<float> rows = integers(kRows);
  const OnGpuBuffer<int32_t> row_of_on_gpu(stream_, row_of);
  const OnGpuBuffer<float> weights_on_gpu(stream_, weights), rows_on_gpu(stream_, rows), y(kTokens);
  combine_experts(stream_, {.rows = rows_on_gpu.data(),
                            .row_of = row_of_on_gpu.data(),
                            .weights = weights_on_gpu.data(),
                            .y = y.data(),
                            .row_stride = 1,
                            .y_stride = 1,
                            .n_tokens = kTokens,
                            .n_active = 1,
                            .cols = 1,
                            .add = false});
  expect_written(y.values(stream_), 0, [&](int64_t t) { return weights[t] * rows[row_of[t]]; });
}

// 128 heads with 16 tokens a block reach 65,535 blocks at 8,176 tokens. Rows of x overlap to save
// memory.
TEST_F(GpuGrids, PerHead) {
  constexpr int kHeads = 128, kTokens = 8193, kCols = 16;
  const RandomWeight w(stream_, rng_,
                       {.rows = kHeads, .cols = kCols, .type = Number::kBF16, .integers = true});
  const std::vector<float> x = integers(int64_t{kTokens} * kHeads + kCols);
  const OnGpuBuffer<float> x_on_gpu(stream_, x), out(int64_t{kTokens} * kHeads);
  per_head_product(stream_, {.x = x_on_gpu.data(),
                             .w = w.view(),
                             .out = out.data(),
                             .x_stride = 1,
                             .out_stride = 1,
                             .n_tokens = kTokens,
                             .n_heads = kHeads,
                             .x_cols = kCols,
                             .out_cols = 1,
                             .first_row = 0,
                             .rows_per_head = 1,
                             .transposed = false});
  expect_written(out.values(stream_), 0, [&](int64_t row) {
    double sum = 0;
    for (int c = 0; c < kCols; ++c) sum += x[row + c] * w.at(static_cast<int>(row % kHeads), c);
    return sum;
  });
}

// Queries of zeros weight all keys equally, so each output row is the mean of the visible latents.
class GpuGridsOfDecode : public GpuGrids {
 protected:
  static constexpr int kPages = 4, kRank = 2, kStride = 8;

  // Sequence s has kv_length[s] tokens on page s % kPages; the last n_tokens of them are queries.
  void decode(const std::vector<int32_t>& kv_length, int n_tokens, int heads) {
    const auto n = static_cast<int32_t>(kv_length.size());
    std::vector<int32_t> first, pages;
    for (int s = 0; s < n; ++s) {
      first.push_back(s * n_tokens);
      pages.push_back(s % kPages);
    }
    const int64_t rows = int64_t{n} * n_tokens * heads;
    std::vector<bf16> cache;
    const std::vector<float> latents = integers(int64_t{kPages} * kPageTokens * kStride);
    for (const float v : latents) cache.push_back(narrow(v));
    const OnGpuBuffer<bf16> cache_on_gpu(stream_, cache);
    const OnGpuBuffer<int32_t> firsts(stream_, first),
        ns(stream_, std::vector<int32_t>(n, n_tokens));
    const OnGpuBuffer<int32_t> lengths(stream_, kv_length), pages_on_gpu(stream_, pages);
    const OnGpuBuffer<float> zeros(stream_, std::vector<float>(kStride)), out(rows * kRank), lse(1);
    mla_decode(stream_, {.q = zeros.data(),
                         .q_rope = zeros.data(),
                         .cache = {cache_on_gpu.data(), kStride, kRank, 2, false},
                         .sequences = {.first_token = firsts.data(),
                                       .n_tokens = ns.data(),
                                       .kv_length = lengths.data(),
                                       .pages = pages_on_gpu.data(),
                                       .n = n,
                                       .max_pages = 1,
                                       .max_tokens = n_tokens},
                         .partial = lse.data(),
                         .partial_lse = lse.data(),
                         .out = out.data(),
                         .q_stride = 0,
                         .q_rope_stride = 0,
                         .out_stride = kRank,
                         .n_rows = rows,
                         .n_heads = heads,
                         .n_splits = 1,
                         .softmax_scale = 1});
    expect_written(out.values(stream_), 1e-6, [&](int64_t i) {
      const int64_t token = i / kRank / heads, sequence = token / n_tokens;
      const int64_t visible = kv_length[sequence] - n_tokens + 1 + token % n_tokens;
      double sum = 0;
      for (int64_t t = 0; t < visible; ++t)
        sum += latents[(sequence % kPages * kPageTokens + t) * kStride + i % kRank];
      return sum / static_cast<double>(visible);
    });
  }
};

// As many rows as 32,800 tokens of 128 heads.
TEST_F(GpuGridsOfDecode, OfManyRows) { decode({40}, 40, 104'960); }

TEST_F(GpuGridsOfDecode, OfManySequences) {
  std::vector<int32_t> kv_length(kMaxStepTokens);
  for (int s = 0; s < kMaxStepTokens; ++s) kv_length[s] = 1 + s % 7;
  decode(kv_length, 1, 1);
}

struct Model {
  int dim, heads, experts, active, expert_dim, vocab;
};
constexpr Model kModels[] = {{7168, 128, 256, 8, 2048, 129'280},  // DeepSeek-R1
                             {7168, 64, 384, 8, 2048, 163'840},   // Kimi-K2
                             {4, 1024, 1024, 16, 16, 1 << 18}};   // many of each, and short rows

// Launches every kernel with the largest step. No block runs; only the shapes of the grids are
// tested.
class GpuLaunches : public testing::TestWithParam<Model> {
 protected:
  static constexpr int kTokens = kMaxStepTokens, kRank = 512, kRope = 64, kNope = 128;

  const Model m_ = GetParam();
  const FewBlocks none_{0};
  Stream stream_;
  const OnGpuBuffer<float> memory_{1};
  float* const floats_ = memory_.data();
  int32_t* const ints_ = reinterpret_cast<int32_t*>(floats_);
  bf16* const halves_ = reinterpret_cast<bf16*>(floats_);
  const Matrix matrix_ = {floats_, 1};
  const Fp8Rows fp8_ = {reinterpret_cast<fp8_e4m3*>(floats_), floats_, 16, 1};
  const LatentCache cache_ = {floats_, kRank + kRope, kRank, kRope, false};

  Weight weight(int rows, int cols, Number type = Number::kF8E4M3) const {
    return {.data = floats_,
            .stride = cols,
            .type = type,
            .rows = rows,
            .cols = cols,
            .scale = floats_};
  }
  Workspace workspace() const { return {floats_, reinterpret_cast<uint32_t*>(floats_)}; }

  void small_kernels();
  void products();
  void experts();
  void attention();
};

void GpuLaunches::small_kernels() {
  embed(stream_, {ints_, floats_, 1, Number::kBF16, matrix_, kTokens, m_.dim});
  gather_rows(stream_, {matrix_, ints_, matrix_, kTokens, m_.dim});
  rms_norm(stream_, {matrix_, floats_, matrix_, kTokens, m_.dim, 1});
  for (const auto each : {&add, &silu_mul, &clear})
    each(stream_, {matrix_, matrix_, kTokens, m_.dim});
  rope(stream_, {matrix_, ints_, floats_, 1, kTokens, m_.heads, kRope / 2});
  append_kv(stream_, {matrix_, ints_, halves_, 1, kTokens, kRank + kRope});
  append_fp8(stream_, {floats_, 1, ints_, floats_, kTokens, kRank, kRope});
  for (const bool fp8 : {false, true})
    rotate_and_append(stream_, {matrix_, matrix_, floats_, 1, ints_, floats_, ints_, floats_, 1,
                                fp8, 1, kTokens, m_.heads, kRank, kRope});
  RouterArgs router = {};
  router.tokens = kTokens;
  router.n_experts = m_.experts;
  route(stream_, router);
  sort_pairs(stream_, {ints_, 1, ints_, ints_, ints_, kTokens, m_.active, m_.experts});
  draw(stream_, {matrix_, nullptr, nullptr, ints_, kTokens, m_.vocab});
}

void GpuLaunches::products() {
  for (const int rows : {m_.dim, m_.vocab}) {
    skinny_product(stream_,
                   {floats_, weight(rows, m_.dim), floats_, 1, 1, kSkinnyTokens, workspace(), 132});
    exact_product(stream_, {floats_, weight(rows, m_.dim), floats_, 1, 1, kTokens});
    for (const int n_multiprocessors : {1, 132})
      matrix_product(stream_, {.x = halves_,
                               .w = weight(rows, m_.dim),
                               .out = floats_,
                               .x_stride = 1,
                               .out_stride = 1,
                               .n_tokens = kTokens,
                               .workspace = workspace(),
                               .n_multiprocessors = n_multiprocessors});
    plain_product(stream_, {matrix_, weight(rows, m_.dim), matrix_, kTokens, m_.dim, rows});
  }
  round_rows(stream_, {floats_, halves_, 1, product_stride(m_.dim), kTokens, m_.dim});
  round_rows_fp8(stream_, {floats_, fp8_, 1, kTokens, m_.dim});
  for (const bool transposed : {false, true})
    per_head_product(stream_, {.x = floats_,
                               .w = weight(m_.heads * 2 * kNope, kRank),
                               .out = floats_,
                               .x_stride = 1,
                               .out_stride = 1,
                               .n_tokens = kTokens,
                               .n_heads = m_.heads,
                               .x_cols = transposed ? kNope : kRank,
                               .out_cols = transposed ? kRank : kNope,
                               .first_row = 0,
                               .rows_per_head = 2 * kNope,
                               .transposed = transposed});
}

void GpuLaunches::experts() {
  const int pairs = kTokens * m_.active;
  const ExpertWeights up = {weight(m_.expert_dim, m_.dim), 1, 1};
  const ExpertWeights down = {weight(m_.dim, m_.expert_dim), 1, 1};
  for (const ExpertRows& rows :
       {ExpertRows{.offsets = ints_, .n_experts = m_.experts, .max_rows = pairs},
        ExpertRows{.counts = ints_,
        .n_experts = m_.experts,
        .slots = kTokens / 8,
        .max_rows = m_.experts * kTokens / 8}}) {
    grouped_gate_up(stream_, {.x = halves_,
                              .tokens = ints_,
                              .rows = rows,
                              .gate = up,
                              .up = up,
                              .hidden = halves_,
                              .x_stride = 16,
                              .hidden_stride = m_.expert_dim});
    round_hidden_fp8(stream_, {halves_, rows, fp8_, m_.expert_dim, m_.expert_dim});
    grouped_down(stream_, {.hidden = halves_,
                           .rows = rows,
                           .down = down,
                           .out = floats_,
                           .hidden_stride = 16,
                           .out_stride = 1});
  }
  combine_experts(stream_,
                  {floats_, ints_, floats_, floats_, 1, 1, kTokens, m_.active, m_.dim, false});
  const auto plain = [](const ExpertWeights& w) { return PlainExpertWeights{w.first, 1, 1}; };
  plain_experts(stream_, {matrix_, plain(up), plain(up), plain(down), ints_, 1, matrix_, matrix_,
                          matrix_, kTokens, m_.active});
  place_experts(stream_, {ints_, 1, ints_, ints_, kTokens, m_.active});
  hand_down(stream_, {.x = matrix_,
                      .ids = ints_,
                      .ids_stride = 1,
                      .weights = matrix_,
                      .gpu_place = ints_,
                      .gpu_ids = ints_,
                      .to = {ints_, floats_, floats_, floats_, 32},
                      .type = RowType::kBF16,
                      .tokens = kTokens,
                      .n_active = m_.active,
                      .dim = m_.dim});
  auto* const bytes = reinterpret_cast<uint8_t*>(floats_);
  unpack_panels(stream_, {bytes, int64_t{16} * 2 * m_.dim + 1024, Number::kBF16, bytes, 1,
                          m_.expert_dim, (2 * m_.dim + 15) / 16 * 16});
}

void GpuLaunches::attention() {
  for (const auto& [n, max_tokens] : {std::pair{1, kTokens}, {kTokens, 1}})
    for (const int n_splits : {1, mla_decode_splits(n, max_tokens, m_.heads, 132, 132), 132}) {
      MlaDecodeArgs a = {};
      a.cache = cache_;
      a.sequences = {ints_, ints_, ints_, ints_, n, 1, max_tokens};
      a.n_heads = m_.heads;
      a.n_splits = n_splits;
      mla_decode(stream_, a);
    }
  MlaPrefillArgs a = {};
  a.cache = cache_;
  a.kv_b = weight(m_.heads * 2 * kNope, kRank);
  a.n_tokens = a.kv_length = kTokens;
  a.n_heads = m_.heads;
  a.plan = {m_.heads, kTokens};
  a.nope_dim = a.v_dim = kNope;
  a.latents = a.restored = halves_;
  a.pages = ints_;
  mla_prefill(stream_, a);
  // CudaAttention passes at most 32 tokens at a time.
  plain_attention(stream_, {.q = matrix_,
                            .q_rope = matrix_,
                            .cache = halves_,
                            .cache_stride = 1,
                            .at = {},
                            .out = matrix_,
                            .first_token = 0,
                            .n_tokens = 32,
                            .n_heads = m_.heads,
                            .rank = kRank,
                            .rope_dim = kRope,
                            .scale = 1});
}

TEST_P(GpuLaunches, TakeTheLargestStep) {
  if (!open_gpu().emulated) GTEST_SKIP() << "of an emulated GPU, which needs no memory for it";
  small_kernels();
  products();
  experts();
  attention();
  stream_.wait();
}

INSTANTIATE_TEST_SUITE_P(Models, GpuLaunches, testing::ValuesIn(kModels), [](const auto& model) {
  return "heads_" + std::to_string(model.param.heads);
});

}  // namespace
}  // namespace tandem::gpu::test
