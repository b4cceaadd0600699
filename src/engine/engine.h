// Runs requests as they come, many at a time, until it is stopped. One thread computes: it plans a
// step, runs the model, samples. Text, stop strings and receivers are the output thread's, at most
// a few steps behind.
#pragma once
#include <array>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>

#include "engine/answer_stream.h"
#include "engine/deepseek.h"
#include "engine/host_pages.h"
#include "engine/output_thread.h"
#include "engine/scheduler.h"
#include "engine/step_arrays.h"
#include "engine/token_chooser.h"
#include "engine/token_constraint.h"

namespace tandem {

struct EngineRequest {
  Request request;                              // without kv
  bool scores_prompt = false;                   // with n_top_logprobs; may then ask for no token
  std::shared_ptr<TokenConstraint> constraint;  // of the answer; null: none
  AnswerStream::Options answer;                 // on_part is called on the output thread
  std::optional<Clock::time_point> deadline;
};

struct EngineCounts {
  static constexpr int kStepSizes = 16;
  Scheduler::Counts scheduler;
  int64_t n_steps = 0;
  int64_t n_computed_tokens = 0;  // in all steps
  int64_t n_generated_tokens = 0;
  std::array<int64_t, kStepSizes> steps_of{};  // of 2^(i-1) + 1 to 2^i tokens
};

class Engine {
 public:
  struct Options {
    int max_running = 256;            // sequences at a time
    bool keeps_pages = true;          // prefix cache
    HostPages* host_pages = nullptr;  // of the cache; null: who gives way is computed again
    OutputThread* output = nullptr;   // null: everything happens between the steps
    OutputThread* masks = nullptr;    // finds what may come next beside the step; null: after it
  };

  // All references outlive the engine; the whole cache is the engine's. The vocabulary may be
  // smaller than the model's. Throws Error when the context does not fit the cache.
  Engine(DeepSeek& model, KvCache& cache, const Tokenizer& tokenizer, Vocabulary vocabulary,
         int64_t context, Options options);

  // From any thread. Throws Error for a request that can never run, RunError once run() failed. Its
  // on_part is called until the answer has ended, the last time with a FinishReason.
  SequenceId submit(EngineRequest request);
  // From any thread: nothing more is computed for it; its on_part may be called a few times yet.
  void abort(SequenceId id);
  void forget_pages();  // empties the prefix cache
  EngineCounts counts() const;
  int64_t context() const { return context_; }
  int vocabulary_size() const { return vocabulary_.size; }

  // Works until stop(), on the thread that the model's team belongs to. Throws what the model does,
  // such as RunError when the GPU is lost: whoever has not ended, or asks then, is told.
  void run();
  // From any thread. Whoever has not ended gets kCancelled.
  void stop();

 private:
  struct Running {
    EngineRequest asked;
    std::shared_ptr<AnswerStream> answer;
    std::unique_ptr<Sampler> sampler;  // made for the first token
    std::vector<ScoredToken> prompt;   // as far as it is scored
    int n_generated = 0;
    Clock::time_point started;  // of its first step
  };
  // A row of the step's logits: what follows token `position` of a sequence.
  struct LogitsRow {
    SequenceId id;
    int position;
    bool samples;  // else the prompt says which token follows
  };
  struct Event {
    SequenceId id;
    std::shared_ptr<AnswerStream> answer;
    TokenEvent token;
  };
  struct Orders {
    std::vector<std::pair<SequenceId, EngineRequest>> requests;
    std::vector<SequenceId> aborts;
    bool forget = false, stop = false;
  };

  bool follow_orders();
  void run_step();
  void copy_pages();
  void find_rows(const std::vector<Scheduler::Part>& plan);
  Sampler* sampler_of(Running& r);
  void use_row(const LogitsRow& row, size_t index);
  TokenEvent next_event(SequenceId id, Running& r, size_t row);
  void prepare_masks(const std::vector<Scheduler::Part>& plan);
  void end_overdue();
  void end(SequenceId id, FinishReason reason);
  void emit(SequenceId id, TokenEvent event);
  void fail_all(const std::string& why);
  void deliver();
  void deliver_now(const std::vector<Event>& events);
  void count_step();

  DeepSeek& model_;
  KvCache& cache_;
  const Tokenizer& tokenizer_;
  const Vocabulary vocabulary_;
  const int64_t context_;
  const Options options_;
  TokenChooser chooser_;
  Scheduler scheduler_;
  StepArrays step_;
  ComputingSpeed speed_;
  std::map<SequenceId, Running> running_;  // in the scheduler
  std::vector<LogitsRow> rows_;            // of this step
  std::vector<Event> events_;              // of this step
  std::future<void> masks_ready_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable ordered_;
  Orders orders_;
  std::string failure_;  // why run() has ended; empty: it has not failed
  SequenceId last_id_ = 0;
  EngineCounts counts_;
};

}  // namespace tandem
