#include "offload/ranks/exchange_lane.h"

#include <algorithm>

#include "core/clock.h"

namespace tandem {

ExchangeLane::ExchangeLane(HostGroups& groups, const Limits& limits, Patience patience,
                           bool travels_apart)
    : groups_(groups),
      limits_(limits),
      patience_(patience),
      sums_(int64_t{limits.n_ranks} * limits.max_tokens * limits.dim * 4),
      returned_(travels_apart ? int64_t{limits.max_tokens} * limits.dim * 4 : 0),
      dispatch_([this] {
        const double began = now();
        here_ = current_->dispatch(mine_);
        last_travel_ = {began, now()};
      }),
      combine_([this] {
        const TensorView sums = {sums_.data(), here_.x.rows, limits_.dim, limits_.dim};
        const TensorView y = {returned_.data(), mine_.x.rows, limits_.dim, limits_.dim};
        const double began = now();
        std::fill_n(reinterpret_cast<float*>(returned_.data()), y.rows * y.cols, 0.f);
        current_->combine(sums, y);
        last_travel_ = {began, now()};
      }),
      thread_(travels_apart ? std::make_unique<BackgroundThread>(BackgroundThread::Wakes::kAtOnce)
                            : nullptr) {}

void ExchangeLane::use(ExchangeWay prompts, ExchangeWay decode) {
  prompts_ = std::move(prompts);
  decode_ = std::move(decode);
}

void ExchangeLane::begin(std::span<const int64_t> n_tokens, bool apart) {
  const int64_t most = *std::max_element(n_tokens.begin(), n_tokens.end());
  check(most <= limits_.max_tokens, "tokens of a rank in a micro-batch");
  check(!apart || thread_, "the lane has a thread");
  const bool decodes = decode_.exchange && most <= limits_.decode_tokens;
  current_ = decodes ? decode_.exchange.get() : prompts_.exchange.get();
  current_->begin(n_tokens);
  apart_ = apart;
  if (thread_) groups_.all().set_patience({patience_.limit, apart});
  groups_.set_patience({patience_.limit, apart});
  seconds_waited_ = 0;
}

void ExchangeLane::send(const ExpertBatch& mine) {
  mine_ = mine;
  start(dispatch_);
}

ExchangeLane::Here ExchangeLane::arrived() {
  wait();
  const TensorView sums = {sums_.data(), here_.x.rows, limits_.dim, limits_.dim};
  std::fill_n(reinterpret_cast<float*>(sums_.data()), sums.rows * sums.cols, 0.f);
  return {here_, sums};
}

void ExchangeLane::send_back() {
  if (apart_) start(combine_);
}

void ExchangeLane::add_to(TensorView y) {
  if (!apart_) {
    const double began = now();
    current_->combine({sums_.data(), here_.x.rows, limits_.dim, limits_.dim}, y);
    last_travel_ = {began, now()};
    seconds_waited_ += last_travel_.ended - began;
    return;
  }
  wait();
  check(y.rows == mine_.x.rows, "sums of the tokens that were sent");
  const auto* sums = reinterpret_cast<const float*>(returned_.data());
  for (int64_t t = 0; t < y.rows; ++t, sums += y.cols)
    for (int64_t c = 0; c < y.cols; ++c) y.row<float>(t)[c] += sums[c];
}

void ExchangeLane::settle() noexcept {
  try {
    if (thread_) thread_->wait();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the step has failed, and its first error counts
  }
}

double ExchangeLane::now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

void ExchangeLane::start(const std::function<void()>& call) {
  if (apart_) return thread_->start(call);
  const auto begin = Clock::now();
  call();
  seconds_waited_ += seconds_since(begin);
}

void ExchangeLane::wait() {
  if (!apart_) return;
  const auto begin = Clock::now();
  thread_->wait();
  seconds_waited_ += seconds_since(begin);
}

}  // namespace tandem
