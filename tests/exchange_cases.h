// Expert exchanges checked by the ranks themselves, run by threads (exchange_test.cpp) and by
// processes under MPI (mpi_ranks.cpp): random routing with replicas, experts that no rank has, ids
// of -1, ranks without experts and without tokens; against sums in double precision and against the
// bits of one rank.
#pragma once
#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "offload/ranks/expert_exchange.h"
#include "tests/check_close.h"

namespace tandem::test {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct ExchangeKind {
  ExchangeMode mode;
  RowFormat there, back;
  ReturnedRows returned;
};

inline std::vector<ExchangeKind> exchange_kinds() {
  using enum RowFormat;
  constexpr auto kPerRank = ReturnedRows::kPerRank;
  std::vector<ExchangeKind> all;
  for (const RowFormat there : {kF32, kBf16, kFp8}) {
    all.push_back({ExchangeMode::kGather, there, kF32, kPerRank});
    for (const auto mode : {ExchangeMode::kAllToAll, ExchangeMode::kLowLatency})
      for (const RowFormat back : {kF32, kBf16})
        for (const auto returned : {kPerRank, ReturnedRows::kPerExpert})
          all.push_back({mode, there, back, returned});
  }
  return all;
}

inline std::string name_of(const ExchangeKind& k) {
  constexpr const char* kModes[] = {"gather", "all-to-all", "low latency"};
  constexpr const char* kFormats[] = {"F32", "BF16", "FP8"};
  return fmt::format("{}, {} there, {} back, a row per {}", kModes[int(k.mode)],
                     kFormats[int(k.there)], kFormats[int(k.back)],
                     k.returned == ReturnedRows::kPerRank ? "rank" : "expert");
}

constexpr int kLayers = 3, kExperts = 24, kActive = 4, kMaxTokens = 6;

// Column c of expert(x): a mixture of two columns with factors in [-1, 1], all different.
inline double factor(int layer, int id, int64_t c, int which) {
  uint64_t h = (uint64_t(layer * 1000 + id) << 32 ^ uint64_t(c * 2 + which)) + 1;
  h *= 0x9e3779b97f4a7c15u;
  h ^= h >> 29;
  h *= 0xbf58476d1ce4e5b9u;
  return float(double(h >> 11) * 0x1p-52 - 1);
}
template <class Number>
Number expert_output(int layer, int id, const float* x, int64_t dim, int64_t c) {
  return Number(factor(layer, id, c, 0)) * Number(x[c]) +
         Number(factor(layer, id, c, 1)) * Number(x[(c + id + 1) % dim]);
}

// Experts that are added in ascending order. Rows without experts, and the weights of negative ids,
// are not read.
inline void compute(const ExpertBatch& batch, TensorView sums) {
  for (int64_t t = 0; t < sums.rows; ++t) {
    std::vector<std::pair<int32_t, float>> chosen;
    for (int64_t k = 0; k < batch.routing.ids.cols; ++k)
      if (const int32_t id = batch.routing.ids.row<int32_t>(t)[k]; id >= 0)
        chosen.emplace_back(id, batch.routing.weights.row<float>(t)[k]);
    std::sort(chosen.begin(), chosen.end());
    for (const auto& [id, weight] : chosen)
      for (int64_t c = 0; c < sums.cols; ++c)
        sums.row<float>(t)[c] +=
            weight * expert_output<float>(batch.layer, id, batch.x.row<float>(t), sums.cols, c);
  }
}

// The tokens of a rank.
struct ExchangeTokens {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
  int64_t n() const { return std::ssize(ids) / kActive; }
  ExpertBatch batch(int layer, int64_t dim) {
    return {layer,
            {x.data(), n(), dim, dim},
            {{ids.data(), n(), kActive, kActive, DType::kI32},
             {weights.data(), n(), kActive, kActive}}};
  }
};

// What all ranks know of a case, from its number alone.
struct ExchangeCase {
  ExchangeCase(int number, int n_ranks, int64_t dim)
      : random(number),
        owners(kLayers, kExperts, {.first = number % 5, .n_of_host = 1 + number % 3},
               number % 4 < 2 ? ReplicaChoice::kNearest : ReplicaChoice::kLeastLoaded) {
    const int without_experts = n_ranks > 1 && number % 3 == 1 ? below(n_ranks) : -1;
    for (int layer = 0; layer < kLayers; ++layer)
      for (int e = 0; e < kExperts; ++e) {
        std::vector<int> ranks(n_ranks);
        std::iota(ranks.begin(), ranks.end(), 0);
        std::shuffle(ranks.begin(), ranks.end(), random);
        std::erase(ranks, without_experts);
        const bool on_no_rank = number % 2 == 1 && below(8) == 0;
        const int replicas = on_no_rank ? 0 : 1 + (below(4) == 0 ? below(n_ranks) : 0);
        ranks.resize(std::min<size_t>(ranks.size(), replicas));
        for (const int r : ranks) owners.add(layer, e, r);
      }
    for (int r = 0; r < n_ranks; ++r) tokens.push_back(make(dim));
  }
  int below(int n) { return static_cast<int>(random() % n); }
  ExchangeTokens make(int64_t dim) {
    ExchangeTokens t;
    const int n = below(4) == 0 ? 0 : below(kMaxTokens + 1);
    for (int i = 0; i < n; ++i) {
      std::vector<int32_t> chosen;
      const int n_left_out = below(3) == 0 ? below(kActive + 1) : 0;
      while (std::ssize(chosen) < kActive - n_left_out)
        if (const int32_t id = below(1 + below(kExperts));  // low numbers are popular
            std::find(chosen.begin(), chosen.end(), id) == chosen.end())
          chosen.push_back(id);
      chosen.resize(kActive, -1);
      std::shuffle(chosen.begin(), chosen.end(), random);
      for (const int32_t id : chosen)
        t.weights.push_back(id < 0 ? kNan : static_cast<float>(1 + below(1000)) / 1000);
      for (int64_t c = 0; c < dim; ++c)
        t.x.push_back(n_left_out == kActive ? kNan : std::normal_distribution<float>()(random));
      t.ids.insert(t.ids.end(), chosen.begin(), chosen.end());
    }
    return t;
  }

  std::mt19937 random;
  ExpertOwners owners;
  std::vector<ExchangeTokens> tokens;  // [ranks]
};

// What a token's row becomes: in double precision, with the bound; and as one rank adds it up,
// which sees rows and answers as they are rounded on their way.
struct ExpectedRow {
  ExpectedRow(const ExchangeCase& c, const ExchangeTokens& tokens, int layer, int64_t t,
              const RowCodec& there, const RowCodec& back, int64_t dim, double epsilon)
      : sum(dim, 1.0), bound(dim, epsilon), bits(dim, 0.f) {
    std::vector<float> x(dim), answer(dim);
    std::vector<std::byte> encoded(std::max(there.bytes(), back.bytes()));
    there.encode(&tokens.x[t * dim], encoded.data());
    there.decode(encoded.data(), x.data());
    std::vector<std::pair<int32_t, float>> chosen;
    for (int64_t i = t * kActive; i < (t + 1) * kActive; ++i)
      if (tokens.ids[i] >= 0 && !c.owners.ranks(layer, tokens.ids[i]).empty())
        chosen.emplace_back(tokens.ids[i], tokens.weights[i]);
    std::sort(chosen.begin(), chosen.end());
    for (const auto& [id, weight] : chosen) {
      for (int64_t i = 0; i < dim; ++i) {
        sum[i] += weight * expert_output<double>(layer, id, x.data(), dim, i);
        // The two products of a term may cancel.
        bound[i] += epsilon * weight * (std::fabs(x[i]) + std::fabs(x[(i + id + 1) % dim]));
        answer[i] = expert_output<float>(layer, id, x.data(), dim, i);
      }
      back.encode(answer.data(), encoded.data());
      back.decode(encoded.data(), answer.data());
      for (int64_t i = 0; i < dim; ++i) bits[i] += weight * answer[i];
    }
    for (float& b : bits) b += 1;
  }
  std::vector<double> sum, bound;
  std::vector<float> bits;
};

// What is added to a token's row: sums of each rank's experts, or of each host's ranks where rows
// cross once, as they are rounded on their way.
class NaiveSums {
 public:
  NaiveSums(const ExchangeCase& c, const HostLayout& layout, int rank, bool once_to_each_host)
      : c_(c), layout_(layout), rank_(rank), once_(once_to_each_host), chooser_(c.owners) {}
  // The batch has the tokens of this rank.
  void begin(const ExpertBatch& batch) {
    batch_ = batch;
    chooser_.begin(batch.layer, batch.routing.ids);
  }
  std::vector<float> of_token(int64_t t, const RowCodec& there, const RowCodec& back) {
    const int64_t dim = batch_.x.cols;
    const auto rounded = [&](const RowCodec& codec, std::vector<float> row) {
      std::vector<std::byte> encoded(codec.bytes());
      codec.encode(row.data(), encoded.data());
      codec.decode(encoded.data(), row.data());
      return row;
    };
    const float* const first = batch_.x.row<float>(t);
    const std::vector<float> x = rounded(there, {first, first + dim});
    const int32_t* const ids = batch_.routing.ids.row<int32_t>(t);
    std::vector<int32_t> ranks(kActive);
    chooser_.choose(ids, kActive, rank_, ranks.data());
    std::map<std::pair<int, int>, std::map<int32_t, float>> chosen;  // unit and rank; expert
    for (int k = 0; k < kActive; ++k)
      if (ranks[k] >= 0)
        chosen[{once_ ? layout_.host_of(ranks[k]) : ranks[k], ranks[k]}][ids[k]] =
            batch_.routing.weights.row<float>(t)[k];
    std::map<int, std::vector<float>> units;
    for (const auto& [place, experts] : chosen) {
      std::vector<float> of_rank(dim, 0.f);
      for (const auto& [id, weight] : experts)
        for (int64_t i = 0; i < dim; ++i)
          of_rank[i] += weight * expert_output<float>(batch_.layer, id, x.data(), dim, i);
      std::vector<float>& unit = units[place.first];
      unit.resize(dim, 0.f);
      for (int64_t i = 0; i < dim; ++i) unit[i] += of_rank[i];
    }
    std::vector<float> sum(dim, 0.f);
    for (const auto& [unit, of_unit] : units) {
      const std::vector<float> one = rounded(back, of_unit);
      for (int64_t i = 0; i < dim; ++i) sum[i] += one[i];
    }
    return sum;
  }

 private:
  const ExchangeCase& c_;
  const HostLayout& layout_;
  const int rank_;
  const bool once_;
  ReplicaChooser chooser_;
  ExpertBatch batch_ = {};
};

// n_cases of one kind; `kernels` of any instruction set.
inline void check_exchange(HostGroups& groups, const cpu::KernelTable& kernels,
                           const ExchangeKind& kind, int64_t dim, int n_cases) {
  Group& group = groups.all();
  const RowCodec there(kernels, kind.there, dim), back(kernels, kind.back, dim);
  // Float sums of at most nine terms, and one rounding of each answer to BF16.
  const double epsilon = 0x1p-20 + (kind.back == RowFormat::kBf16 ? 0x1p-8 : 0);
  ExchangeCase c(0, group.size(), dim);
  const auto exchange = make_exchange(kind.mode, groups, c.owners, kernels,
                                      {.dim = int(dim),
                                       .n_active = kActive,
                                       .max_tokens = kMaxTokens,
                                       .there = kind.there,
                                       .back = kind.back,
                                       .returned = kind.returned});
  for (int number = 0; number < n_cases; ++number) {
    c = ExchangeCase(number, group.size(), dim);
    ExchangeTokens& mine = c.tokens[group.rank()];
    std::vector<int64_t> n_tokens;
    for (const ExchangeTokens& of_rank : c.tokens) n_tokens.push_back(of_rank.n());
    exchange->begin(n_tokens);
    const HostLayout& layout = groups.layout();
    NaiveSums naive(c, layout, group.rank(),
                    kind.mode == ExchangeMode::kAllToAll && layout.has_two_levels());
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> y(mine.n() * dim, 1.f);
      const ExpertBatch batch = exchange->dispatch(mine.batch(layer, dim));
      naive.begin(mine.batch(layer, dim));
      ASSERT_LE(batch.x.rows, exchange->max_rows());
      for (int64_t t = 0; t < batch.x.rows; ++t)
        for (int k = 0; k < kActive; ++k)
          if (const int32_t id = batch.routing.ids.row<int32_t>(t)[k]; id >= 0) {
            const std::vector<int32_t>& ranks = c.owners.ranks(layer, id);
            ASSERT_TRUE(std::find(ranks.begin(), ranks.end(), group.rank()) != ranks.end());
          }
      std::vector<float> sums(batch.x.rows * dim, 0.f);
      compute(batch, {sums.data(), batch.x.rows, dim, dim});
      exchange->combine({sums.data(), batch.x.rows, dim, dim}, {y.data(), mine.n(), dim, dim});

      SCOPED_TRACE(fmt::format("{}, {} ranks, case {}, layer {}", name_of(kind), group.size(),
                               number, layer));
      for (int64_t t = 0; t < mine.n(); ++t) {
        const ExpectedRow want(c, mine, layer, t, there, back, dim, epsilon);
        const std::span<const float> got = std::span(y).subspan(t * dim, dim);
        expect_close(got, want.sum, want.bound);
        // One rank adds in ascending order as well; a single sum is rounded after the weights.
        const bool same_bits = kind.returned == ReturnedRows::kPerExpert ||
                               (group.size() == 1 && kind.back == RowFormat::kF32);
        ASSERT_TRUE(!same_bits || std::equal(got.begin(), got.end(), want.bits.begin()));
        if (kind.mode == ExchangeMode::kGather || kind.returned == ReturnedRows::kPerExpert)
          continue;
        std::vector<float> bits = naive.of_token(t, there, back);
        for (float& b : bits) b += 1;
        ASSERT_TRUE(std::equal(got.begin(), got.end(), bits.begin())) << "token " << t;
      }
    }
  }
}

}  // namespace tandem::test
