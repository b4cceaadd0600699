#include "engine/step_channel.h"

#include <algorithm>
#include <array>
#include <bit>

#include "comm/agreement.h"
#include "engine/step_runner.h"

namespace tandem {
namespace {

// All ranks know the size of the first message. Steps of many tokens or pages have a second one.
constexpr size_t kFirstMessage = 512;

// Numbers before the arrays of a message.
struct Header {
  int32_t n_numbers;  // of the message
  StepOrder order;
  int32_t n_tokens, n_sequences, n_logit_rows, n_hidden_rows;
};
constexpr size_t kHeader = sizeof(Header) / sizeof(int32_t);
using HeaderNumbers = std::array<int32_t, kHeader>;

std::span<std::byte> bytes_of(std::span<int32_t> numbers) {
  return std::as_writable_bytes(numbers);
}

void append(std::vector<int32_t>& to, std::span<const int32_t> numbers) {
  to.insert(to.end(), numbers.begin(), numbers.end());
}

void write(const StepOrder& order, const Batch& batch, std::vector<int32_t>& message) {
  message.assign(kHeader, 0);
  for (const auto array : {batch.tokens, batch.positions, batch.logit_rows, batch.hidden_rows})
    append(message, array);
  for (const Sequence& s : batch.sequences)
    append(message, std::array{s.first_token, s.n_tokens, s.kv_length,
                               static_cast<int32_t>(s.kv_pages.size())});
  for (const Sequence& s : batch.sequences) append(message, s.kv_pages);
  const Header header{static_cast<int32_t>(message.size()),
                      order,
                      batch.n(),
                      static_cast<int32_t>(batch.sequences.size()),
                      static_cast<int32_t>(batch.logit_rows.size()),
                      static_cast<int32_t>(batch.hidden_rows.size())};
  std::ranges::copy(std::bit_cast<HeaderNumbers>(header), message.begin());
  message.resize(std::max(message.size(), kFirstMessage));
}

// The batch of a message, in which its arrays are; `sequences` holds those of the batch.
Batch batch_of(const Header& header, std::span<const int32_t> arrays,
               std::vector<Sequence>& sequences) {
  const auto take = [&](int32_t n) {
    const std::span<const int32_t> part = arrays.first(n);
    arrays = arrays.subspan(n);
    return part;
  };
  Batch batch{.tokens = take(header.n_tokens),
              .positions = take(header.n_tokens),
              .sequences = {},
              .logit_rows = take(header.n_logit_rows),
              .hidden_rows = take(header.n_hidden_rows)};
  const std::span<const int32_t> numbers = take(4 * header.n_sequences);
  sequences.clear();
  for (size_t i = 0; i < numbers.size(); i += 4)
    sequences.push_back({numbers[i], numbers[i + 1], numbers[i + 2], take(numbers[i + 3])});
  batch.sequences = sequences;
  return batch;
}

}  // namespace

StepChannel::StepChannel(Group& group, OnLost on_lost, Clock::duration interval)
    : group_(group), on_lost_(std::move(on_lost)), interval_(interval) {}

StepChannel::~StepChannel() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  ended_changed_.notify_all();
  if (heart_.joinable()) heart_.join();
}

int StepChannel::add(StepRunner& runner, KvCache& cache) {
  models_.push_back({runner, cache});
  return static_cast<int>(models_.size()) - 1;
}

void StepChannel::begin() { begin_holding(Turn(mutex_)); }

// Returns once all ranks are ready, and throws if one has failed before.
void StepChannel::begin_holding(const Turn&) {
  check(leads() && !ended_, "rank 0 decides steps, until the end");
  if (started_) return;
  run_on_all(group_, [] {});
  started_ = true;
  heart_ = std::thread([this] { beat(); });
}

StepChannel::Turn StepChannel::announce(const StepOrder& order, const Batch& batch) {
  Turn turn(mutex_);
  begin_holding(turn);
  send(order, batch);
  return turn;
}

void StepChannel::end() {
  {
    const Turn turn(mutex_);
    begin_holding(turn);
    send({.kind = StepOrder::Kind::kEnd});
    ended_ = true;
  }
  ended_changed_.notify_all();
}

void StepChannel::send(const StepOrder& order, const Batch& batch) {
  write(order, batch, message_);
  const std::span<int32_t> numbers(message_);
  group_.broadcast(bytes_of(numbers.first(kFirstMessage)), 0);
  if (numbers.size() > kFirstMessage) group_.broadcast(bytes_of(numbers.subspan(kFirstMessage)), 0);
  last_ = Clock::now();
}

void StepChannel::beat() {
  try {
    for (Turn turn(mutex_); !ended_;) {
      ended_changed_.wait_for(turn, interval_, [&] { return ended_; });
      if (ended_ || Clock::now() - last_ < interval_) continue;
      send({.kind = StepOrder::Kind::kHeartbeat});
      group_.barrier();
    }
  } catch (const GroupError& error) {
    on_lost_(error);
  }
}

void StepChannel::follow() {
  check(!leads(), "rank 0 decides steps");
  run_on_all(group_, [] {});  // as in begin_holding()
  while (obey(receive())) {
  }
}

std::span<const int32_t> StepChannel::receive() {
  message_.resize(std::max(message_.size(), kFirstMessage));
  group_.broadcast(bytes_of(std::span(message_).first(kFirstMessage)), 0);
  const auto n = static_cast<size_t>(message_[0]);
  if (n > kFirstMessage) {
    message_.resize(n);
    group_.broadcast(bytes_of(std::span(message_).first(n).subspan(kFirstMessage)), 0);
  }
  return std::span(message_).first(n);
}

// Returns false at the end.
bool StepChannel::obey(std::span<const int32_t> message) {
  HeaderNumbers numbers;
  std::copy_n(message.begin(), kHeader, numbers.begin());
  const auto header = std::bit_cast<Header>(numbers);
  const StepOrder& order = header.order;
  if (order.kind == StepOrder::Kind::kEnd) return false;
  if (order.kind == StepOrder::Kind::kHeartbeat) {
    group_.barrier();
    return true;
  }
  const auto& [runner, cache] = models_.at(order.model);
  if (order.kind == StepOrder::Kind::kCopyPage) {
    runner.copy_page(cache, order.from_page, order.to_page);
    return true;
  }
  const Batch batch = batch_of(header, message.subspan(kHeader), sequences_);
  if (order.kind == StepOrder::Kind::kForward)
    runner.forward(batch, cache);
  else
    runner.draft(order.module, order.states, batch, cache);
  runner.device().wait();
  return true;
}

}  // namespace tandem
