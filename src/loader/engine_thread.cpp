#include "loader/engine_thread.h"

#include <algorithm>
#include <utility>

#include "engine/completion.h"
#include "offload/plan/placement_json.h"

namespace tandem {

ModelOptions for_many_sequences(ModelOptions options, const ModelConfig& config, int max_running,
                                int64_t kv_tokens) {
  options.max_logits = std::max(max_running, kScoredTokens);
  if (options.step_tokens || options.placement.empty())
    options.step_tokens = std::max(options.step_tokens.value_or(kStepTokens), max_running);
  if (options.context == 0) {
    options.context = default_context(config);
    if (!options.placement.empty())
      options.context = std::min(options.context, placement_from_file(options.placement).kv_tokens);
  }
  require(kv_tokens == 0 || kv_tokens >= options.context,
          "--kv-tokens {}: one sequence of --ctx {} must fit", kv_tokens, options.context);
  if (kv_tokens > 0) options.kv_fraction = 1;
  options.max_kv_tokens = kv_tokens > 0 ? kv_tokens : options.context * max_running;
  return options;
}

EngineThread::EngineThread(const Tokenizer& tokenizer, Options options, Hooks hooks)
    : tokenizer_(tokenizer),
      options_(std::move(options)),
      hooks_(std::move(hooks)),
      thread_([this] { run(); }) {}

void EngineThread::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    if (engine_) engine_->stop();
  }
  if (thread_.joinable()) thread_.join();
}

void EngineThread::run() {
  try {
    load_and_run();
  } catch (...) {
    failure_ = std::current_exception();
    hooks_.on_failed();
  }
}

void EngineThread::load_and_run() {
  LoadedModel loaded(options_.model, options_.progress);
  const Vocabulary vocabulary = vocabulary_of(tokenizer_, loaded.config().vocab);
  warm_up(loaded.model(), loaded.cache(), vocabulary, loaded.context());
  const std::unique_ptr<PrefixSource> prefixes =
      options_.prefixes ? options_.prefixes(loaded) : nullptr;
  Engine engine(loaded.model(), loaded.cache(), vocabulary, loaded.context(),
                {.max_running = options_.max_running,
                 .keeps_pages = options_.keeps_pages,
                 .output = options_.async_output ? &output_ : nullptr,
                 .masks = options_.async_output ? &masks_ : nullptr,
                 .drafting = loaded.drafting(),
                 .expert_window = options_.expert_window,
                 .homes = loaded.expert_homes(),
                 .rebalance = options_.rebalance,
                 .prefixes = prefixes.get()});
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    engine_ = &engine;
  }
  try {
    hooks_.on_ready(engine, loaded);
    engine.run();
  } catch (...) {
    failure_ = std::current_exception();
    hooks_.on_failed();
    await_stop();
  }
  output_.finish();
  const std::lock_guard lock(mutex_);
  engine_ = nullptr;
}

// Receivers of answers refer to the engine until they have been told to stop.
void EngineThread::await_stop() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopped_; });
}

}  // namespace tandem
