#include "offload/workers/worker_experts.h"

#include <algorithm>
#include <array>

namespace tandem {
namespace {

constexpr std::array<std::byte, 64> kZeros{};
// Workers that a request is lost with before its step fails: it may be the request that ends them.
constexpr int kMostLost = 6;

std::vector<std::vector<bool>> owned_by(const std::vector<WorkerWelcome>& welcomes) {
  std::vector<std::vector<bool>> owned;
  for (const WorkerWelcome& welcome : welcomes) owned.push_back(welcome.experts);
  return owned;
}

// Rows travel as BF16 where all workers round them to that anyway.
RowType row_type(const std::vector<WorkerWelcome>& welcomes) {
  const bool bf16 = std::all_of(welcomes.begin(), welcomes.end(),
                                [](const WorkerWelcome& welcome) { return welcome.takes_bf16; });
  return bf16 ? RowType::kBf16 : RowType::kF32;
}

}  // namespace

WorkerExperts::WorkerExperts(const WorkerExpertsParts& parts,
                             std::vector<std::unique_ptr<WorkerLink>> links)
    : p_(parts),
      shards_(shards_of(owned_by(parts.welcomes), parts.config.router.n_experts)),
      shape_{.n_active = parts.config.router.n_active,
             .dim = static_cast<int32_t>(parts.config.dim),
             .max_rows = parts.max_tokens},
      row_type_(row_type(parts.welcomes)),
      waiter_(parts.transport.waiter()),
      shard_of_(parts.config.router.n_experts),
      parts_(shards_.size()),
      local_ids_(int64_t{parts.max_tokens} * shape_.n_active),
      taken_(links.size()),
      n_rows_sent_(links.size()),
      links_(std::move(links)) {
  const int64_t n_pairs = int64_t{p_.max_tokens} * shape_.n_active;
  for (size_t s = 0; s < shards_.size(); ++s) {
    for (const int expert : shards_[s].experts) shard_of_[expert] = static_cast<int>(s);
    parts_[s].shard = &shards_[s];
    if (shards_[s].owners.empty()) {
      local_shard_ = static_cast<int>(s);
      continue;
    }
    parts_[s].rows.reserve(p_.max_tokens);
    parts_[s].ids.resize(n_pairs);
    parts_[s].weights.resize(n_pairs);
    parts_[s].body.reserve(p_.max_tokens + 4);
  }
  if (row_type_ == RowType::kBf16)
    encoded_ = Buffer(int64_t{p_.max_tokens} * shape_.dim * bytes_of(row_type_));
  const int64_t n_remote = std::ssize(shards_) - (local_shard_ >= 0 ? 1 : 0);
  sums_ = Buffer(int64_t{p_.max_tokens} * std::min<int64_t>(n_remote, shape_.n_active) *
                 shape_.dim * int64_t{sizeof(float)});
  waited_.reserve(links_.size());
  for (size_t w = 0; w < links_.size(); ++w)
    links_[w]->keep(p_.welcomes[w], p_.max_tokens, *waiter_);
}

bool WorkerExperts::await_workers() {
  const auto until = Clock::now() + p_.patience;
  const auto all_up = [&] {
    return std::all_of(links_.begin(), links_.end(),
                       [](const auto& link) { return link->is_up(); });
  };
  while (!all_up()) {
    if (Clock::now() >= until) return false;
    waiter_->wait({}, nullptr, std::chrono::milliseconds(50));
  }
  return true;
}

Ticket WorkerExperts::start(const ExpertBatch& batch) {
  check(!is_submitted_, "experts of workers have one ticket");
  check(batch.x.dtype == DType::kF32 && batch.x.rows <= p_.max_tokens, "float rows of a step");
  batch_ = batch;
  is_submitted_ = true;
  std::fill(n_rows_sent_.begin(), n_rows_sent_.end(), 0);
  const bool has_local = divide(batch);
  encode(batch);
  send_waiting();
  exchange_until([&] {  // what has no owner now waits until add_to()
    for (size_t w = 0; w < taken_.size(); ++w)
      if (taken_[w] && !links_[w]->is_sent()) return false;
    return true;
  });
  if (has_local) {
    ExpertBatch local = batch;
    local.routing.ids = {local_ids_.data(), batch.x.rows, shape_.n_active, shape_.n_active,
                         DType::kI32};
    p_.local.submit(local);
    computes_local_ = true;
  }
  return batch.micro_batch;
}

void WorkerExperts::add_to(Ticket, TensorView y) {
  exchange_until([&] {
    return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) {
      return part.state == Part::State::kUnused || part.state == Part::State::kAnswered;
    });
  });
  for (size_t s = 0; s < parts_.size(); ++s) {
    if (static_cast<int>(s) == local_shard_ && computes_local_) p_.local.add_to(0, y);
    const Part& part = parts_[s];
    const auto* const sums =
        reinterpret_cast<const float*>(sums_.data()) + part.first_sum * shape_.dim;
    p_.team.run(std::ssize(part.rows), [&](int64_t i, int) {
      float* const to = y.row<float>(part.rows[i]);
      const float* const from = sums + i * shape_.dim;
      for (int64_t c = 0; c < shape_.dim; ++c) to[c] += from[c];
    });
  }
  computes_local_ = false;
  end_ticket();
}

// Sorts the pairs of the batch by shard. Returns whether some are of this process.
bool WorkerExperts::divide(const ExpertBatch& batch) {
  const int n_active = shape_.n_active;
  for (Part& part : parts_) {
    part.rows.clear();
    part.state = Part::State::kUnused;
    part.n_lost = 0;
  }
  std::fill_n(local_ids_.begin(), batch.x.rows * n_active, -1);
  bool has_local = false;
  for (int32_t t = 0; t < batch.x.rows; ++t)
    for (int k = 0; k < n_active; ++k) {
      const int32_t id = batch.routing.ids.row<int32_t>(t)[k];
      if (id < 0) continue;
      if (shard_of_[id] == local_shard_) {
        local_ids_[t * n_active + k] = id;
        has_local = true;
        continue;
      }
      Part& part = parts_[shard_of_[id]];
      if (part.rows.empty() || part.rows.back() != t) {
        part.rows.push_back(t);
        const int64_t begin = (std::ssize(part.rows) - 1) * n_active;
        std::fill_n(part.ids.begin() + begin, n_active, -1);
        std::fill_n(part.weights.begin() + begin, n_active, 0.0f);
      }
      const int64_t at = (std::ssize(part.rows) - 1) * n_active + k;
      part.ids[at] = id;
      part.weights[at] = batch.routing.weights.row<float>(t)[k];
    }
  int64_t n_sums = 0;
  for (Part& part : parts_) {
    part.first_sum = n_sums;
    n_sums += std::ssize(part.rows);
    if (!part.rows.empty()) part.state = Part::State::kWaits;
  }
  return has_local;
}

void WorkerExperts::encode(const ExpertBatch& batch) {
  if (row_type_ != RowType::kBf16) return;
  p_.team.run(batch.x.rows, [&](int64_t t, int) {
    auto* const to = reinterpret_cast<cpu::bf16*>(encoded_.data()) + t * shape_.dim;
    p_.kernels.encode_bf16({batch.x.row<float>(t), to, shape_.dim});
  });
}

const std::byte* WorkerExperts::row(const ExpertBatch& batch, int64_t token) const {
  return row_type_ == RowType::kBf16
             ? encoded_.data() + token * shape_.dim * bytes_of(RowType::kBf16)
             : reinterpret_cast<const std::byte*>(batch.x.row<float>(token));
}

void WorkerExperts::send_waiting() {
  for (Part& part : parts_)
    while (part.state == Part::State::kWaits) {
      const int worker = best_owner(part);
      if (worker < 0) break;
      if (part.n_lost >= kMostLost)
        fail(fmt::format("a request for experts {} has ended {} times: {}",
                         text_of_experts(part.shard->experts), part.n_lost, owners_of(part)));
      send(part, worker);
    }
}

// The owner that has the fewest rows of this layer; of equal ones another one in each layer. -1:
// all are down.
int WorkerExperts::best_owner(const Part& part) {
  const std::vector<int>& owners = part.shard->owners;
  int best = -1;
  for (size_t i = 0; i < owners.size(); ++i) {
    const int worker = owners[(i + batch_.layer) % owners.size()];
    if (links_[worker]->is_up() && (best < 0 || n_rows_sent_[worker] < n_rows_sent_[best]))
      best = worker;
  }
  return best;
}

bool WorkerExperts::send(Part& part, int worker) {
  WorkerLink& link = *links_[worker];
  if (!taken_[worker]) taken_[worker] = link.take();
  if (!taken_[worker]) return false;
  const int64_t n = std::ssize(part.rows), n_pairs = n * shape_.n_active;
  part.head = {.layer = batch_.layer, .n_rows = static_cast<int32_t>(n), .type = row_type_};
  part.body.clear();
  part.body.push_back(std::as_bytes(std::span(&part.head, 1)));
  part.body.push_back(std::as_bytes(std::span(part.ids).first(n_pairs)));
  part.body.push_back(std::as_bytes(std::span(part.weights).first(n_pairs)));
  const int64_t padding = shape_.rows_at(n) - static_cast<int64_t>(sizeof part.head) - n_pairs * 8;
  part.body.push_back(std::span(kZeros).first(padding));
  const int64_t row_bytes = shape_.dim * bytes_of(row_type_);
  for (const int32_t t : part.rows) {
    const std::byte* const from = row(batch_, t);
    MessageBytes& last = part.body.back();
    if (last.data() + last.size() == from && part.body.size() > 4)  // adjacent rows are one part
      last = {last.data(), last.size() + row_bytes};
    else
      part.body.push_back({from, static_cast<size_t>(row_bytes)});
  }
  part.state = Part::State::kSent;
  part.worker = worker;
  part.number = ++last_number_;
  part.sent_at = Clock::now();
  n_rows_sent_[worker] += n;
  if (link.request(part.number, part.body)) return true;
  lost(worker);
  return false;
}

// The parts that a worker was asked for wait for another one.
void WorkerExperts::lost(int worker) {
  for (Part& part : parts_)
    if (part.state == Part::State::kSent && part.worker == worker) {
      part.state = Part::State::kWaits;
      ++part.n_lost;
    }
  taken_[worker] = false;
  links_[worker]->release();
}

// Sends and receives until done() holds and every part that has an owner was sent.
template <class Done>
void WorkerExperts::exchange_until(const Done& done) {
  while (true) {
    for (size_t w = 0; w < taken_.size(); ++w)
      if (taken_[w] && !links_[w]->progress(*this)) lost(static_cast<int>(w));
    send_waiting();
    if (done()) return;
    for (const Part& part : parts_)
      if (part.state == Part::State::kWaits) require_patience(part);
    waited_.clear();
    for (size_t w = 0; w < taken_.size(); ++w)
      if (taken_[w]) waited_.push_back(links_[w]->connection());
    waiter_->wait(waited_, nullptr, longest_sleep());
  }
}

// Throws StepFailed if the part has had no owner for longer than that.
void WorkerExperts::require_patience(const Part& part) {
  Clock::time_point since = links_[part.shard->owners.front()]->down_since();
  for (const int worker : part.shard->owners) {
    if (links_[worker]->is_up()) return;
    since = std::max(since, links_[worker]->down_since());
  }
  if (Clock::now() - since < p_.patience) return;
  fail(fmt::format("experts {} have had no worker for {:g} s: {}: start one of them again",
                   text_of_experts(part.shard->experts), p_.patience.count(), owners_of(part)));
}

std::string WorkerExperts::owners_of(const Part& part) const {
  std::string owners;
  for (const int worker : part.shard->owners)
    owners += fmt::format("{}{} ({})", owners.empty() ? "" : ", ", links_[worker]->address(),
                          links_[worker]->why_down());
  return owners;
}

// Ends the ticket.
void WorkerExperts::fail(const std::string& why) {
  if (computes_local_) {
    // Its ticket ends too, with sums that nothing uses.
    p_.local.add_to(0, {sums_.data(), batch_.x.rows, shape_.dim, shape_.dim});
    computes_local_ = false;
  }
  end_ticket();
  throw StepFailed(why);
}

// A worker's silence is noticed in time, and so is one that comes back.
std::chrono::nanoseconds WorkerExperts::longest_sleep() const {
  std::chrono::nanoseconds longest = std::chrono::milliseconds(100);
  for (const auto& link : links_)
    longest = std::min<std::chrono::nanoseconds>(longest, link->deadline() / 4);
  return longest;
}

void WorkerExperts::end_ticket() {
  for (size_t w = 0; w < taken_.size(); ++w) {
    if (!taken_[w]) continue;
    // Late answers would have no place.
    if (links_[w]->n_requests() > 0) links_[w]->drop();
    links_[w]->release();
    taken_[w] = false;
  }
  is_submitted_ = false;
}

WorkerExperts::Part* WorkerExperts::part_of(uint64_t number) {
  const auto found = std::find_if(parts_.begin(), parts_.end(), [&](const Part& part) {
    return part.state == Part::State::kSent && part.number == number;
  });
  return found == parts_.end() ? nullptr : &*found;
}

std::span<std::byte> WorkerExperts::place_of_answer(uint64_t number, uint64_t n_bytes) {
  const Part* const part = part_of(number);
  const int64_t row_bytes = shape_.dim * int64_t{sizeof(float)};
  if (!part || n_bytes != part->rows.size() * static_cast<uint64_t>(row_bytes))
    throw ProtocolError(
        fmt::format("an answer of {} bytes to request {}, which was not made", n_bytes, number));
  return {sums_.data() + part->first_sum * row_bytes, n_bytes};
}

void WorkerExperts::answered(uint64_t number) {
  Part& part = *part_of(number);
  part.state = Part::State::kAnswered;
  links_[part.worker]->add_round_trip(seconds_since(part.sent_at));
}

std::vector<WorkerStatus> WorkerExperts::workers() const {
  std::vector<WorkerStatus> all;
  for (const auto& link : links_) all.push_back(link->status());
  return all;
}

}  // namespace tandem
