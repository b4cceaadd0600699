// `tandem bench comm`: exchanges of rows between ranks that have experts and tokens of their own.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "bench/comm/comm.h"
#include "core/memory.h"
#include "offload/ranks/rank_experts.h"
#include "ops/router.h"

namespace tandem {
namespace {

const char* name_of(RowFormat format) {
  constexpr const char* kNames[] = {"f32", "bf16", "fp8"};
  return kNames[static_cast<int>(format)];
}

// Rows of this rank's tokens, each with different experts drawn with equal probability.
struct Tokens {
  Tokens(const ModelConfig& config, int n_tokens, int rank)
      : n(n_tokens), dim(config.dim), n_active(config.router.n_active) {
    std::mt19937 random(rank + 1);
    ids = random_experts(config.router, n, random);
    weights.assign(ids.size(), 1.f / static_cast<float>(n_active));
    std::normal_distribution<float> normal;
    x.resize(static_cast<size_t>(n) * dim);
    for (float& v : x) v = normal(random);
    y.resize(x.size());
  }
  ExpertBatch batch(int layer) {
    return {layer,
            {x.data(), n, dim, dim},
            {{ids.data(), n, n_active, n_active, DType::kI32},
             {weights.data(), n, n_active, n_active}}};
  }
  // Tokens with an expert of each rank, if every expert is on one.
  std::vector<int64_t> rows_to(const ExpertOwners& owners, int layer, int n_ranks) const {
    std::vector<int64_t> rows(n_ranks);
    for (int t = 0; t < n; ++t)
      for (int r = 0; r < n_ranks; ++r)
        rows[r] += std::any_of(&ids[t * n_active], &ids[(t + 1) * n_active],
                               [&](int32_t id) { return owners.ranks(layer, id)[0] == r; });
    return rows;
  }

  int n;
  int64_t dim, n_active;
  std::vector<float> x, y, weights;
  std::vector<int32_t> ids;
};

// MPI's calls with the bytes of an exchange, of rows with as many bytes there and back.
class RawExchange {
 public:
  struct RowBytes {
    int64_t there, back;
  };
  RawExchange(const BenchRanks& ranks, ExchangeMode mode, RowBytes row, int n_tokens,
              const std::vector<int64_t>& rows_to)
      : mpi_(ranks.raw), gathers_(mode == ExchangeMode::kGather), n_tokens_(n_tokens), row_(row) {
    Group& group = ranks.group;
    const int n = group.size();
    std::vector<int64_t> rows_from(n);
    const std::vector<int64_t> one(n, sizeof(int64_t));
    group.all_to_all({std::as_bytes(std::span(rows_to)), one},
                     {std::as_writable_bytes(std::span(rows_from)), one});
    for (int r = 0; r < n; ++r) {
      to_there_.push_back(rows_to[r] * row.there);
      from_there_.push_back(rows_from[r] * row.there);
      to_back_.push_back(rows_from[r] * row.back);
      from_back_.push_back(rows_to[r] * row.back);
    }
    const int64_t all = int64_t{n} * n_tokens * std::max(row.there, row.back);
    in_ = Buffer(all);
    out_ = Buffer(all);
  }
  // What this rank sends, to itself too.
  int64_t bytes() const {
    const int64_t n = std::ssize(to_there_);
    if (gathers_) return n_tokens_ * (row_.there + n * row_.back);
    return total(to_there_) + total(to_back_);
  }
  void run() {
    if (!gathers_) {
      mpi_.all_to_all(pieces<const std::byte>(in_, to_there_),
                      pieces<std::byte>(out_, from_there_));
      mpi_.all_to_all(pieces<const std::byte>(in_, to_back_), pieces<std::byte>(out_, from_back_));
      return;
    }
    const auto n = std::ssize(to_there_);
    mpi_.all_gather(in_.span().first(n_tokens_ * row_.there),
                    out_.span().first(n * n_tokens_ * row_.there));
    mpi_.reduce_scatter(floats(in_, n * n_tokens_ * row_.back),
                        floats(out_, n_tokens_ * row_.back));
  }

 private:
  static int64_t total(const std::vector<int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  }
  template <class T>
  static Pieces<T> pieces(const Buffer& buffer, const std::vector<int64_t>& sizes) {
    return {buffer.span().first(total(sizes)), sizes};
  }
  static std::span<float> floats(const Buffer& buffer, int64_t bytes) {
    return {reinterpret_cast<float*>(buffer.data()), static_cast<size_t>(bytes) / sizeof(float)};
  }

  RawCollectives& mpi_;
  const bool gathers_;
  const int64_t n_tokens_;
  const RowBytes row_;
  std::vector<int64_t> to_there_, from_there_, to_back_, from_back_;  // [ranks]
  Buffer in_, out_;
};

// All ranks fail together where they do not share memory.
std::unique_ptr<ExpertExchange> exchange_if_possible(ExchangeMode mode, const BenchInput& bench,
                                                     const ExpertOwners& owners,
                                                     const cpu::KernelTable& kernels,
                                                     const ExchangeShape& shape) {
  try {
    return make_exchange(mode, bench.options.ranks->group, owners, kernels, shape);
  } catch (const RunError&) {
    throw;
  } catch (const Error& error) {
    if (bench.options.ranks->group.rank() == 0)
      bench.options.warn(fmt::format("{} is not measured: {}", name_of(mode), error.what()));
    return nullptr;
  }
}

}  // namespace

void bench_exchanges(const BenchInput& bench, int n_tokens, const OnRow& on_row) {
  const BenchRanks& ranks = *bench.options.ranks;
  const ModelConfig& config = bench.config;
  const int n_ranks = ranks.group.size(), layer = config.n_layers - 1;
  const cpu::KernelTable kernels = cpu::kernels_for(*bench.options.isa);
  const ExpertOwners owners = even_owners(config, n_ranks);
  Tokens tokens(config, n_tokens, ranks.group.rank());
  const std::vector<int64_t> rows_to = tokens.rows_to(owners, layer, n_ranks);
  const int64_t lists = 8 * config.router.n_active;  // ids and weights of a row
  for (const RowFormat there : {RowFormat::kFp8, RowFormat::kF32})
    for (const ExchangeMode mode : kExchangeModes) {
      const bool gathers = mode == ExchangeMode::kGather;
      const RowFormat back =
          there == RowFormat::kF32 || gathers ? RowFormat::kF32 : RowFormat::kBf16;
      const auto exchange = exchange_if_possible(mode, bench, owners, kernels,
                                                 {.dim = static_cast<int>(config.dim),
                                                  .n_active = config.router.n_active,
                                                  .max_tokens = n_tokens,
                                                  .there = there,
                                                  .back = back});
      if (!exchange) continue;
      const int64_t dim = config.dim;
      RawExchange raw(
          ranks, mode,
          {RowCodec(kernels, there, dim).bytes() + lists, RowCodec(kernels, back, dim).bytes()},
          n_tokens, rows_to);
      const Buffer sums(exchange->max_rows() * dim * 4);
      exchange->begin(std::vector<int64_t>(n_ranks, n_tokens));
      const auto own = [&] {
        const ExpertBatch batch = exchange->dispatch(tokens.batch(layer));
        exchange->combine({sums.data(), batch.x.rows, dim, dim},
                          {tokens.y.data(), n_tokens, dim, dim});
      };
      nlohmann::ordered_json row =
          comm_row(ranks, std::string("exchange ") + name_of(mode), raw.bytes(),
                   compare(ranks.group, {own, [&] { raw.run(); }}, bench.options.seconds));
      row["config"] = bench.options.config;
      row["tokens"] = n_tokens;
      row["there"] = name_of(there);
      row["back"] = name_of(back);
      on_row(row);
    }
}

}  // namespace tandem
