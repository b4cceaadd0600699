// Models whose experts workers have, which are threads of a test.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cli/conversation.h"
#include "comm/local_ranks.h"
#include "tests/error_of.h"
#include "tests/plain_engine.h"
#include "tests/whole_models.h"
#include "tests/worker_threads.h"

namespace tandem::test {

// Calls `lead` on the first of n ranks that divide a backbone, with its options; the others load
// the model as it does, and follow its steps.
inline void on_ranks_of_backbone(int n, const ModelOptions& options,
                                 const std::function<void(const ModelOptions&)>& lead) {
  run_local_ranks({n}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    ModelOptions mine = on_rank(options, group, &steps);
    if (!steps.leads()) {
      if (!mine.workers.any()) mine.workers.addresses = {"those that the first rank has"};
      LoadedModel loaded(mine);
      return steps.follow();
    }
    lead(mine);
    steps.end();
  });
}

inline LoadedExpertsOptions with_mtp(const std::string& directory, const std::string& experts) {
  LoadedExpertsOptions options = served(directory, experts);
  options.draft = DraftChoice::kMtp;
  return options;
}

inline ModelOptions drafting(const std::string& directory) {
  return {.directory = directory,
          .n_threads = 1,
          .context = 256,
          .max_logits = 200,
          .draft = DraftChoice::kMtp};
}

inline ModelOptions drafting(const std::string& directory,
                             const std::vector<std::string>& workers) {
  ModelOptions options = drafting(directory);
  options.workers.addresses = workers;
  options.workers.patience = std::chrono::milliseconds(500);
  return options;
}

// Answers to questions, and what became of their drafts.
struct Drafted {
  std::vector<std::vector<int32_t>> tokens;
  int n_accepted = 0, n_rejected = 0;
  bool operator==(const Drafted&) const = default;
};

inline Drafted drafted(const ModelOptions& options) {
  LoadedModel loaded(options);
  const Tokenizer tokenizer = Tokenizer::from_directory(options.directory);
  Engine engine = engine_for(loaded, tokenizer);
  Drafted all;
  for (const Completion& c : complete(engine, questions(options.directory, tokenizer, 8))) {
    all.tokens.push_back(c.tokens);
    all.n_accepted += c.accepted_drafts;
    all.n_rejected += c.rejected_drafts;
  }
  return all;
}

// Answers of an engine that another thread runs, and errors, one of each request.
struct AllAnswers {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::string> errors;
};

// Submits all requests, and returns when all have ended.
inline AllAnswers ask_all(Engine& engine, const std::vector<Request>& requests) {
  struct State {
    AllAnswers answers;
    size_t n_ended = 0;
    std::mutex mutex;
    std::condition_variable changed;
  };
  const auto state = std::make_shared<State>();
  state->answers = {std::vector<std::vector<int32_t>>(requests.size()),
                    std::vector<std::string>(requests.size())};
  for (size_t i = 0; i < requests.size(); ++i) {
    EngineRequest request;
    request.request = requests[i];
    request.on_event = [state, i](const TokenEvent& event) {
      const std::lock_guard lock(state->mutex);
      if (event.token) state->answers.tokens[i].push_back(*event.token);
      state->answers.errors[i] = event.error;
      state->n_ended += event.finish.has_value();
      state->changed.notify_all();
      return true;
    };
    engine.submit(std::move(request));
  }
  std::unique_lock lock(state->mutex);
  EXPECT_TRUE(state->changed.wait_for(lock, std::chrono::seconds(60),
                                      [&] { return state->n_ended == requests.size(); }));
  return state->answers;
}

// Every worker has computed something, and none was lost.
inline void expect_all_used(const std::vector<WorkerStatus>& workers) {
  for (const WorkerStatus& worker : workers) {
    EXPECT_GT(worker.n_requests, 0) << worker.address;
    EXPECT_EQ(worker.n_failures, 0) << worker.address;
  }
}

// `options` are of the embedded model, and `want` has its answers to the first questions.
inline void expect_answers_after_failed_steps(ModelOptions options,
                                              const std::vector<std::vector<int32_t>>& want) {
  LoadedExpertsOptions of_worker = served(kTinyR1, "8-15");
  of_worker.draft = options.draft;
  auto worker = std::make_unique<WorkerThread>(of_worker);
  const std::string address = worker->address();
  options.workers.addresses = {address};
  options.workers.patience = std::chrono::milliseconds(300);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> requests =
      questions(kTinyR1, tokenizer, static_cast<int>(want.size()));
  LoadedModel loaded(options);
  Engine engine = engine_for(loaded, tokenizer);
  std::thread client([&] {
    EXPECT_EQ(ask_all(engine, requests).tokens, want);
    for (int round = 0; round < 2; ++round) {
      worker.reset();
      for (int i = 0; i < 2; ++i) {
        const AllAnswers failed = ask_all(engine, requests);
        for (const std::string& error : failed.errors)
          EXPECT_TRUE(says(error, "experts 8-15 have had no worker for 0.3 s: " + address));
      }
      EXPECT_EQ(engine.counts().scheduler.n_running, 0);
      worker = std::make_unique<WorkerThread>(of_worker, ExpertServer::Options{.address = address});
      for (int i = 0; i < 2000 && !engine.workers()[0].is_up; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(ask_all(engine, requests).tokens, want);
    }
    engine.stop();
  });
  engine.run();
  client.join();
}

// The same of two replicas, which have links of their own to a worker with these experts.
inline void expect_replicas_answer_after_failed_steps(
    ModelOptions options, const std::string& experts,
    const std::vector<std::vector<int32_t>>& want) {
  const LoadedExpertsOptions of_worker = served(kTinyR1, experts);
  auto worker = std::make_unique<WorkerThread>(of_worker);
  const std::string address = worker->address();
  options.n_replicas = 2;
  options.workers.addresses = {address};
  options.workers.patience = std::chrono::milliseconds(300);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> requests =
      questions(kTinyR1, tokenizer, static_cast<int>(want.size()));
  on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
    LoadedModel loaded(of_rank);
    Engine engine = engine_for(loaded, tokenizer);
    std::thread client([&] {
      EXPECT_EQ(ask_all(engine, requests).tokens, want);
      for (int round = 0; round < 2; ++round) {
        worker.reset();
        const AllAnswers failed = ask_all(engine, requests);
        for (const std::string& error : failed.errors)
          EXPECT_TRUE(says(
              error, fmt::format("experts {} have had no worker for 0.3 s: {}", experts, address)))
              << error;
        worker =
            std::make_unique<WorkerThread>(of_worker, ExpertServer::Options{.address = address});
        // Both ranks connect twice a second; an answer tells when they have.
        AllAnswers last = ask_all(engine, requests);
        for (int i = 0; i < 100 && last.tokens != want; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          last = ask_all(engine, requests);
        }
        EXPECT_EQ(last.tokens, want);
      }
      engine.stop();
    });
    engine.run();
    client.join();
  });
}

// Does `work` while one of two workers after the other ends and is back, as `options` say, and
// then stays for long enough to be used.
template <class Work>
auto while_owners_change(Workers& workers, const LoadedExpertsOptions& options, const Work& work) {
  std::atomic<bool> is_over = false;
  std::thread change([&] {
    for (int worker = 0; !is_over; worker = 1 - worker) {
      workers.threads[worker].reset();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      workers.threads[worker] = std::make_unique<WorkerThread>(
          options, ExpertServer::Options{.address = workers.addresses[worker]});
      std::this_thread::sleep_for(std::chrono::milliseconds(700));  // links connect twice a second
    }
  });
  const auto result = work();
  is_over = true;
  change.join();
  return result;
}

}  // namespace tandem::test
