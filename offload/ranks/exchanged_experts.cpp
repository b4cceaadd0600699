#include "offload/ranks/exchanged_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "core/clock.h"
#include "ops/router.h"

namespace tandem {
namespace {

// Tokens of a rank whose routing is random.
class RandomTokens {
 public:
  RandomTokens(const ModelConfig& config, int n_tokens, int rank)
      : x_(int64_t{n_tokens} * config.dim),
        weights_(int64_t{n_tokens} * config.router.n_active, 1) {
    std::mt19937 random(rank);
    ids_ = random_experts(config.router, n_tokens, random);
    const int64_t n_active = config.router.n_active, dim = config.dim, n = n_tokens;
    batch_ = {.layer = config.n_layers - 1,
              .x = {x_.data(), n, dim, dim},
              .routing = {{ids_.data(), n, n_active, n_active, DType::kI32},
                          {weights_.data(), n, n_active, n_active}}};
  }
  const ExpertBatch& batch() const { return batch_; }
  TensorView y() { return batch_.x; }  // sums of zeros are added to it

 private:
  std::vector<float> x_, weights_;
  std::vector<int32_t> ids_;
  ExpertBatch batch_;
};

}  // namespace

ExchangedExperts::ExchangedExperts(const ExchangedParts& parts)
    : p_(parts),
      sums_(int64_t{parts.grid.most_tokens(parts.max_tokens)} * parts.config.dim * 4),
      n_tokens_(parts.grid.n_ranks()) {
  const int most = p_.grid.most_tokens(p_.max_tokens) / p_.grid.n_ranks();
  prompts_ = way_for(most);
  if (most > kDecodeTokens) decode_ = way_for(kDecodeTokens);
}

std::string ExchangedExperts::modes() const {
  const char* const prompts = name_of(prompts_.mode);
  const char* const decode = decode_.exchange ? name_of(decode_.mode) : prompts;
  return fmt::format("prompts by {}, decode by {}", prompts, decode);
}

// The mode that is asked for, or the fastest one of those that the ranks can use.
ExchangedExperts::Way ExchangedExperts::way_for(int max_tokens) {
  const ExchangeShape shape{.dim = static_cast<int>(p_.config.dim),
                            .n_active = p_.config.router.n_active,
                            .max_tokens = max_tokens,
                            .there = p_.there};
  const auto make = [&](ExchangeMode mode) {
    return make_exchange(mode, p_.group, p_.owners, p_.kernels, shape);
  };
  if (p_.mode) return {*p_.mode, make(*p_.mode)};
  Way best{};
  double best_seconds = 0;
  for (const ExchangeMode mode : kExchangeModes) {
    std::unique_ptr<ExpertExchange> exchange;
    try {
      exchange = make(mode);
    } catch (const RunError&) {
      throw;
    } catch (const Error&) {  // on all ranks: they do not share memory
      continue;
    }
    const double seconds = seconds_of(*exchange, max_tokens);
    if (best.exchange && seconds >= best_seconds) continue;
    best = {mode, std::move(exchange)};
    best_seconds = seconds;
  }
  return best;
}

// The time of a layer's exchange, the same number on all ranks.
double ExchangedExperts::seconds_of(ExpertExchange& exchange, int n_tokens) {
  constexpr int kRounds = 5;
  RandomTokens tokens(p_.config, n_tokens, p_.group.rank());
  std::fill(n_tokens_.begin(), n_tokens_.end(), n_tokens);
  std::fill_n(reinterpret_cast<float*>(sums_.data()), sums_.bytes() / 4, 0.f);
  exchange.begin(n_tokens_);
  double least = 0;
  for (int round = 0; round <= kRounds; ++round) {
    p_.group.barrier();
    const auto start = Clock::now();
    const ExpertBatch batch = exchange.dispatch(tokens.batch());
    exchange.combine({sums_.data(), batch.x.rows, p_.config.dim, p_.config.dim}, tokens.y());
    const double seconds = seconds_since(start);
    if (round == 1 || (round > 1 && seconds < least)) least = seconds;  // round 0 touches memory
  }
  std::vector<double> of_ranks(p_.grid.n_ranks());
  p_.group.all_gather_values(least, std::span(of_ranks));
  return *std::max_element(of_ranks.begin(), of_ranks.end());
}

void ExchangedExperts::begin_step(std::span<const Batch> replicas) {
  int64_t most = 0;
  for (int rank = 0; rank < p_.grid.n_ranks(); ++rank) {
    n_tokens_[rank] = p_.grid.tokens_of(rank, replicas[p_.grid.replica_of(rank)].n()).n;
    most = std::max(most, n_tokens_[rank]);
  }
  current_ =
      decode_.exchange && most <= kDecodeTokens ? decode_.exchange.get() : prompts_.exchange.get();
  current_->begin(n_tokens_);
}

Ticket ExchangedExperts::start(const ExpertBatch& batch) {
  check(batch.first_row == 0, "ranks exchange the rows of one micro-batch");
  const auto [first, n] = p_.grid.tokens_of(p_.group.rank(), batch.x.rows);
  ExpertBatch own = batch;
  own.x = batch.x.rows_from(first, n);
  own.routing = {batch.routing.ids.rows_from(first, n), batch.routing.weights.rows_from(first, n)};
  const ExpertBatch here = current_->dispatch(own);
  n_rows_ = here.x.rows;
  const TensorView sums = {sums_.data(), n_rows_, p_.config.dim, p_.config.dim};
  std::fill_n(reinterpret_cast<float*>(sums_.data()), n_rows_ * p_.config.dim, 0.f);
  if (n_rows_ > 0) p_.mine.add_to(p_.mine.submit(here), sums);
  return 0;
}

void ExchangedExperts::add_to(Ticket, TensorView y) {
  const auto [first, n] = p_.grid.tokens_of(p_.group.rank(), y.rows);
  current_->combine({sums_.data(), n_rows_, p_.config.dim, p_.config.dim}, y.rows_from(first, n));
}

}  // namespace tandem
