// CPU attention over a paged cache, both forms, against softmax in double precision: long sequences
// whose parts are merged, several sequences in one step, and scattered pages.
#include <numeric>

#include "ops/cpu_ops.h"
#include "tests/check_close.h"
#include "tests/kernel_cases.h"

namespace tandem::test {
namespace {

constexpr int kHeads = 3;

ModelConfig config(int n_heads) {
  ModelConfig c = with_block(32);
  c.dim = 64;
  c.mla = {
      .n_heads = n_heads, .q_rank = 0, .kv_rank = 40, .nope_dim = 24, .rope_dim = 8, .v_dim = 20};
  return c;
}

// Random numbers that BF16 represents exactly.
std::vector<float> bf16_numbers(std::mt19937& rng, size_t n, float deviation) {
  std::vector<float> v = normal(rng, n, deviation);
  for (float& x : v) x = std::bit_cast<float>(uint32_t{to_bf16(x)} << 16);
  return v;
}

// Sequences, each with (tokens of this step, tokens in the cache). Their pages are scattered over a
// cache whose other rows are NaN.
struct Step {
  const ModelConfig c;
  const int width = c.mla.kv_rank + c.mla.rope_dim;
  std::mt19937 rng{5};
  std::vector<Sequence> sequences;
  std::vector<std::vector<int32_t>> pages;
  std::vector<float> keys;  // [pages * kPageSize, width]
  std::vector<uint16_t> encoded;
  int n_tokens = 0;

  explicit Step(const std::vector<std::pair<int, int>>& lengths, int n_heads = kHeads)
      : c(config(n_heads)) {
    int n_pages = 0;
    for (const auto& [n, total] : lengths) n_pages += (total + kPageSize - 1) / kPageSize;
    std::vector<int32_t> free(n_pages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), rng);
    keys.assign(int64_t{n_pages} * kPageSize * width, kNaN);
    for (const auto& [n, total] : lengths) {
      std::vector<int32_t>& own = pages.emplace_back();
      for (int i = 0; i < total; ++i) {
        if (i % kPageSize == 0) own.push_back(free.back()), free.pop_back();
        // The magnitude of keys varies with their position, so that the largest score is not always
        // in the same part.
        const float size = 0.5f + static_cast<float>(i / 700 % 3);
        const std::vector<float> key = bf16_numbers(rng, width, size);
        std::copy(key.begin(), key.end(), keys.begin() + row(pages.back(), i) * width);
      }
    }
    for (size_t i = 0; i < lengths.size(); ++i) {
      sequences.push_back({n_tokens, lengths[i].first, lengths[i].second, pages[i]});
      n_tokens += lengths[i].first;
    }
    for (const float v : keys) encoded.push_back(std::isnan(v) ? 0x7fff : to_bf16(v));
  }

  static int64_t row(const std::vector<int32_t>& pages, int position) {
    return int64_t{pages[position / kPageSize]} * kPageSize + position % kPageSize;
  }
  TensorView cache(DType dtype) {
    void* const data = dtype == DType::kF32 ? static_cast<void*>(keys.data()) : encoded.data();
    return {data, static_cast<int64_t>(keys.size()) / width, width, width, dtype};
  }
  const float* key(size_t sequence, int position) const {
    return keys.data() + row(pages[sequence], position) * width;
  }
};

double dot(const float* a, const auto* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

TensorView matrix(std::vector<float>& v, int64_t cols) {
  return {v.data(), static_cast<int64_t>(v.size()) / cols, cols, cols, DType::kF32};
}

class Attention : public testing::TestWithParam<cpu::Isa> {
 protected:
  const cpu::KernelTable t_ = cpu::kernels_for(GetParam());
  const std::vector<std::pair<int, int>> lengths_ = {{1, 4500}, {30, 100}, {5, 2050}, {140, 700}};
  static constexpr float kScale = 0.12f;
};

// BF16 weights have errors of up to 2^-9 each, and so have restored keys and values.
TEST_P(Attention, BothFormsMatchSoftmaxInDouble) {
  Step step(lengths_);
  const MlaConfig& m = step.c.mla;
  const int rows = step.n_tokens * kHeads, rank = m.kv_rank;
  RandomModel store(step.c, DType::kF32);
  const QuantView kv_b = store.matrix(kHeads * (m.nope_dim + m.v_dim), rank, DType::kF32);
  const Packed packed(t_, kv_b);
  Team team(0);
  CpuOps ops(t_, step.c, step.n_tokens, team);
  std::vector<float> latent_q = bf16_numbers(step.rng, rows * rank, 1),
                     nope_q = bf16_numbers(step.rng, rows * m.nope_dim, 1),
                     rope_q = bf16_numbers(step.rng, rows * m.rope_dim, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<float> absorbed(rows * rank, kNaN), naive(rows * m.v_dim, kNaN);
    MlaArgs args{
        step.sequences, matrix(latent_q, rank), matrix(rope_q, m.rope_dim), step.cache(dtype), m,
        kScale,         matrix(absorbed, rank)};
    ops.mla_absorbed(args);
    args.q = matrix(nope_q, m.nope_dim);
    args.out = matrix(naive, m.v_dim);
    ops.mla_naive(args, packed.w);

    const bool rounds = dtype == DType::kBF16;
    for (size_t s = 0; s < step.sequences.size(); ++s) {
      const Sequence& sequence = step.sequences[s];
      // Short steps check every token; every step checks all heads.
      for (int t = 0; t<sequence.n_tokens; t += sequence.n_tokens> 40 ? 23 : 1) {
        const int seen = sequence.kv_length - sequence.n_tokens + 1 + t;
        for (int h = 0; h < kHeads; ++h) {
          const int row = (sequence.first_token + t) * kHeads + h;
          const int first = h * (m.nope_dim + m.v_dim);
          Vec q(rank);  // the naive form's query in latent space
          for (int d = 0; d < m.nope_dim; ++d)
            for (int c = 0; c < rank; ++c)
              q[c] += nope_q[row * m.nope_dim + d] * value(kv_b, first + d, c);
          Vec want(rank), sum(rank), bound(rank, 5e-5), absolute(rank);
          double total = 0, total_naive = 0;
          std::vector<double> p(seen), p_naive(seen);
          for (int j = 0; j < seen; ++j) {
            const float* const key = step.key(s, j);
            const double rope = dot(&rope_q[row * m.rope_dim], key + rank, m.rope_dim);
            p[j] = kScale * (dot(&latent_q[row * rank], key, rank) + rope);
            p_naive[j] = kScale * (dot(key, q.data(), rank) + rope);
          }
          const double top = *std::max_element(p.begin(), p.end());
          const double top_naive = *std::max_element(p_naive.begin(), p_naive.end());
          for (int j = 0; j < seen; ++j) {
            total += p[j] = std::exp(p[j] - top);
            total_naive += p_naive[j] = std::exp(p_naive[j] - top_naive);
          }
          for (int j = 0; j < seen; ++j)
            for (int c = 0; c < rank; ++c) {
              const double v = step.key(s, j)[c];
              want[c] += p[j] / total * v;
              sum[c] += p_naive[j] / total_naive * v;
              if (rounds) bound[c] += 0x1p-9 * std::fabs(p[j] / total * v);
              absolute[c] += std::fabs(p_naive[j] / total_naive * v);
            }
          SCOPED_TRACE(testing::Message()
                       << name_of(dtype) << " sequence " << s << " token " << t << " head " << h);
          expect_close(std::span(absorbed).subspan(row * rank, rank), want, bound);
          Vec values(m.v_dim), values_bound(m.v_dim);
          for (int d = 0; d < m.v_dim; ++d) {
            double size = 0;
            for (int c = 0; c < rank; ++c) {
              const double w = value(kv_b, first + m.nope_dim + d, c);
              values[d] += w * sum[c];
              size += std::fabs(w) * absolute[c];
            }
            values_bound[d] = 5e-5 + (rounds ? 0.02 * size : 2e-5 * size);
          }
          expect_close(std::span(naive).subspan(row * m.v_dim, m.v_dim), values, values_bound);
        }
      }
    }
  }
}

// A sequence's result does not depend on the batch composition or on the number of threads.
TEST_P(Attention, BitsDoNotDependOnTheStep) {
  Step step(lengths_);
  const int rank = step.c.mla.kv_rank, rope = step.c.mla.rope_dim, rows = step.n_tokens * kHeads;
  std::vector<float> q = normal(step.rng, rows * rank), q_rope = normal(step.rng, rows * rope);
  const DType dtype = t_.attention == cpu::ActivationType::kF32 ? DType::kF32 : DType::kBF16;
  const auto attend = [&](int n_threads, std::span<const Sequence> sequences,
                          std::vector<float>& out) {
    Team team(n_threads);
    CpuOps ops(t_, step.c, step.n_tokens, team);
    ops.mla_absorbed({sequences, matrix(q, rank), matrix(q_rope, rope), step.cache(dtype),
                      step.c.mla, kScale, matrix(out, rank)});
  };
  std::vector<float> together(rows * rank, kNaN), alone(rows * rank, kNaN);
  attend(0, step.sequences, together);
  for (const Sequence& s : step.sequences) attend(1, {&s, 1}, alone);
  EXPECT_EQ(together, alone);
}

// The naive form has the same property, also where several threads share the tokens of a head
// because there are more threads than heads.
TEST_P(Attention, RestoredBitsDoNotDependOnTheStep) {
  Step step({{300, 1400}, {3, 70}}, 1);
  const MlaConfig& m = step.c.mla;
  const int rows = step.n_tokens;
  RandomModel store(step.c, DType::kBF16);
  const Packed kv_b(t_, store.matrix(m.nope_dim + m.v_dim, m.kv_rank, DType::kBF16));
  std::vector<float> q = normal(step.rng, rows * m.nope_dim),
                     q_rope = normal(step.rng, rows * m.rope_dim);
  const auto attend = [&](int n_threads, std::span<const Sequence> sequences,
                          std::vector<float>& out) {
    Team team(n_threads);
    CpuOps ops(t_, step.c, step.n_tokens, team);
    ops.mla_naive({sequences, matrix(q, m.nope_dim), matrix(q_rope, m.rope_dim),
                   step.cache(cache_type_for(t_)), m, kScale, matrix(out, m.v_dim)},
                  kv_b.w);
  };
  std::vector<float> together(rows * m.v_dim, kNaN), alone(rows * m.v_dim, kNaN);
  attend(0, step.sequences, together);
  for (const Sequence& s : step.sequences) attend(1, {&s, 1}, alone);
  EXPECT_EQ(together, alone);
}

std::vector<cpu::Isa> isas() {
  std::vector<cpu::Isa> all;
  for (int i = 0; i <= static_cast<int>(cpu::best_isa()); ++i) all.push_back(cpu::Isa(i));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Isas, Attention, testing::ValuesIn(isas()),
                         [](const auto& isa) { return cpu::name_of(isa.param); });

}  // namespace
}  // namespace tandem::test
