// Models on the ranks of a grid, as threads.
#pragma once
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "comm/agreement.h"
#include "comm/local_ranks.h"
#include "engine/completion.h"
#include "loader/loaded_model.h"
#include "tests/whole_models.h"

namespace tandem::test {

struct RankGrid {
  int dp, tp;
  ExpertDispatch dispatch = ExpertDispatch::kAuto;
  int pp = 1;
  int micro_batches = 0;
  std::vector<int> hosts = {};  // ModelOptions::simulated_hosts
  std::string gpus = {};  // [ranks] 'g': computes on an emulated GPU; empty: as the options say
  std::string name() const {
    return fmt::format("dp {}, tp {}, pp {}, {}, micro-batches {}, hosts {}, {}", dp, tp, pp,
                       name_of(dispatch), micro_batches, fmt::join(hosts, ","), gpus);
  }
};

// Runs `lead` on rank 0 with the model on the grid's ranks, which follow its steps. `prepare` is
// called on every rank before.
inline void on_grid(const RankGrid& grid, ModelOptions options,
                    const std::function<void(LoadedModel&)>& lead,
                    const std::function<void(LoadedModel&, int rank)>& prepare = {}) {
  options.n_replicas = grid.dp;
  options.tp = grid.tp;
  options.n_stages = grid.pp;
  options.dispatch = grid.dispatch;
  options.micro_batches = grid.micro_batches;
  options.simulated_hosts = grid.hosts;
  run_local_ranks({grid.dp * grid.tp * grid.pp}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    ModelOptions of_rank = on_rank(options, group, &steps);
    if (!grid.gpus.empty())
      of_rank.device = grid.gpus[group.rank()] == 'g' ? DeviceChoice::kCuda : DeviceChoice::kCpu;
    LoadedModel loaded(of_rank);
    if (prepare) prepare(loaded, group.rank());
    if (!steps.leads()) return steps.follow();
    lead(loaded);
    steps.end();
  });
}

// Questions of greedy and of random sampling, with penalties and with log-probabilities.
inline std::vector<Request> sampled_questions(const Tokenizer& tokenizer, int n) {
  return questions(kTinyR1, tokenizer, n, [](int question, SamplingParams& sampling) {
    sampling.seed = question;
    if (question % 2 == 1) sampling.temperature = 0.7f;
    if (question % 3 == 1) sampling.repetition_penalty = 1.1f;
    if (question % 3 == 2) sampling.n_top_logprobs = 2;
  });
}

// The tokens that answer the requests, up to max_running of them at a time.
inline std::vector<std::vector<int32_t>> tokens_of(LoadedModel& loaded, const Tokenizer& tokenizer,
                                                   const std::vector<Request>& requests,
                                                   int max_running) {
  Engine engine(loaded.model(), loaded.cache(), vocabulary_of(tokenizer, loaded.config().vocab),
                loaded.context(), {.max_running = max_running, .drafting = loaded.drafting()});
  std::vector<std::vector<int32_t>> all;
  for (const Completion& c : complete(engine, requests)) all.push_back(c.tokens);
  return all;
}

// Bytes of this process, which has all ranks, in memory.
inline int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// What n ranks refuse: the message of the one that reports it.
inline std::string refusal_of_ranks(int n, const std::function<ModelOptions(int rank)>& options) {
  std::mutex mutex;
  std::vector<std::string> reports;
  int n_refused = 0;
  run_local_ranks({n}, [&](Group& group) {
    try {
      LoadedModel loaded(on_rank(options(group.rank()), group));
    } catch (const AgreedError& error) {
      const std::lock_guard lock(mutex);
      ++n_refused;
      if (error.reported_here) reports.push_back(error.what());
    }
  });
  EXPECT_EQ(n_refused, n);
  EXPECT_EQ(reports.size(), 1u);
  return reports.empty() ? "" : reports[0];
}

}  // namespace tandem::test
