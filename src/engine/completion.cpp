#include "engine/completion.h"

#include <algorithm>
#include <utility>

#include "core/run_error.h"

namespace tandem {
namespace {

struct Running {
  SequenceId id = 0;
  Completion completion;
  Clock::time_point first_token;
  bool finished = false;
  std::string error = {};

  // Returns false when the caller wants no more tokens.
  bool take(const TokenEvent& event, const std::function<bool(const TokenEvent&)>& wants_more) {
    if (finished) return false;
    Completion& c = completion;
    const auto now = Clock::now();
    c.cached_tokens = event.cached_tokens;
    error = event.error;
    c.accepted_drafts += event.was_drafted;
    c.rejected_drafts += event.n_rejected;
    if (event.token) {
      if (c.tokens.empty()) {
        first_token = now;
        c.prefill_seconds = seconds_between(event.started, now);
      }
      c.decode_seconds = seconds_between(first_token, now);
      c.tokens.push_back(*event.token);
      if (!wants_more(event)) return finish(FinishReason::kStop);
    }
    if (event.finish) finish(*event.finish);
    return true;
  }

  bool finish(FinishReason reason) {
    completion.finish = reason;
    finished = true;
    return false;
  }
};

// Reports how many prompt tokens are computed until all are.
class PrefillProgress {
 public:
  PrefillProgress(std::span<const Request> requests, const CompletionHooks& hooks) : hooks_(hooks) {
    for (const Request& r : requests) total_ += std::ssize(r.prompt);
  }

  void show(const Engine& engine, std::span<const Request> requests,
            const std::vector<Running>& running) {
    if (!hooks_.on_prefill || done_ == total_) return;
    int64_t done = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      const int64_t n = std::ssize(requests[i].prompt);
      const bool answers = running[i].finished || !running[i].completion.tokens.empty();
      done += answers ? n : std::min<int64_t>(n, engine.n_computed(running[i].id));
    }
    if (std::exchange(done_, done) != done) hooks_.on_prefill(done_, total_);
  }

 private:
  const CompletionHooks& hooks_;
  int64_t done_ = 0, total_ = 0;
};

}  // namespace

std::vector<Completion> complete(Engine& engine, std::span<const Request> requests,
                                 const CompletionHooks& hooks) {
  std::vector<Running> running(requests.size());
  const auto abort_all = [&] {
    for (const Running& r : running)
      if (r.id > 0 && !r.finished) engine.abort(r.id);
  };
  const auto is_finished = [](const Running& r) { return r.finished; };
  try {
    for (size_t i = 0; i < requests.size(); ++i) {
      Running& r = running[i];
      const auto wants_more = [&hooks, i](const TokenEvent& event) {
        return !hooks.on_token || hooks.on_token(static_cast<int>(i), event);
      };
      r.id = engine.submit(
          {.request = requests[i], .on_event = [&r, wants_more](const TokenEvent& event) {
             return r.take(event, wants_more);
           }});
    }
    PrefillProgress progress(requests, hooks);
    while (!std::all_of(running.begin(), running.end(), is_finished)) {
      if (hooks.cancelled && hooks.cancelled()) break;
      engine.step();
      progress.show(engine, requests, running);
    }
  } catch (...) {
    abort_all();
    throw;
  }
  abort_all();
  engine.step();  // processes the aborts
  std::vector<Completion> completions;
  for (Running& r : running) {
    require(r.completion.finish != FinishReason::kFailed, "{}", r.error);
    completions.push_back(std::move(r.completion));
  }
  return completions;
}

void score(Engine& engine, std::span<const int32_t> tokens, int64_t first_row,
           const std::function<void(int64_t, std::span<const float>)>& row) {
  std::optional<TokenEvent> end;
  Request request;
  request.prompt.assign(tokens.begin(), tokens.end());
  const SequenceId id = engine.submit({.request = std::move(request),
                                       .first_scored = static_cast<int>(first_row),
                                       .on_event =
                                           [&end](const TokenEvent& event) {
                                             end = event;
                                             return true;
                                           },
                                       .on_logits = row});
  try {
    while (!end) engine.step();
  } catch (...) {
    engine.abort(id);
    throw;
  }
  require(end->finish != FinishReason::kFailed, "{}", end->error);
}

// Prompts grow by a factor of eight, up to the longest or to one that takes long, so that the
// warm-up of a large model does not delay its first clients.
void warm_up(StepRunner& model, KvCache& cache, const Vocabulary& vocabulary, int64_t context) {
  constexpr std::chrono::milliseconds kLong(300);
  Engine engine(model, cache, vocabulary, context, {.max_running = 1, .keeps_pages = false});
  const auto most = std::min<int64_t>(model.limits().max_tokens, context - 2);
  auto took = Clock::duration(0);
  for (int64_t n = 1; n > 0 && took < kLong; n = n < most ? std::min(8 * n, most) : 0) {
    Request request;
    request.max_new_tokens = 2;
    for (int64_t i = 0; i < n; ++i)
      request.prompt.push_back(static_cast<int32_t>(i % vocabulary.size));
    const auto start = Clock::now();
    try {
      complete(engine, std::vector(model.n_replicas(), request));  // one for each
    } catch (const RunError&) {
      throw;
    } catch (const Error&) {  // logits are not finite: requests fail with it
    }
    took = Clock::now() - start;
  }
}

}  // namespace tandem
