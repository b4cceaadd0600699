// `tandem bench comm`: exchanges of rows between ranks that have experts and tokens of their own.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "bench/comm/comm.h"
#include "comm/delayed.h"
#include "core/memory.h"
#include "offload/ranks/rank_experts.h"
#include "ops/router.h"

namespace tandem {
namespace {

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

// How rows travel in a measurement.
struct Way {
  ExchangeMode mode;
  RowFormat there;
  bool to_each_rank = false;  // though they could cross once to each host
  RowFormat back() const {
    return formats_by(mode, {there, there == RowFormat::kF32 ? RowFormat::kF32 : RowFormat::kBf16})
        .back;
  }
};

std::vector<Way> ways_on(const HostLayout& hosts) {
  std::vector<Way> ways;
  for (const RowFormat there : {RowFormat::kFp8, RowFormat::kF32})
    for (const ExchangeMode mode : kExchangeModes) {
      ways.push_back({mode, there});
      if (mode == ExchangeMode::kAllToAll && hosts.has_two_levels())
        ways.push_back({mode, there, true});
    }
  return ways;
}

class ExchangesBench {
 public:
  ExchangesBench(const BenchInput& bench, const HostLayout& hosts, int n_tokens)
      : bench_(bench),
        ranks_(*bench.options.ranks),
        hosts_(hosts),
        kernels_(cpu::kernels_for(*bench.options.isa)),
        owners_(even_owners(bench.config, ranks_.group.size())),
        tokens_(bench.config, n_tokens, ranks_.group.rank()),
        rows_to_(tokens_.rows_to(owners_, layer(), ranks_.group.size())) {
    const BenchOptions& o = bench.options;
    if (hosts.n_hosts() > 1 || o.simulated_delay.count() > 0 || o.simulated_rate > 0)
      network_ = make_delayed(
          ranks_.group,
          {.delay = o.simulated_delay,
           .bytes_per_second = o.simulated_rate,
           .host_of_rank = hosts.n_hosts() > 1 ? hosts.host_of_rank() : std::vector<int>(),
           .bytes_sent = &bytes_sent_});
  }
  void measure(const Way& way, const OnRow& on_row);

 private:
  int layer() const { return bench_.config.n_layers - 1; }
  Group& group() const { return network_ ? *network_ : ranks_.group; }
  std::unique_ptr<ExpertExchange> exchange_if_possible(const Way& way, const HostGroups& groups);
  int64_t bytes_between_hosts(const std::function<void()>& exchange);

  const BenchInput& bench_;
  const BenchRanks& ranks_;
  const HostLayout& hosts_;
  const cpu::KernelTable kernels_;
  const ExpertOwners owners_;
  Tokens tokens_;
  const std::vector<int64_t> rows_to_;
  std::atomic<int64_t> bytes_sent_{0};  // by this rank to other hosts
  std::unique_ptr<Group> network_;      // null: as fast as it is, and between ranks of one host
};

// All ranks fail together where they do not share memory.
std::unique_ptr<ExpertExchange> ExchangesBench::exchange_if_possible(const Way& way,
                                                                     const HostGroups& groups) {
  const ModelConfig& config = bench_.config;
  try {
    return make_exchange(way.mode, groups, owners_, kernels_,
                         {.dim = static_cast<int>(config.dim),
                          .n_active = config.router.n_active,
                          .max_tokens = tokens_.n,
                          .there = way.there,
                          .back = way.back(),
                          .once_to_each_host = !way.to_each_rank});
  } catch (const RunError&) {
    throw;
  } catch (const Error& error) {
    if (ranks_.group.rank() == 0)
      bench_.options.warn(fmt::format("{} is not measured: {}", name_of(way.mode), error.what()));
    return nullptr;
  }
}

// What all ranks together send to other hosts in one exchange.
int64_t ExchangesBench::bytes_between_hosts(const std::function<void()>& exchange) {
  const int64_t before = bytes_sent_;
  exchange();
  std::vector<int64_t> of_ranks(ranks_.group.size());
  ranks_.group.all_gather_values(bytes_sent_ - before, std::span(of_ranks));
  return std::accumulate(of_ranks.begin(), of_ranks.end(), int64_t{0});
}

void ExchangesBench::measure(const Way& way, const OnRow& on_row) {
  const ModelConfig& config = bench_.config;
  const int n_ranks = ranks_.group.size();
  const HostGroups groups(group(), hosts_);
  const auto exchange = exchange_if_possible(way, groups);
  if (!exchange) return;
  const int64_t dim = config.dim, n = tokens_.n;
  const int64_t lists = 8 * config.router.n_active;  // ids and weights of a row
  RawExchange raw(ranks_, way.mode,
                  {RowCodec(kernels_, way.there, dim).bytes() + lists,
                   RowCodec(kernels_, way.back(), dim).bytes()},
                  tokens_.n, rows_to_);
  const Buffer sums(exchange->max_rows() * dim * 4);
  exchange->begin(std::vector<int64_t>(n_ranks, n));
  const auto own = [&] {
    const ExpertBatch batch = exchange->dispatch(tokens_.batch(layer()));
    exchange->combine({sums.data(), batch.x.rows, dim, dim}, {tokens_.y.data(), n, dim, dim});
  };
  nlohmann::ordered_json row = comm_row(
      ranks_,
      std::string("exchange ") + name_of(way.mode) + (way.to_each_rank ? ", each rank" : ""),
      raw.bytes(), compare(ranks_.group, {own, [&] { raw.run(); }}, bench_.options.seconds));
  row["config"] = bench_.options.config;
  row["tokens"] = n;
  row["there"] = name_of(way.there);
  row["back"] = name_of(way.back());
  if (hosts_.n_hosts() > 1) row["bytes_between_hosts"] = bytes_between_hosts(own);
  on_row(row);
}

}  // namespace

void bench_exchanges(const BenchInput& bench, const HostLayout& hosts, int n_tokens,
                     const OnRow& on_row) {
  ExchangesBench exchanges(bench, hosts, n_tokens);
  for (const Way& way : ways_on(hosts)) exchanges.measure(way, on_row);
}

}  // namespace tandem
