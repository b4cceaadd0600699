// Engines whose experts move while they answer.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "loader/loaded_model.h"

namespace tandem::test {

inline ModelOptions that_moves(ModelOptions options) {
  options.count_experts = options.moves_experts = true;
  return options;
}

inline Engine moving_engine(LoadedModel& loaded, const Rebalancer::Options& rebalance,
                            int max_running = 8) {
  return {loaded.model(),
          loaded.cache(),
          {.size = loaded.config().vocab},
          loaded.context(),
          {.max_running = max_running,
           .keeps_pages = false,
           .expert_window = 8,
           .homes = loaded.expert_homes(),
           .rebalance = rebalance}};
}

// Moves experts whatever was counted.
inline auto random_plan(unsigned seed) {
  return
      [random = std::make_shared<std::mt19937>(seed)](ExpertUses uses, const ExpertHomes& homes) {
        for (std::vector<int64_t>& of_layer : uses.of_layer)
          for (int64_t& n : of_layer) n = int64_t{1} << (*random)() % 8;
        return plan_for(uses, homes);
      };
}

inline bool is_busy(const Engine& engine) {
  const auto state = engine.rebalance_report().state;
  return state == RebalanceReport::State::kPlanning || state == RebalanceReport::State::kLoading;
}

// A step. Without one to compute, lets the threads that plan and load have the core.
inline bool step_or_wait(Engine& engine) {
  if (engine.step()) return true;
  std::this_thread::sleep_for(std::chrono::microseconds(200));
  return false;
}

inline void run_to_end(Engine& engine) {
  while (step_or_wait(engine) || is_busy(engine)) {
  }
}

// Moves all that the plan says. Returns the number of experts.
inline int64_t move_now(Engine& engine) {
  EXPECT_TRUE(engine.rebalance());
  run_to_end(engine);
  const RebalanceReport report = engine.rebalance_report();
  EXPECT_EQ(report.state, RebalanceReport::State::kDone) << report.error;
  EXPECT_EQ(report.n_waves_moved, report.n_waves);
  EXPECT_EQ(report.n_bytes > 0, report.n_experts > 0);
  return report.n_experts;
}

// Submits requests whose answers, without errors, go to `answers`, which outlives them.
inline void submit_all(Engine& engine, const std::vector<Request>& requests,
                       std::vector<std::vector<int32_t>>& answers) {
  answers.assign(requests.size(), {});
  for (size_t i = 0; i < requests.size(); ++i) {
    EngineRequest request;
    request.request = requests[i];
    request.on_event = [&answer = answers[i]](const TokenEvent& event) {
      if (event.token) answer.push_back(*event.token);
      EXPECT_EQ(event.error, "");
      return true;
    };
    engine.submit(std::move(request));
  }
}

// Logits of a text's tokens from `first_scored` on go to `logits`, [tokens][vocab].
inline void submit_text(Engine& engine, const std::vector<int32_t>& tokens,
                        std::vector<std::vector<float>>& logits, int first_scored = 0) {
  EngineRequest request;
  request.request.prompt = tokens;
  request.first_scored = first_scored;
  request.on_event = [](const TokenEvent&) { return true; };
  request.on_logits = [&logits](int, std::span<const float> row) {
    logits.emplace_back(row.begin(), row.end());
  };
  engine.submit(std::move(request));
}

// Logits after each token of the prompt from `first` on, computed n times at once: on as many
// replicas, if there are some.
inline std::vector<std::vector<std::vector<float>>> logits_at_once(
    LoadedModel& loaded, const std::vector<int32_t>& prompt, int n, int first = 1) {
  Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab}, loaded.context(),
                {.max_running = n, .keeps_pages = false});
  std::vector<std::vector<std::vector<float>>> all(n);
  for (auto& rows : all) submit_text(engine, prompt, rows, first);
  while (engine.step()) {
  }
  return all;
}

}  // namespace tandem::test
