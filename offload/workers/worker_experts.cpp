#include "offload/workers/worker_experts.h"

#include <algorithm>

#include "model/micro_batches.h"

namespace tandem {
namespace {

using State = ShardPart::State;

// Workers that a request is lost with before its step fails: it may be the request that ends them.
constexpr int kMostLost = 6;
// Answers that the buffers of the sockets may not hold.
constexpr int64_t kMuchBytes = 1 << 18;

// A connection that a failed step has closed is there again after less.
Clock::duration grace_of(std::chrono::duration<double> patience) {
  return std::chrono::duration_cast<Clock::duration>(
      std::min(std::chrono::duration<double>(1), patience / 2));
}

}  // namespace

WorkerExperts::WorkerExperts(const WorkerExpertsParts& parts,
                             std::vector<std::unique_ptr<WorkerLink>> links)
    : p_(parts),
      shape_{.n_active = parts.config.router.n_active,
             .dim = static_cast<int32_t>(parts.config.dim),
             .max_rows = parts.max_tokens},
      waiter_(parts.transport.waiter()),
      workers_({parts.transport, *waiter_,
                needs_of(parts.welcomes, parts.config.n_all_layers(), parts.max_tokens), parts.warn,
                grace_of(parts.patience)},
               std::move(links), parts.welcomes),
      row_type_(workers_.row_type()),
      uses_(workers_.size()),
      carry_([this] { carry(); }) {
  const int64_t n_values = int64_t{p_.max_tokens} * shape_.dim;
  if (row_type_ == RowType::kBf16) encoded_ = Buffer(n_values * bytes_of(row_type_));
  prepare();
  waited_.reserve(workers_.size());
}

// For the shards that there are now.
void WorkerExperts::prepare() {
  local_shard_ = -1;
  for (size_t s = 0; s < shards().size(); ++s)
    if (shards()[s].owners.empty()) local_shard_ = static_cast<int>(s);
  const int n_remote = static_cast<int>(shards().size()) - (local_shard_ >= 0 ? 1 : 0);
  const int most_answers = std::min(n_remote, shape_.n_active);
  works_.clear();
  for (int i = 0; i < n_tickets(p_.micro_batches); ++i)
    works_.push_back({ShardedBatch(shards(), shape_, most_tokens_of(i, p_.max_tokens))});
  if (most_answers <= most_answers_) return;
  most_answers_ = most_answers;
  sums_ = Buffer(int64_t{p_.max_tokens} * shape_.dim * most_answers_ * int64_t{sizeof(float)});
}

WorkerHomes WorkerExperts::homes() const {
  WorkerHomes homes = workers_.homes();
  for (int layer = 0; layer < p_.config.n_all_layers(); ++layer)
    if (!p_.config.is_moe(layer)) homes.homes.ranks[layer].clear();
  return homes;
}

std::string WorkerExperts::finish_move() {
  take_links();
  end_tickets();
  std::string why = workers_.finish_move();
  if (why.empty()) prepare();
  return why;
}

WorkerExperts::~WorkerExperts() {
  take_links();
  end_tickets();
}

bool WorkerExperts::await_workers() {
  const auto until = Clock::now() + p_.patience;
  const auto all_up = [&] {
    const std::vector<WorkerStatus> all = workers();
    return std::all_of(all.begin(), all.end(),
                       [](const WorkerStatus& worker) { return worker.is_up; });
  };
  while (!all_up()) {
    if (Clock::now() >= until) return false;
    waiter_->wait({}, nullptr, std::chrono::milliseconds(50));
  }
  return true;
}

// A step before this one that has failed elsewhere may have left tickets.
void WorkerExperts::begin_step(std::span<const Batch>, int n_micro_batches) {
  check(n_micro_batches <= std::ssize(works_), "micro-batches that have a ticket");
  take_links();
  end_tickets();
  workers_.begin_step();
  make_room_for_workers();
  n_micro_batches_ = n_micro_batches;
  seconds_waited_ = 0;
}

Ticket WorkerExperts::start(const ExpertBatch& batch) {
  Work& work = works_[batch.micro_batch];
  check(!work.is_submitted, "one batch of each micro-batch");
  check(batch.x.dtype == DType::kF32 && batch.first_row + batch.x.rows <= p_.max_tokens,
        "float rows of a step");
  take_links();
  work.rows.divide(batch);
  work.is_submitted = true;
  encode(batch);
  exchange();
  leave_links();
  return batch.micro_batch;
}

void WorkerExperts::add_to(Ticket ticket, TensorView y) {
  Work& work = works_[ticket];
  if (work.rows.has_local()) compute_local(work);
  take_links();
  await(work);
  add(work, y);
  work.is_submitted = false;
  leave_links();
}

// While workers compute. What they have answered and what was lost meanwhile is seen before.
void WorkerExperts::compute_local(Work& work) {
  take_links();
  exchange();
  leave_links();
  p_.local.submit(work.rows.local());
  has_local_sums_ = true;
}

void WorkerExperts::add(const Work& work, TensorView y) {
  const auto* const all = reinterpret_cast<const float*>(sums_of(work.rows.batch()).data);
  const std::vector<ShardPart>& parts = work.rows.parts();
  for (size_t s = 0; s < parts.size(); ++s) {
    if (static_cast<int>(s) == local_shard_ && has_local_sums_) {
      p_.local.add_to(0, y);
      has_local_sums_ = false;
    }
    const ShardPart& part = parts[s];
    const float* const sums = all + part.first_sum * shape_.dim;
    p_.team.run(std::ssize(part.rows), [&](int64_t i, int) {
      float* const to = y.row<float>(part.rows[i]);
      const float* const from = sums + i * shape_.dim;
      for (int64_t c = 0; c < shape_.dim; ++c) to[c] += from[c];
    });
  }
}

// The place of the answers for a batch.
TensorView WorkerExperts::sums_of(const ExpertBatch& batch) const {
  const int64_t row = int64_t{batch.first_row} * most_answers_;
  return {sums_.data() + row * shape_.dim * int64_t{sizeof(float)}, batch.x.rows * most_answers_,
          shape_.dim, shape_.dim};
}

void WorkerExperts::encode(const ExpertBatch& batch) {
  if (row_type_ != RowType::kBf16) return;
  auto* const all = reinterpret_cast<cpu::bf16*>(encoded_.data());
  p_.team.run(batch.x.rows, [&](int64_t t, int) {
    p_.kernels.encode_bf16(
        {batch.x.row<float>(t), all + (batch.first_row + t) * shape_.dim, shape_.dim});
  });
}

// Allocates only in a step with more workers than all before.
void WorkerExperts::make_room_for_workers() {
  uses_.resize(workers_.size());
  waited_.reserve(workers_.size());
}

// The calls below use the links on the thread that computes steps, from take_links() on.
void WorkerExperts::take_links() {
  if (!is_carrying_) return;
  stops_carrying_ = true;
  waiter_->wake();
  courier_.wait();
  is_carrying_ = false;
}

// The backbone computes next. A link without requests is free for its own thread.
void WorkerExperts::leave_links() {
  for (int w = 0; w < workers_.size(); ++w)
    if (uses_[w] == Use::kTaken && workers_[w].n_requests() == 0) {
      workers_[w].release();
      uses_[w] = Use::kNone;
    }
  if (!carries_much()) return;
  stops_carrying_ = false;
  is_carrying_ = true;
  courier_.start(carry_);
}

// Whether the sockets' buffers may not hold what travels until the next call.
bool WorkerExperts::carries_much() const {
  for (int w = 0; w < workers_.size(); ++w)
    if (uses_[w] == Use::kTaken && !workers_[w].is_sent()) return true;
  int64_t bytes = 0;
  for (const Work& work : works_)
    for (const ShardPart& part : work.rows.parts())
      if (work.is_submitted && part.state == State::kSent)
        bytes += std::ssize(part.rows) * shape_.dim * int64_t{sizeof(float)};
  return bytes > kMuchBytes;
}

// On the courier's thread. Lost workers are replaced by the next exchange().
void WorkerExperts::carry() {
  while (!stops_carrying_) {
    for (int w = 0; w < workers_.size(); ++w)
      if (uses_[w] == Use::kTaken && !workers_[w].progress(*this)) uses_[w] = Use::kLost;
    bool any = false;
    for (int w = 0; w < workers_.size(); ++w)
      any = any || (uses_[w] == Use::kTaken && workers_[w].n_requests() > 0);
    if (!any) return;
    waiter_->wait(waited(), nullptr, longest_sleep());
  }
}

// Sends and receives what it can without waiting.
void WorkerExperts::exchange() {
  for (int w = 0; w < workers_.size(); ++w) {
    if (uses_[w] == Use::kTaken && !workers_[w].progress(*this)) uses_[w] = Use::kLost;
    if (uses_[w] == Use::kLost) lost(w);
  }
  send_waiting();
}

// Sends every part that has an owner which is up.
void WorkerExperts::send_waiting() {
  for (Work& work : works_) {
    if (!work.is_submitted) continue;
    for (ShardPart& part : work.rows.parts())
      while (part.state == State::kWaits) {
        const int worker = best_owner(work, part);
        if (worker < 0) break;
        if (part.n_lost >= kMostLost)
          fail(fmt::format("a request for experts {} has ended {} times: {}",
                           text_of_shard(*part.shard), part.n_lost, owners_of(part)));
        send(work, part, worker);
      }
  }
}

// The owner that has the fewest rows under way; of equal ones another one in each layer, and in
// each micro-batch. -1: all are down.
int WorkerExperts::best_owner(const Work& work, const ShardPart& part) const {
  const auto rows_of = [&](int worker) {
    int64_t n = 0;
    for (const Work& other : works_)
      if (other.is_submitted) n += other.rows.rows_of(worker);
    return n;
  };
  const ExpertBatch& batch = work.rows.batch();
  const std::vector<int>& owners = part.shard->owners;
  int best = -1;
  for (size_t i = 0; i < owners.size(); ++i) {
    const int worker = owners[(i + batch.layer + batch.micro_batch) % owners.size()];
    if (workers_[worker].is_up() && (best < 0 || rows_of(worker) < rows_of(best))) best = worker;
  }
  return best;
}

void WorkerExperts::send(Work& work, ShardPart& part, int worker) {
  WorkerLink& link = workers_[worker];
  if (uses_[worker] == Use::kNone && link.take()) uses_[worker] = Use::kTaken;
  if (uses_[worker] != Use::kTaken) return;
  const ExpertBatch& batch = work.rows.batch();
  if (row_type_ == RowType::kBf16) {
    const int64_t row_bytes = shape_.dim * bytes_of(row_type_);
    work.rows.write_request(part, row_type_, encoded_.data() + batch.first_row * row_bytes,
                            row_bytes);
  } else {
    work.rows.write_request(part, row_type_, static_cast<const std::byte*>(batch.x.data),
                            batch.x.row_bytes());
  }
  part.state = State::kSent;
  part.worker = worker;
  part.number = ++last_number_;
  part.sent_at = Clock::now();
  if (!link.request(part.number, part.body)) lost(worker);
}

// The parts that a worker was asked for, of every micro-batch, wait for another one.
void WorkerExperts::lost(int worker) {
  for (Work& work : works_)
    for (ShardPart& part : work.rows.parts())
      if (work.is_submitted && part.state == State::kSent && part.worker == worker) {
        part.state = State::kWaits;
        ++part.n_lost;
      }
  uses_[worker] = Use::kNone;
  workers_[worker].release();
}

// Sends and receives until the ticket's parts are answered.
void WorkerExperts::await(const Work& work) {
  const auto begin = Clock::now();
  while (true) {
    exchange();
    if (work.rows.is_done()) break;
    const std::vector<ShardPart>& parts = work.rows.parts();
    const auto waits = [](const ShardPart& part) { return part.state == State::kWaits; };
    if (std::any_of(parts.begin(), parts.end(), waits) && workers_.take_in()) {
      make_room_for_workers();
      continue;
    }
    for (const ShardPart& part : parts)
      if (waits(part)) require_patience(part);
    require_time_left(work, begin);
    waiter_->wait(waited(), nullptr, longest_sleep());
  }
  seconds_waited_ += seconds_since(begin);
}

// Throws StepFailed if the part has had no owner for longer than that, and no standby has got on
// with loading it.
void WorkerExperts::require_patience(const ShardPart& part) {
  Clock::time_point since = workers_[part.shard->owners.front()].down_since();
  for (const int worker : part.shard->owners) {
    if (workers_[worker].is_up()) return;
    since = std::max(since, workers_[worker].down_since());
  }
  since = std::max(since, workers_.got_on(*part.shard));
  if (Clock::now() - since < p_.patience) return;
  fail(fmt::format("experts {} have had no worker for {:g} s: {}{}: start one of them again",
                   text_of_shard(*part.shard), p_.patience.count(), owners_of(part),
                   workers_.text_of_standbys(*part.shard)));
}

void WorkerExperts::require_time_left(const Work& work, Clock::time_point begin) {
  if (Clock::now() - begin < p_.longest_wait) return;
  const std::vector<ShardPart>& parts = work.rows.parts();
  const auto part = std::find_if(parts.begin(), parts.end(),
                                 [](const ShardPart& of_shard) { return !of_shard.is_done(); });
  fail(
      fmt::format("experts {} were not computed within {:g} s, and other ranks wait no longer: "
                  "{}{}: give a larger "
                  "--worker-patience",
                  text_of_shard(*part->shard), p_.longest_wait.count(), owners_of(*part),
                  workers_.text_of_standbys(*part->shard)));
}

std::string WorkerExperts::owners_of(const ShardPart& part) const {
  std::string owners;
  for (const int worker : part.shard->owners) {
    const WorkerLink& link = workers_[worker];
    owners += (owners.empty() ? "" : ", ") + link.address();
    if (!link.is_up()) owners += fmt::format(" ({})", link.why_down());
  }
  return owners;
}

void WorkerExperts::fail(const std::string& why) {
  end_tickets();
  throw StepFailed(why);
}

// Ends the tickets of all micro-batches. Connections with requests are closed, because late answers
// would have no place.
void WorkerExperts::end_tickets() {
  if (has_local_sums_) {
    // Their ticket ends too, with sums that nothing uses.
    p_.local.add_to(0, {sums_.data(), p_.max_tokens, shape_.dim, shape_.dim});
    has_local_sums_ = false;
  }
  for (int w = 0; w < workers_.size(); ++w) {
    if (uses_[w] == Use::kNone) continue;
    if (uses_[w] == Use::kTaken && workers_[w].n_requests() > 0) workers_[w].drop();
    workers_[w].release();
    uses_[w] = Use::kNone;
  }
  for (Work& work : works_) work.is_submitted = false;
}

// A worker's silence is noticed in time, and so is one that comes back.
std::chrono::nanoseconds WorkerExperts::longest_sleep() const {
  std::chrono::nanoseconds longest = std::chrono::milliseconds(100);
  for (int w = 0; w < workers_.size(); ++w)
    longest = std::min<std::chrono::nanoseconds>(longest, workers_[w].deadline() / 4);
  return longest;
}

std::span<MessageConnection* const> WorkerExperts::waited() {
  waited_.clear();
  for (int w = 0; w < workers_.size(); ++w)
    if (uses_[w] == Use::kTaken) waited_.push_back(workers_[w].connection());
  return waited_;
}

WorkerExperts::Request WorkerExperts::request_of(uint64_t number) {
  for (Work& work : works_)
    for (ShardPart& part : work.rows.parts())
      if (work.is_submitted && part.state == State::kSent && part.number == number)
        return {&work, &part};
  return {};
}

std::span<std::byte> WorkerExperts::place_of_answer(uint64_t number, uint64_t n_bytes) {
  const Request request = request_of(number);
  const int64_t row_bytes = shape_.dim * int64_t{sizeof(float)};
  if (!request.part || n_bytes != request.part->rows.size() * static_cast<uint64_t>(row_bytes))
    throw ProtocolError(
        fmt::format("an answer of {} bytes to request {}, which was not made", n_bytes, number));
  auto* const sums = static_cast<std::byte*>(sums_of(request.work->rows.batch()).data);
  return {sums + request.part->first_sum * row_bytes, n_bytes};
}

void WorkerExperts::answered(uint64_t number) {
  ShardPart* const part = request_of(number).part;
  check(part != nullptr, "an answer that has a place");
  part->state = State::kAnswered;
  workers_[part->worker].add_round_trip(seconds_since(part->sent_at));
}

}  // namespace tandem
