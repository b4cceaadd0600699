// The parts of the engine that round activations to FP8, against the same rounding in double
// precision: dense products, and experts computed together or a few at a time, as when streamed.
// Whole models amplify differences too much for such a comparison.
#include "gpu_kernels/runtime.h"
#include "ops/cuda_products.h"
#include "tests/hybrid_layers.h"
#include "tests/naive_deepseek.h"

namespace tandem::test {
namespace {

constexpr int kManyTokens = 36, kFewTokens = gpu::kSkinnyTokens;

ModelConfig config_of_odd_blocks() {
  ModelConfig c = hand_off_config();
  c.n_layers = 2;
  c.dim = 200;
  c.expert_dim = 144;
  return c;
}

// A scale for each row and 128 columns, behind the codes of all rows.
TEST(Fp8RowsIn, ScalesFollowTheCodes) {
  std::vector<float> memory(4096);
  for (const auto& [cols, scales] : {std::pair{127, 1}, {128, 1}, {129, 2}, {256, 2}, {257, 3}}) {
    const gpu::Fp8Rows rows = fp8_rows_in(memory.data(), 3, cols);
    EXPECT_EQ(static_cast<void*>(rows.codes), memory.data());
    EXPECT_GE(rows.stride, cols);
    EXPECT_EQ(reinterpret_cast<std::byte*>(rows.scales),
              reinterpret_cast<std::byte*>(memory.data()) + 3 * rows.stride);
    EXPECT_EQ(rows.scale_stride, scales) << cols;
  }
}

class GpuFp8Activations : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu::open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
    std::map<std::string, QuantView> stored;
    const auto for_each = [&](ModelWeights& weights, auto visit) {
      for_each_weight(weights, c_, visit);
    };
    int64_t bytes = 0;
    for_each(random_.stored, [&](const WeightSpec& spec, QuantView& w) {
      stored[spec.name] = w;
      bytes += CudaWeights::bytes_of(w, spec.use);
    });
    home_.allocate(bytes);
    for_each(on_gpu_, [&](const WeightSpec& spec, QuantView& slot) {
      const QuantView& from = stored.at(spec.name);
      slot = home_.reserve(from, spec.use);
      home_.upload_rows(from.q.row_data(0), from, slot, 0, from.q.rows);
      if (!slot.scale.empty()) home_.upload_scales(from.scale.row_data(0), from, slot);
    });
    home_.finish();
  }

  TensorView matrix(const auto& on_gpu, int64_t rows, int64_t cols, DType dtype) const {
    return {on_gpu.data(), rows, cols, cols, dtype};
  }
  Vec row(const std::vector<float>& x, int token) const {
    return {x.begin() + token * c_.dim, x.begin() + (token + 1) * c_.dim};
  }
  void expect_experts(int n_tokens, int at_once, bool rounded, int n_first = 0);

  const ModelConfig c_ = config_of_odd_blocks();
  RandomModel random_{c_, DType::kF8E4M3};
  gpu::Stream stream_;
  CudaWeights home_;
  ModelWeights on_gpu_;
  std::mt19937 rng_{3};
};

// Steps with enough tokens for tiles are rounded, smaller ones are not.
TEST_F(GpuFp8Activations, DenseProducts) {
  const CudaLimits limits = {
      .max_tokens = kManyTokens, .context = 64, .n_multiprocessors = 4, .fp8_activations = true};
  CudaProducts products(c_, limits, stream_);
  const QuantView& q = random_.stored.layers[0].attn.q;
  for (const int n : {kManyTokens, kFewTokens}) {
    const std::vector<float> x = gpu::test::random_floats(rng_, n * c_.dim, 1);
    const gpu::test::OnGpuBuffer<float> in(stream_, x), out(n * q.q.rows);
    products.multiply(matrix(in, n, c_.dim, DType::kF32), on_gpu_.layers[0].attn.q,
                      matrix(out, n, q.q.rows, DType::kF32));
    std::vector<double> rounded, exact;
    for (int t = 0; t < n; ++t) {
      const Vec r = mul(q, rounded_to_e4m3(row(x, t))), e = mul(q, row(x, t));
      rounded.insert(rounded.end(), r.begin(), r.end());
      exact.insert(exact.end(), e.begin(), e.end());
    }
    const std::vector<float> got = out.values(stream_);
    expect_close(got, n > kFewTokens ? rounded : exact, 4e-3 * largest(exact));
    std::vector<double> difference;
    for (size_t i = 0; i < exact.size(); ++i) difference.push_back(rounded[i] - exact[i]);
    EXPECT_GT(largest(difference), 2e-2 * largest(exact)) << "either would pass";
  }
}

// Hidden rows are rounded to BF16 first, so some numbers fall on the other side of a tie. n_first:
// tokens of the first of two micro-batches; 0: one micro-batch.
void GpuFp8Activations::expect_experts(int n_tokens, int at_once, bool rounded, int n_first) {
  SCOPED_TRACE(testing::Message() << n_tokens << " tokens, " << at_once << " experts at once");
  CudaExpertRows rows(c_, kManyTokens, stream_, true);
  CudaExperts experts(c_, on_gpu_, rows, stream_);
  const std::vector<float> x = gpu::test::random_floats(rng_, n_tokens * c_.dim, 1);
  std::vector<float> weights;
  std::vector<int32_t> ids;
  for (int i = 0; i < n_tokens * kActive; ++i) {
    ids.push_back((i * 5 + i / kActive) % kExperts);
    weights.push_back(0.1f + 0.1f * static_cast<float>(i % 7));
  }
  const gpu::test::OnGpuBuffer<float> in(stream_, x), factors(stream_, weights),
      y(stream_, std::vector<float>(n_tokens * c_.dim));
  const gpu::test::OnGpuBuffer<int32_t> chosen(stream_, ids);
  const TensorView out = matrix(y, n_tokens, c_.dim, DType::kF32);
  const ExpertBatch batch = {1,
                             matrix(in, n_tokens, c_.dim, DType::kF32),
                             {matrix(chosen, n_tokens, kActive, DType::kI32),
                              matrix(factors, n_tokens, kActive, DType::kF32)}};
  if (n_first > 0) {
    const auto part = [&](int first, int n) {
      return ExpertBatch{.layer = 1,
                         .x = batch.x.rows_from(first, n),
                         .routing = {batch.routing.ids.rows_from(first, n),
                                     batch.routing.weights.rows_from(first, n)},
                         .first_row = first,
                         .micro_batch = first > 0 ? 1 : 0};
    };
    const Ticket one = experts.submit(part(0, n_first));
    const Ticket two = experts.submit(part(n_first, n_tokens - n_first));
    experts.add_to(one, out.rows_from(0, n_first));
    experts.add_to(two, out.rows_from(n_first, n_tokens - n_first));
  } else if (at_once == kExperts) {
    experts.add_to(experts.submit(batch), out);
  } else {
    const std::vector<FfnWeights>& all = on_gpu_.layers[1].experts;
    const auto some = [&](QuantView FfnWeights::*which, int first) {
      const QuantView &a = all[first].*which, &b = all[first + 1].*which;
      return gpu::ExpertWeights{
          gpu_weight(a), b.q.row_data(0) - a.q.row_data(0),
          static_cast<float*>(b.scale.data) - static_cast<float*>(a.scale.data)};
    };
    const CudaExpertRows::Sorted sorted = rows.sort(batch, kExperts, gpu_weight(all[0].gate));
    for (int first = 0; first < kExperts; first += at_once) {
      rows.gate_up(sorted, some(&FfnWeights::gate, first), some(&FfnWeights::up, first),
                   {first, at_once});
      rows.down(sorted, some(&FfnWeights::down, first), {first, at_once});
    }
    rows.add_to(sorted, out);
  }
  std::vector<double> want;
  for (int t = 0; t < n_tokens; ++t) {
    Vec sum(c_.dim);
    for (int i = t * kActive; i < (t + 1) * kActive; ++i) {
      const FfnWeights& e = random_.stored.layers[1].experts[ids[i]];
      const Vec h = rounded ? rounded_to_e4m3(row(x, t)) : row(x, t), up = mul(e.up, h);
      Vec hidden = mul(e.gate, h);
      for (size_t k = 0; k < hidden.size(); ++k)
        hidden[k] =
            gpu::test::rounded(static_cast<float>(hidden[k] / (1 + std::exp(-hidden[k])) * up[k]));
      const Vec part = mul(e.down, rounded ? rounded_to_e4m3(hidden) : hidden);
      for (int k = 0; k < c_.dim; ++k) sum[k] += weights[i] * part[k];
    }
    want.insert(want.end(), sum.begin(), sum.end());
  }
  expect_close(y.values(stream_), want, 1e-2 * largest(want));
}

TEST_F(GpuFp8Activations, Experts) { expect_experts(kManyTokens, kExperts, true); }
TEST_F(GpuFp8Activations, ExpertsAFewAtATime) { expect_experts(kManyTokens, 2, true); }
TEST_F(GpuFp8Activations, ExpertsOfTwoMicroBatches) {
  for (const int n_first : {kManyTokens / 2, kManyTokens / 2 + 1})
    expect_experts(kManyTokens, kExperts, true, n_first);
}
TEST_F(GpuFp8Activations, ExpertsOfFewTokens) { expect_experts(kFewTokens, kExperts, false); }

}  // namespace
}  // namespace tandem::test
