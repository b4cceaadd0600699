// Runs many requests at a time in one loop: schedule, forward, sample, deliver. `serve` calls
// run(); every other command calls step() itself.
#pragma once
#include <array>
#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "engine/drafts/drafter.h"
#include "engine/rebalancer.h"
#include "engine/step_arrays.h"
#include "engine/step_runner.h"
#include "engine/token_chooser.h"
#include "scheduling/expert_window.h"
#include "scheduling/output_thread.h"
#include "scheduling/prefix_source.h"
#include "scheduling/replicas.h"
#include "scheduling/request.h"
#include "scheduling/token_constraint.h"

namespace tandem {

struct EngineCounts {
  static constexpr int kStepSizes = 16;
  Scheduler::Counts scheduler;                   // of all replicas together
  std::vector<Scheduler::Counts> replicas = {};  // of each, if there are several
  int64_t n_steps = 0;
  int64_t n_computed_tokens = 0;  // in all steps, prompt tokens included
  int64_t n_generated_tokens = 0;
  int64_t n_fetched_tokens = 0;                // of prompts, computed by another server
  std::array<int64_t, kStepSizes> steps_of{};  // [i]: steps of 2^(i-1) + 1 to 2^i tokens
};

class Engine {
 public:
  struct Options {
    int max_running = 256;           // sequences of a replica at a time; the model limits them too
    bool keeps_pages = true;         // prefix cache
    OutputThread* output = nullptr;  // delivers events; null: they are delivered between steps
    OutputThread* masks = nullptr;   // computes token masks beside the step; null: after it
    Drafting drafting = {};          // what is drafted
    // Steps for which uses of experts are counted, at most ExpertWindow::kMaxSteps; the model has
    // count_experts(). 0: they are not counted.
    int expert_window = 0;
    ExpertHomes homes = {};  // of the model's experts, for those who ask
    // How experts move between ranks; for a model with a mover(), and an expert_window.
    // Empty: they stay.
    std::optional<Rebalancer::Options> rebalance = {};
    // Fetches the keys of prompts, into the prefix cache; null: all are computed here.
    PrefixSource* prefixes = nullptr;
  };

  // All references outlive the engine, which alone uses the cache. The vocabulary may be smaller
  // than the model's. Throws Error when the context does not fit the cache.
  Engine(StepRunner& model, KvCache& cache, Vocabulary vocabulary, int64_t context,
         Options options);
  ~Engine();
  Engine(const Engine&) = delete;

  // Thread-safe. Throws Error for a request that can never run, and RunError once run() has failed.
  // Calls on_event until the answer has ended, the last time with a FinishReason.
  SequenceId submit(EngineRequest request);
  // Thread-safe. Nothing more is computed for the request; on_event may still be called a few
  // times.
  void abort(SequenceId id);
  void forget_pages();  // empties the prefix cache
  EngineCounts counts() const;
  // Thread-safe, and waits for no step. How often experts were chosen in the steps of the window;
  // null if that is not counted.
  std::shared_ptr<const ExpertUses> expert_uses() const;
  int expert_window() const { return options_.expert_window; }
  std::shared_ptr<const ExpertHomes> expert_homes() const;  // thread-safe
  bool rebalances() const { return rebalancer_.has_value(); }
  // Thread-safe, and waits for nothing. Begins to move experts by the uses in the window. Throws
  // Error while none are counted, and returns false while experts move.
  bool rebalance();
  RebalanceReport rebalance_report() const { return rebalancer_->report(); }  // thread-safe
  int64_t context() const { return context_; }
  const BackboneGrid& grid() const { return model_.grid(); }
  std::vector<WorkerStatus> workers() const { return model_.workers(); }  // thread-safe
  std::vector<PrefixServerStatus> prefix_servers() const {                // thread-safe
    return options_.prefixes ? options_.prefixes->servers() : std::vector<PrefixServerStatus>();
  }
  int vocabulary_size() const { return vocabulary_.size; }

  // One iteration of the loop, on the thread that owns the model's team: takes submitted and
  // aborted requests, computes a step, delivers its tokens. Returns false if there was nothing to
  // compute. Throws what the model throws, such as RunError when the GPU is lost.
  bool step();
  // Tokens of a running sequence whose keys are in the cache. Only from the thread of step().
  int n_computed(SequenceId id) const { return replicas_.of(id).n_computed(id); }
  // Marks these tokens as computed in the prefix cache, with whatever numbers the cache holds: for
  // benchmarks of long contexts. Only from the thread of step().
  void assume_cached(std::span<const int32_t> tokens) { replicas_.assume_cached(tokens); }

  // Runs steps until stop() and sleeps while there is nothing to do. After StepFailed the requests
  // of that step fail with its message, and others go on. Throws what else step() throws;
  // unfinished and later requests then fail with its message.
  void run();
  // Thread-safe. Unfinished requests end with kCancelled.
  void stop();

 private:
  using Receiver = std::function<bool(const TokenEvent&)>;
  struct Running {
    EngineRequest asked;
    std::shared_ptr<Receiver> receiver;
    std::unique_ptr<Sampler> sampler;  // created with the first token
    std::vector<ScoredToken> prompt;   // prompt tokens scored so far
    int n_generated = 0;
    int n_given_pages = 0;      // for on_page
    Clock::time_point started;  // start of its first step
  };
  // A request whose first pages are fetched. It is scheduled when no more of them come.
  struct Arriving {
    EngineRequest asked;
    std::shared_ptr<Receiver> receiver;
  };
  struct ArrivedPage {
    SequenceId id;
    int index;
    BlockPool::Block keys;
  };
  // A row of the step's logits: the distribution of the token after `position` of a sequence.
  struct LogitsRow {
    SequenceId id;
    int position;
    bool
        is_sampled;  // a token of the answer is sampled from it; otherwise the prompt has the token
    int n_ahead;     // drafts before it in this step; it counts if all of them are accepted
    int replica;
  };
  struct Event {
    SequenceId id;
    std::shared_ptr<Receiver> receiver;
    TokenEvent token;
  };
  struct Orders {
    std::vector<std::pair<SequenceId, EngineRequest>> requests;
    std::vector<SequenceId> aborts;
    std::vector<ArrivedPage> pages;
    std::vector<SequenceId> arrived;  // of which no more pages come
    bool forget = false;
  };
  // What a replica computes of a sequence in a step.
  struct Part : Scheduler::Part {
    int replica;
  };
  using Plan = std::vector<Part>;  // the parts of replica 0 first
  struct Step {
    Plan plan;
    int n_tokens = 0;  // of all replicas
  };

  bool wait_for_orders();
  void take_orders();
  void begin(SequenceId id, Arriving request);
  void end_arriving(std::map<SequenceId, Arriving>::iterator entry, FinishReason reason);
  bool fetches(SequenceId id, const EngineRequest& request);
  void stop_fetching(SequenceId id);
  void adopt(const ArrivedPage& page);
  void arrived(SequenceId id);
  bool push_page(ArrivedPage page);
  void end_overdue();
  const Plan& schedule();
  bool decodes_in_flight() const;
  bool is_computing() const;
  void draft();
  void forward(const Plan& plan);
  void end_step(const Step& step, Clock::time_point start);
  void sample(const Plan& plan);
  void deliver();

  void draft_next(const Plan& plan, double step_seconds);
  int room_for_drafts(SequenceId id, const Running& r) const;

  void add_parts(int replica, std::span<const Scheduler::Part> plan, Step& step);
  void copy_pages(int replica);
  void give_pages(const Plan& plan);
  void find_rows(const Plan& plan);
  Sampler* sampler_of(const LogitsRow& row);
  void use_row(const LogitsRow& row, size_t index);
  void score_row(const LogitsRow& row, size_t index, Running& r);
  TokenEvent next_event(SequenceId id, Running& r, size_t row);
  void prepare_masks(const Plan& plan);
  void end(SequenceId id, FinishReason reason);
  void emit(SequenceId id, TokenEvent event);
  void fail_step(const std::string& why);
  void fail_parts(const Plan& plan, const std::string& why);
  void fail_all(const std::string& why);
  void deliver_now(const std::vector<Event>& events);
  void count_step();
  std::shared_ptr<const ExpertUses> read_expert_uses();

  StepRunner& model_;
  KvCache& cache_;
  const Vocabulary vocabulary_;
  const int64_t context_;
  const Options options_;
  TokenChooser chooser_;
  Replicas replicas_;
  Drafter drafter_;
  ComputingSpeed speed_;
  std::map<SequenceId, Running> running_;  // the requests in replicas_
  std::map<SequenceId, Arriving> arriving_;
  std::optional<BlockPool> page_keys_;  // for pages that are given to requests
  int64_t n_fetched_tokens_ = 0;
  bool pages_wait_ = false;  // that have come, until nothing is in flight
  // What is computed, the newest step last: one, or one for each stage of a pipeline.
  std::deque<Step> in_flight_;
  bool flows_ = false;             // whether the newest step is one of several
  std::vector<StepArrays> steps_;  // [replicas] of the newest step
  std::vector<Batch> batches_;     // [replicas] of the newest step
  int n_tokens_ = 0;               // of all replicas in the step that has ended
  std::vector<LogitsRow> rows_;    // rows of logits of this step
  int n_sampled_ = 0;              // tokens sampled in this step
  std::vector<Event> events_;      // events of this step
  std::future<void> masks_ready_;
  std::optional<ExpertWindow> expert_window_;  // empty: uses of experts are not counted
  std::vector<uint32_t> read_uses_;            // [n_all_layers * n_experts]
  std::optional<Rebalancer> rebalancer_;
  std::shared_ptr<const ExpertHomes> homes_;  // without a rebalancer

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable ordered_, pages_taken_;
  Orders orders_;
  bool stopped_ = false;
  std::string failure_;  // why run() failed; empty: it has not
  SequenceId last_id_ = 0;
  EngineCounts counts_;
  std::shared_ptr<const ExpertUses> expert_uses_;
};

}  // namespace tandem
