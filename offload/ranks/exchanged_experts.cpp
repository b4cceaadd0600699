#include "offload/ranks/exchanged_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "core/clock.h"
#include "core/memory.h"
#include "model/micro_batches.h"
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

// That a rank sends in micro-batch `number`.
int most_tokens_of_rank(BackboneGrid grid, int number, int max_tokens) {
  return grid.most_tokens(most_tokens_of(number, max_tokens)) / grid.n_ranks();
}

}  // namespace

ExchangedExperts::ExchangedExperts(const ExchangedParts& parts)
    : p_(parts), n_tokens_(parts.grid.n_ranks()) {
  for (int i = 0; i < n_tickets(p_.micro_batches); ++i) add_lane(i);
}

int64_t ExchangedExperts::bytes_for(const ModelConfig& config, BackboneGrid grid,
                                    const HostLayout& hosts, int max_tokens,
                                    std::optional<ExchangeMode> mode, int micro_batches) {
  const auto of_way = [&](int n_tokens) {
    const ExchangeShape shape = {
        .dim = config.dim, .n_active = config.router.n_active, .max_tokens = n_tokens};
    if (mode) return exchange_bytes(*mode, hosts, shape);
    ExchangeShape to_each_rank = shape;
    to_each_rank.once_to_each_host = false;
    int64_t most = exchange_bytes(ExchangeMode::kAllToAll, hosts, to_each_rank);
    for (const ExchangeMode m : kExchangeModes)
      most = std::max(most, exchange_bytes(m, hosts, shape));
    return most;
  };
  int64_t sum = 0;
  for (int i = 0; i < n_tickets(micro_batches); ++i) {
    const int most = most_tokens_of_rank(grid, i, max_tokens);
    sum += ExchangeLane::bytes_for({grid.n_ranks(), most, kDecodeTokens, config.dim},
                                   micro_batches != 1) +
           of_way(most) + (most > kDecodeTokens ? of_way(kDecodeTokens) : 0);
  }
  return sum;
}

// The first lane, which takes whole steps too, decides the modes of all.
void ExchangedExperts::add_lane(int number) {
  const bool has_thread = p_.micro_batches != 1;
  if (has_thread) groups_.push_back(p_.group.split(0));
  host_groups_.push_back(
      std::make_unique<HostGroups>(has_thread ? *groups_.back() : p_.group, p_.hosts));
  HostGroups& groups = *host_groups_.back();
  const int n_ranks = p_.grid.n_ranks();
  const int most = most_tokens_of_rank(p_.grid, number, p_.max_tokens);
  const bool is_first = lanes_.empty();
  auto lane = std::make_unique<ExchangeLane>(
      groups, ExchangeLane::Limits{n_ranks, most, kDecodeTokens, static_cast<int>(p_.config.dim)},
      p_.patience, has_thread);
  ExchangeWay decode;
  std::optional<ExchangeChoice> asked;
  if (p_.mode) asked = ExchangeChoice{*p_.mode};
  ExchangeWay prompts = way_for(groups, most, is_first ? asked : lanes_[0]->prompts().choice);
  if (most > kDecodeTokens)
    decode = way_for(groups, kDecodeTokens, is_first ? asked : lanes_[0]->decode().choice,
                     adds_by_host(prompts.choice));
  lane->use(std::move(prompts), std::move(decode));
  lanes_.push_back(std::move(lane));
}

std::string ExchangedExperts::modes() const {
  const ExchangeLane& lane = *lanes_[0];
  const ExchangeChoice prompts = lane.prompts().choice;
  const ExchangeChoice decode = lane.decode().exchange ? lane.decode().choice : prompts;
  return fmt::format(
      "prompts by {}, decode by {}{}", name_of(prompts), name_of(decode),
      said_of(formats_by(prompts.mode, p_.formats), formats_by(decode.mode, p_.formats)));
}

std::string ExchangedExperts::name_of(ExchangeChoice choice) const {
  std::string mode = tandem::name_of(choice.mode);
  if (choice.mode != ExchangeMode::kAllToAll || !p_.hosts.has_two_levels()) return mode;
  return mode + (choice.once_to_each_host ? " (once to each host)" : " (to each rank)");
}

bool ExchangedExperts::adds_by_host(ExchangeChoice choice) const {
  return choice.mode == ExchangeMode::kAllToAll && choice.once_to_each_host &&
         p_.hosts.has_two_levels();
}

// What is asked for, or the fastest of what the ranks can use.
ExchangeWay ExchangedExperts::way_for(const HostGroups& groups, int max_tokens,
                                      std::optional<ExchangeChoice> asked,
                                      std::optional<bool> by_host) {
  const auto make = [&](ExchangeChoice choice) {
    return make_exchange(choice.mode, groups, p_.owners, p_.kernels,
                         {.dim = static_cast<int>(p_.config.dim),
                          .n_active = p_.config.router.n_active,
                          .max_tokens = max_tokens,
                          .there = p_.formats.there,
                          .back = formats_by(choice.mode, p_.formats).back,
                          .once_to_each_host = choice.once_to_each_host});
  };
  if (asked) return {*asked, make(*asked)};
  std::vector<ExchangeChoice> choices;
  for (const ExchangeMode mode : kExchangeModes) choices.push_back({mode});
  if (p_.hosts.has_two_levels()) choices.push_back({ExchangeMode::kAllToAll, false});
  std::optional<ExchangeChoice> best;
  double best_seconds = 0;
  for (const ExchangeChoice& choice : choices) {
    if (by_host && adds_by_host(choice) != *by_host) continue;
    std::unique_ptr<ExpertExchange> exchange;
    try {
      exchange = make(choice);
    } catch (const RunError&) {
      throw;
    } catch (const Error&) {  // on all ranks: they do not share memory
      continue;
    }
    const double seconds = seconds_of(*exchange, max_tokens);
    if (best && seconds >= best_seconds) continue;
    best = choice;
    best_seconds = seconds;
  }
  return {*best, make(*best)};  // made again: memory is counted for one at a time
}

// The time of a layer's exchange, the same number on all ranks.
double ExchangedExperts::seconds_of(ExpertExchange& exchange, int n_tokens) {
  constexpr int kRounds = 5;
  RandomTokens tokens(p_.config, n_tokens, p_.group.rank());
  std::fill(n_tokens_.begin(), n_tokens_.end(), n_tokens);
  const Buffer sums(exchange.max_rows() * p_.config.dim * 4);  // zeros
  exchange.begin(n_tokens_);
  double least = 0;
  for (int round = 0; round <= kRounds; ++round) {
    p_.group.barrier();
    const auto start = Clock::now();
    const ExpertBatch batch = exchange.dispatch(tokens.batch());
    exchange.combine({sums.data(), batch.x.rows, p_.config.dim, p_.config.dim}, tokens.y());
    const double seconds = seconds_since(start);
    if (round == 1 || (round > 1 && seconds < least)) least = seconds;  // round 0 touches memory
  }
  std::vector<double> of_ranks(p_.grid.n_ranks());
  p_.group.all_gather_values(least, std::span(of_ranks));
  return *std::max_element(of_ranks.begin(), of_ranks.end());
}

void ExchangedExperts::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  if (timeline_) timeline_->start_step(replicas[p_.grid.replica_of(p_.group.rank())].n());
  check(n_micro_batches <= std::ssize(lanes_), "micro-batches that have a lane");
  n_micro_batches_ = n_micro_batches;
  left_ = ExchangeLane::now();
  for (int i = 0; i < n_micro_batches; ++i) {
    for (int rank = 0; rank < p_.grid.n_ranks(); ++rank) {
      const MicroBatchCuts cuts =
          micro_batch_cuts(replicas[p_.grid.replica_of(rank)], n_micro_batches);
      n_tokens_[rank] = p_.grid.tokens_of(rank, cuts[i + 1] - cuts[i]).n;
    }
    lanes_[i]->begin(n_tokens_, n_micro_batches > 1);
  }
}

// An error leaves the step, whose memory may then be freed: no other lane uses it any more.
template <class Call>
void ExchangedExperts::or_settled(const Call& call) {
  try {
    call();
  } catch (...) {
    for (const auto& lane : lanes_) lane->settle();
    throw;
  }
}

// A lane whose rows do not travel apart computes its experts at once.
Ticket ExchangedExperts::start(const ExpertBatch& batch) {
  const Ticket ticket = batch.micro_batch;
  layers_[ticket] = batch.layer;
  add_span("backbone", ticket, left_);
  const auto [first, n] = p_.grid.tokens_of(p_.group.rank(), batch.x.rows);
  ExpertBatch own = batch;
  own.x = batch.x.rows_from(first, n);
  own.routing = {batch.routing.ids.rows_from(first, n), batch.routing.weights.rows_from(first, n)};
  ExchangeLane& lane = *lanes_[ticket];
  or_settled([&] {
    lane.send(own);
    if (!lane.is_apart()) compute(ticket);
  });
  left_ = ExchangeLane::now();
  return ticket;
}

bool ExchangedExperts::serve(Ticket ticket) {
  if (!lanes_[ticket]->is_apart()) return false;
  add_span("backbone", ticket, left_);
  or_settled([&] { compute(ticket); });
  left_ = ExchangeLane::now();
  return true;
}

void ExchangedExperts::compute(Ticket ticket) {
  ExchangeLane& lane = *lanes_[ticket];
  const auto [batch, sums] = lane.arrived();
  add_travel("rows", ticket);
  const double begin = ExchangeLane::now();
  if (sums.rows > 0) p_.mine.add_to(p_.mine.submit(batch), sums);
  add_span("experts", ticket, begin);
  lane.send_back();
}

void ExchangedExperts::add_to(Ticket ticket, TensorView y) {
  add_span("backbone", ticket, left_);
  const Slice own = p_.grid.tokens_of(p_.group.rank(), y.rows);
  or_settled([&] { lanes_[ticket]->add_to(y.rows_from(own.first, own.n)); });
  add_travel("sums", ticket);
  left_ = ExchangeLane::now();
}

void ExchangedExperts::add_span(const char* name, Ticket ticket, double begin) {
  if (timeline_)
    timeline_->add(
        {name, Timeline::Track::kCpu, layers_[ticket], ticket, begin, ExchangeLane::now()});
}

void ExchangedExperts::add_travel(const char* name, Ticket ticket) {
  const auto& [began, ended] = lanes_[ticket]->last_travel();
  if (timeline_)
    timeline_->add({name, Timeline::Track::kNetwork, layers_[ticket], ticket, began, ended});
}

std::optional<double> ExchangedExperts::seconds_waited() const {
  double sum = 0;
  for (int i = 0; i < n_micro_batches_; ++i) sum += lanes_[i]->seconds_waited();
  return sum;
}

}  // namespace tandem
