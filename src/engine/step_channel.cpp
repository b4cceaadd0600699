#include "engine/step_channel.h"

#include <algorithm>
#include <numeric>

#include "comm/agreement.h"
#include "engine/step_runner.h"

namespace tandem {
namespace {

// All ranks know the size of the first message. Steps of many tokens or pages have a second one.
constexpr size_t kFirstMessage = 512;

std::span<std::byte> bytes_of(std::span<int32_t> numbers) {
  return std::as_writable_bytes(numbers);
}

}  // namespace

StepChannel::StepChannel(Group& group, OnLost on_lost, Clock::duration interval,
                         std::function<void()> on_begin)
    : group_(group),
      on_lost_(std::move(on_lost)),
      interval_(interval),
      on_begin_(std::move(on_begin)) {}

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
  if (on_begin_) on_begin_();
  started_ = true;
  heart_ = std::thread([this] { beat(); });
}

StepChannel::Turn StepChannel::announce(const StepMessage& message) {
  Turn turn(mutex_);
  begin_holding(turn);
  send(message);
  return turn;
}

ConstBytes StepChannel::replies(std::span<const int64_t> n_bytes) {
  replies_.resize(std::accumulate(n_bytes.begin(), n_bytes.end(), int64_t{0}));
  replies(n_bytes, replies_);
  return replies_;
}

void StepChannel::replies(std::span<const int64_t> n_bytes, Bytes out) {
  const std::vector<int64_t> none(group_.size());
  group_.all_to_all({{}, none}, {out, n_bytes});
}

void StepChannel::reply(ConstBytes bytes) {
  const std::vector<int64_t> none(group_.size());
  std::vector<int64_t> to_first(group_.size());
  to_first[0] = std::ssize(bytes);
  group_.all_to_all({bytes, to_first}, {{}, none});
}

// What rank 0 gives; valid until the next call.
ConstBytes StepChannel::given(int64_t n_bytes) {
  replies_.resize(n_bytes);
  group_.broadcast(replies_, 0);
  return replies_;
}

void StepChannel::end() {
  {
    const Turn turn(mutex_);
    if (ended_) return;
    begin_holding(turn);
    send({.order = {.kind = StepOrder::Kind::kEnd}});
    ended_ = true;
  }
  ended_changed_.notify_all();
}

void StepChannel::send(const StepMessage& message) {
  write_message(message, message_);
  message_.resize(std::max(message_.size(), kFirstMessage));
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
      send({.order = {.kind = StepOrder::Kind::kHeartbeat}});
      group_.barrier();
    }
  } catch (const GroupError& error) {
    on_lost_(error);
  }
}

void StepChannel::follow() {
  check(!leads(), "rank 0 decides steps");
  run_on_all(group_, [] {});  // as in begin_holding()
  if (on_begin_) on_begin_();
  while (obey(reader_.read(receive()))) {
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
bool StepChannel::obey(const StepMessage& message) {
  const StepOrder& order = message.order;
  if (order.kind == StepOrder::Kind::kEnd) return false;
  if (order.kind == StepOrder::Kind::kHeartbeat) {
    group_.barrier();
    return true;
  }
  const auto& [runner, cache] = models_.at(order.model);
  switch (order.kind) {
    case StepOrder::Kind::kForward:
      runner.obey_forward(message.batches, cache, order.micro_batches);
      break;
    case StepOrder::Kind::kForwardInFlight:
      runner.obey_in_flight(message.batches, cache, order.micro_batches);
      break;
    case StepOrder::Kind::kDraft:
      runner.draft(order.module, order.states, message.batches, cache);
      break;
    case StepOrder::Kind::kCopyPage:
      runner.copy_page(cache, order.replica, order.copy);
      return true;
    case StepOrder::Kind::kReadPage:
      reply(runner.own_keys(cache, order.replica, order.page));
      return true;
    case StepOrder::Kind::kWritePage:
      runner.write_own_keys(cache, order.replica, order.page, given(runner.key_bytes(cache)));
      return true;
    case StepOrder::Kind::kVocabulary:
      runner.set_vocabulary(message.vocabulary);
      return true;
    case StepOrder::Kind::kLogits:
      reply(runner.own_logits(message.logits));
      return true;
    case StepOrder::Kind::kExpertUses:
      reply(runner.own_expert_uses());
      return true;
    case StepOrder::Kind::kLoadExperts:
      runner.load_experts(message.changes);
      return true;
    case StepOrder::Kind::kMoveStatus:
      reply(runner.own_move_status());
      return true;
    case StepOrder::Kind::kMoveExperts:
      runner.move_experts();
      return true;
    case StepOrder::Kind::kKeepExperts:
      runner.keep_experts();
      return true;
    default:
      check(false, "an order that ranks obey");
  }
  runner.device().wait();
  return true;
}

}  // namespace tandem
