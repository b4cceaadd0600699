// A model that is loaded, and computes, on a thread of its own: a Team pins the thread that creates
// it. Other threads submit requests to its engine. `serve` and the library use it.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "engine/engine.h"
#include "loader/loaded_model.h"
#include "scheduling/output_thread.h"
#include "text/tokenizer.h"

namespace tandem {

// Rows of logits per step for requests that ask for log-probabilities of their prompts.
constexpr int kScoredTokens = 64;

// `options` for an engine of `max_running` sequences: tokens and logits per step, and at most
// `kv_tokens` tokens of KV cache; 0: as many as kv_fraction of the free memory holds and all
// sequences at full length need. Throws Error when one sequence does not fit kv_tokens.
ModelOptions for_many_sequences(ModelOptions options, const ModelConfig& config, int max_running,
                                int64_t kv_tokens);

class EngineThread {
 public:
  struct Options {
    ModelOptions model;
    LoadProgress progress = {};
    int max_running = 256;     // sequences per step
    bool keeps_pages = true;   // prefix cache
    bool async_output = true;  // tokens become text on another thread than the one that computes
    int expert_window = 0;     // Engine::Options; the model's options then have count_experts
    // Engine::Options; the model's options then have moves_experts
    std::optional<Rebalancer::Options> rebalance = {};
    // Creates what fetches keys of prompts, once the model is loaded; empty: all are computed here.
    std::function<std::unique_ptr<PrefixSource>(LoadedModel&)> prefixes = {};
  };
  // Both are called on the new thread.
  struct Hooks {
    // The model is loaded and warm. Until stop(), requests can be submitted to the engine.
    std::function<void(Engine&, LoadedModel&)> on_ready;
    // Loading, on_ready or the engine threw the current exception. Requests fail, but an engine
    // that on_ready has been given lives until stop().
    std::function<void()> on_failed;
  };

  // The tokenizer outlives the object.
  EngineThread(const Tokenizer& tokenizer, Options options, Hooks hooks);
  ~EngineThread() { stop(); }
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Ends unfinished requests with FinishReason::kCancelled and waits for the thread. The model is
  // freed. Loading is not interrupted.
  void stop();
  // Throws what loading or computing threw, if it did. Only after stop().
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void run();
  void load_and_run();
  void await_stop();

  const Tokenizer& tokenizer_;
  const Options options_;
  const Hooks hooks_;
  OutputThread output_, masks_;
  std::exception_ptr failure_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Engine* engine_ = nullptr;
  bool stopped_ = false;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
