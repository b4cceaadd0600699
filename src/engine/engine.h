// Runs requests, many at a time, in one loop: schedule, forward, sample, deliver. Whoever owns the
// thread turns it: `serve` by run(), every other command by step().
#pragma once
#include <array>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>

#include "engine/host_pages.h"
#include "engine/output_thread.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/step_arrays.h"
#include "engine/step_runner.h"
#include "engine/token_chooser.h"
#include "engine/token_constraint.h"

namespace tandem {

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
    int max_running = 256;            // sequences at a time, as far as the model's limits allow
    bool keeps_pages = true;          // prefix cache
    HostPages* host_pages = nullptr;  // of the cache; null: preempted sequences are recomputed
    OutputThread* output = nullptr;   // null: events are delivered between the steps
    OutputThread* masks = nullptr;    // finds what may come next beside the step; null: after it
  };

  // All references outlive the engine; the whole cache is the engine's. The vocabulary may be
  // smaller than the model's. Throws Error when the context does not fit the cache.
  Engine(StepRunner& model, KvCache& cache, Vocabulary vocabulary, int64_t context,
         Options options);

  // From any thread. Throws Error for a request that can never run, RunError once run() failed. Its
  // on_event is called until the answer has ended, the last time with a FinishReason.
  SequenceId submit(EngineRequest request);
  // From any thread: nothing more is computed for it; its on_event may be called a few times yet.
  void abort(SequenceId id);
  void forget_pages();  // empties the prefix cache
  EngineCounts counts() const;
  int64_t context() const { return context_; }
  int vocabulary_size() const { return vocabulary_.size; }

  // One turn of the loop, on the thread that the model's team belongs to: takes in what was
  // submitted and aborted, computes a step, delivers its tokens. False: there was nothing to
  // compute. Throws what the model does, such as RunError when the GPU is lost.
  bool step();
  // Tokens of a running sequence whose keys are in the cache. On the thread of step().
  int n_computed(SequenceId id) const { return scheduler_.n_computed(id); }
  // The prefix cache finds these tokens as if they had been computed, with whatever numbers the
  // cache holds: for benchmarks of long contexts. On the thread of step().
  void assume_cached(std::span<const int32_t> tokens) { scheduler_.assume_cached(tokens); }

  // Steps until stop(), and sleeps while there is nothing to do. Throws what step() throws: then
  // unfinished and later requests fail with its message.
  void run();
  // From any thread. Unfinished requests get kCancelled.
  void stop();

 private:
  using Receiver = std::function<bool(const TokenEvent&)>;
  struct Running {
    EngineRequest asked;
    std::shared_ptr<Receiver> receiver;
    std::unique_ptr<Sampler> sampler;  // made for the first token
    std::vector<ScoredToken> prompt;   // as far as it is scored
    int n_generated = 0;
    Clock::time_point started;  // of its first step
  };
  // A row of the step's logits: what follows token `position` of a sequence.
  struct LogitsRow {
    SequenceId id;
    int position;
    bool is_last;  // the answer's next token is drawn from it; else the prompt has the token
  };
  struct Event {
    SequenceId id;
    std::shared_ptr<Receiver> receiver;
    TokenEvent token;
  };
  struct Orders {
    std::vector<std::pair<SequenceId, EngineRequest>> requests;
    std::vector<SequenceId> aborts;
    bool forget = false;
  };
  using Plan = std::vector<Scheduler::Part>;

  bool wait_for_orders();
  void take_orders();
  void end_overdue();
  const Plan& schedule();
  void forward(const Plan& plan);
  void sample(const Plan& plan);
  void deliver();

  void copy_pages();
  void find_rows(const Plan& plan);
  Sampler* sampler_of(const LogitsRow& row);
  void use_row(const LogitsRow& row, size_t index);
  void score_row(const LogitsRow& row, size_t index, Running& r);
  TokenEvent next_event(SequenceId id, Running& r, size_t row);
  void prepare_masks(const Plan& plan);
  void end(SequenceId id, FinishReason reason);
  void emit(SequenceId id, TokenEvent event);
  void fail_all(const std::string& why);
  void deliver_now(const std::vector<Event>& events);
  void count_step();

  StepRunner& model_;
  KvCache& cache_;
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
  bool stopped_ = false;
  std::string failure_;  // why run() has ended; empty: it has not failed
  SequenceId last_id_ = 0;
  EngineCounts counts_;
};

}  // namespace tandem
