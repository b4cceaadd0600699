#include "engine/generator.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/step_arrays.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

size_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

}  // namespace

// A request in flight. tokens holds the prompt and what was generated; the first n_done of them are
// in the cache.
struct Generator::Running {
  int index;
  const Request* request;
  Sampler sampler;
  std::vector<int32_t> tokens, pages;
  int n_done;
  Completion completion;
  Clock::time_point started, first_token;
  bool finished = false;

  int n_pending() const { return static_cast<int>(tokens.size()) - n_done; }
};

struct Generator::Step {
  explicit Step(int max_tokens) : arrays(max_tokens) {
    parts.reserve(max_tokens);
    samplers.reserve(max_tokens);
  }

  StepArrays arrays;
  std::vector<std::pair<Running*, int>>
      parts;                       // how many tokens of whom; in the order of sequences
  std::vector<Sampler*> samplers;  // of those that get a token
};

Generator::Generator(DeepSeek& model, KvCache& cache, Vocabulary vocabulary, int64_t context)
    : model_(model),
      cache_(cache),
      vocabulary_(std::move(vocabulary)),
      context_(context),
      chooser_(model, vocabulary_) {}

std::vector<Completion> Generator::run(std::span<const Request> requests,
                                       const GeneratorHooks& hooks) {
  for (const Request& request : requests)
    require_runnable(request, model_.config().vocab, context_, vocabulary_);
  std::vector<Completion> completions(requests.size(),
                                      Completion{.tokens = {}, .finish = FinishReason::kCancelled});
  std::vector<Running> running;
  running.reserve(requests.size());
  Step step(model_.limits().max_tokens);
  int64_t prompt_total = 0, prompt_done = 0;
  for (const Request& r : requests) prompt_total += static_cast<int64_t>(r.prompt.size());

  for (size_t next = 0; next < requests.size() || !running.empty();) {
    prompt_done += admit(requests, next, running);
    const bool cancelled = hooks.cancelled && hooks.cancelled();
    if (!cancelled) {
      fill(step, running);
      model_.forward(step.arrays.batch(), cache_);
      step.samplers.clear();
      for (auto& [r, n] : step.parts) {
        r->n_done += n;
        if (r->n_pending() == 0) step.samplers.push_back(&r->sampler);
      }
      chooser_.begin(step.samplers);
      size_t row = 0;
      for (auto& [r, n] : step.parts) {
        const bool in_prompt = r->completion.tokens.empty();
        if (in_prompt && hooks.on_prefill) hooks.on_prefill(prompt_done += n, prompt_total);
        if (r->n_pending() == 0) take_token(*r, row++, hooks);
      }
    }
    retire(cancelled, running, completions);
    if (cancelled) break;
  }
  return completions;
}

// Starts waiting requests, in order, while pages for their whole length are free. Returns the
// prompt tokens that need no computing.
int64_t Generator::admit(std::span<const Request> requests, size_t& next,
                         std::vector<Running>& running) {
  int64_t cached = 0;
  for (; next < requests.size(); ++next) {
    const Request& request = requests[next];
    const auto prompt = static_cast<int64_t>(request.prompt.size());
    const int64_t longest = std::min(prompt + request.max_new_tokens, context_);
    const int held = request.kv ? static_cast<int>(request.kv->pages.size()) : 0;
    const int wanted = pages_for(longest) - held;
    if (wanted > cache_.n_free_pages()) {
      require(
          !running.empty(),
          "{} tokens do not fit the cache: {} of its pages are free and {} are needed; raise --ctx",
          longest, cache_.n_free_pages(), wanted);
      break;
    }
    Running r{.index = static_cast<int>(next),
              .request = &request,
              .sampler = Sampler(request.sampling, vocabulary_, request.prompt),
              .tokens = request.prompt,
              .pages = {},
              .n_done = 0,
              .completion = {},
              .started = Clock::now(),
              .first_token = {}};
    if (request.kv) {
      r.pages.swap(request.kv->pages);
      r.n_done = static_cast<int>(
          std::min<int64_t>(common_prefix(request.kv->tokens, request.prompt), prompt - 1));
      r.completion.cached_tokens = r.n_done;
      cached += r.n_done;
    }
    for (int i = 0; i < wanted; ++i) r.pages.push_back(cache_.take_page());
    r.tokens.reserve(longest + 1);
    r.completion.tokens.reserve(longest + 1 - prompt);
    running.push_back(std::move(r));
  }
  return cached;
}

// Everyone's next tokens: one for those that decode, as much of the prompts as the step has room
// for.
void Generator::fill(Step& step, std::vector<Running>& running) const {
  step.arrays.clear();
  step.parts.clear();
  int room = model_.limits().max_tokens, logits = model_.limits().max_logits;
  const auto take = [&](Running& r, int n) {
    const bool last = n == r.n_pending();
    step.arrays.add(r.tokens, r.pages, r.n_done, n, last ? 1 : 0);
    step.parts.push_back({&r, n});
    room -= n;
    logits -= last;
  };
  for (Running& r : running)
    if (r.n_pending() == 1 && room > 0 && logits > 0) take(r, 1);
  for (Running& r : running)
    if (r.n_pending() > 1 && room > 0 && logits > 0) take(r, std::min(room, r.n_pending()));
}

void Generator::take_token(Running& r, size_t logits_row, const GeneratorHooks& hooks) {
  Completion& c = r.completion;
  const Sampled sampled = chooser_.token(logits_row);
  const auto now = Clock::now();
  if (c.tokens.empty()) {
    r.first_token = now;
    c.prefill_seconds = seconds(r.started, now);
  }
  c.decode_seconds = seconds(r.first_token, now);

  const auto& stops = r.request->stop_ids;
  const auto finish = [&](FinishReason reason) {
    c.finish = reason;
    r.finished = true;
  };
  if (std::find(stops.begin(), stops.end(), sampled.token) != stops.end())
    return finish(FinishReason::kStop);
  r.tokens.push_back(sampled.token);
  c.tokens.push_back(sampled.token);
  if (hooks.on_token && !hooks.on_token(r.index, sampled)) return finish(FinishReason::kStop);
  const bool full = static_cast<int64_t>(r.tokens.size()) >= context_;
  if (full || static_cast<int>(c.tokens.size()) == r.request->max_new_tokens)
    finish(FinishReason::kLength);
}

// Hands over what has finished, or all of it.
void Generator::retire(bool cancelled, std::vector<Running>& running,
                       std::vector<Completion>& completions) {
  for (Running& r : running) {
    if (!r.finished && !cancelled) continue;
    if (!r.finished) r.completion.finish = FinishReason::kCancelled;
    completions[r.index] = std::move(r.completion);
    if (KvSequence* kv = r.request->kv) {
      kv->tokens.assign(r.tokens.begin(), r.tokens.begin() + r.n_done);
      kv->pages = std::move(r.pages);
    } else {
      cache_.give_back(r.pages);
    }
    r.finished = true;
  }
  std::erase_if(running, [](const Running& r) { return r.finished; });
}

}  // namespace tandem
