// Experts whose sums are known, and the tokens of replicas whose rows travel to them.
#pragma once
#include <random>
#include <vector>

#include "model/config.h"
#include "offload/ranks/row_format.h"
#include "ops/expert_pool.h"
#include "ops/router.h"

namespace tandem::test {

// y += sum of weight * expert(x), where expert e multiplies a row by e + 1; negative ids are
// skipped.
inline void add_multiplied(const ExpertBatch& batch, TensorView y) {
  for (int64_t t = 0; t < y.rows; ++t)
    for (int64_t k = 0; k < batch.routing.ids.cols; ++k) {
      const int32_t e = batch.routing.ids.row<int32_t>(t)[k];
      const float weight = batch.routing.weights.row<float>(t)[k] * static_cast<float>(e + 1);
      for (int64_t i = 0; e >= 0 && i < y.cols; ++i)
        y.row<float>(t)[i] += weight * batch.x.row<float>(t)[i];
    }
}

// The tokens of a replica in a step: of sequences with so many tokens each.
struct ReplicaTokens {
  ReplicaTokens(const ModelConfig& c, const std::vector<int>& n_tokens, unsigned seed)
      : n_active(c.router.n_active), dim(c.dim) {
    std::mt19937 random(seed);
    for (const int n : n_tokens) {
      sequences.push_back({static_cast<int32_t>(numbers.size()), n, n, {}});
      numbers.resize(numbers.size() + n);
    }
    x.resize(numbers.size() * dim);
    for (float& v : x) v = static_cast<float>(random() % 100) / 64;
    ids = random_experts(c.router, static_cast<int>(numbers.size()), random);
    for (size_t i = 0; i < ids.size(); ++i)
      weights.push_back(0.25f + static_cast<float>(random() % 16) / 16);
  }
  Batch batch() const { return {numbers, numbers, sequences, {}}; }
  ExpertBatch experts(int layer, int micro_batch, int first, int n) {
    return {
        .layer = layer,
        .x = TensorView{x.data(), std::ssize(numbers), dim, dim}.rows_from(first, n),
        .routing = {TensorView{ids.data(), std::ssize(numbers), n_active, n_active, DType::kI32}
                        .rows_from(first, n),
                    TensorView{weights.data(), std::ssize(numbers), n_active, n_active}.rows_from(
                        first, n)},
        .first_row = first,
        .micro_batch = micro_batch};
  }
  // The sums of a layer, added to y = 1.
  std::vector<float> sums() const {
    std::vector<float> y(x.size(), 1.f);
    for (size_t i = 0; i < x.size(); ++i)
      for (int64_t k = 0; k < n_active; ++k) {
        const size_t pair = i / dim * n_active + k;
        y[i] += weights[pair] * static_cast<float>(ids[pair] + 1) * x[i];
      }
    return y;
  }
  const int64_t n_active, dim;
  std::vector<int32_t> numbers;
  std::vector<Sequence> sequences;
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
};

// The tokens whose rows were rounded on their way to the experts.
inline ReplicaTokens as_sent(ReplicaTokens tokens, RowFormat there) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const RowCodec codec(kernels, there, tokens.dim);
  std::vector<std::byte> bytes(codec.bytes());
  for (size_t i = 0; i < tokens.x.size(); i += tokens.dim) {
    codec.encode(&tokens.x[i], bytes.data());
    codec.decode(bytes.data(), &tokens.x[i]);
  }
  return tokens;
}

// How far sums may be away, as a share of the largest: no term is negative, and sums that come back
// as BF16 are rounded once by each rank, by at most 2^-8 of themselves. Rows in another format than
// as_sent() has are further away: E4M3 rounds a number by up to 2^-4 of itself.
inline double share_of_sums(RowFormat back) {
  return 1e-5 + (back == RowFormat::kBf16 ? 0x1p-8 : 0);
}

constexpr int kMaxLaneTokens = 80;  // of a replica in kLaneSteps

// Steps with the tokens of each sequence, [steps][replicas][sequences].
inline const std::vector<std::vector<std::vector<int>>> kLaneSteps = {
    {{1, 1, 1}, {1, 1, 1, 1}, {1}, {1, 1}},    // decode
    {{70}, {3}, {}, {1, 1}},                   // a prompt beside decode, and an empty replica
    {{}, {}, {1}, {}},                         // nothing but one token
    {{9, 9}, {40, 1, 1}, {80}, {2, 2, 2, 2}},  // drafts beside prompts
    {{1, 1, 1, 1, 1}, {1}, {}, {}},
    {{80}, {9, 9, 9, 9, 9, 9, 9, 9, 8}, {}, {80}},  // micro-batches of different sizes
};

}  // namespace tandem::test
