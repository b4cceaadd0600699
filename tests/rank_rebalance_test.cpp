// Experts that move between ranks while an engine answers: golden logits and the embedded model's
// tokens stay what they are, a rank that cannot load leaves everything as it was, and no rank moves
// before all have loaded. Ranks are threads here.
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>
#include <random>

#include "comm/local_ranks.h"
#include "engine/engine.h"
#include "io/weight_store.h"
#include "loader/loaded_model.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/rank_grids.h"
#include "tests/repository.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

class RankRebalance : public testing::TestWithParam<std::string> {};

TEST_P(RankRebalance, GoldenLogitsStay) {
  const std::string directory = kRoot + "/tests/golden/" + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const std::string suffix = golden.has("tokens_17") ? "_17" : "_5";
  const bool ties = GetParam() == "t1";  // which only float32 decides as the golden values do
  const ModelOptions options = {.directory = directory,
                                .isa = ties ? std::optional(cpu::Isa::kReference) : std::nullopt,
                                .context = 256,
                                .max_logits = 64};
  for (const RankGrid& grid :
       {RankGrid{1, 2}, RankGrid{1, 3}, RankGrid{2, 1, ExpertDispatch::kGather},
        RankGrid{3, 1, ExpertDispatch::kAllToAll},
        RankGrid{2, 2, ExpertDispatch::kLowLatency, 1, 2},
        RankGrid{1, 2, ExpertDispatch::kAuto, 2}}) {
    SCOPED_TRACE(grid.name());
    on_grid(grid, that_moves(options), [&](LoadedModel& loaded) {
      Engine engine = moving_engine(loaded, {.plan = random_plan(grid.dp * 10 + grid.tp)}, 64);
      const std::vector<float> want = golden.floats("logits" + suffix);
      std::vector<std::vector<float>> got(6 * grid.dp);
      int n_moved = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        EngineRequest request;
        request.request.prompt = golden.ints("tokens" + suffix);
        request.first_scored = static_cast<int>(std::ssize(request.request.prompt) -
                                                std::ssize(want) / loaded.config().vocab);
        request.on_event = [](const TokenEvent&) { return true; };
        request.on_logits = [&rows = got[i]](int, std::span<const float> row) {
          rows.insert(rows.end(), row.begin(), row.end());
        };
        engine.submit(std::move(request));
        if (i % grid.dp != 0) continue;
        run_to_end(engine);
        n_moved += move_now(engine) > 0;
      }
      run_to_end(engine);
      EXPECT_GT(n_moved, 0);
      for (const std::vector<float>& rows : got)
        expect_close(rows, want, (ties ? 2e-4 : 3e-2) * largest(want));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RankRebalance,
                         testing::ValuesIn(golden_families(kRoot + "/tests/golden")),
                         [](const auto& info_of) { return info_of.param; });

using Answers = std::vector<std::vector<int32_t>>;

// Greedy answers to n questions at a time, again and again until experts have moved n_rebalances
// times.
std::vector<Answers> answers_while(LoadedModel& loaded, int n, int n_rebalances) {
  Engine engine = moving_engine(loaded, {.plan = random_plan(4)}, 64);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> asked = questions(kTinyR1, tokenizer, 16);
  std::vector<Answers> rounds;
  rounds.reserve(1000);  // receivers refer to them
  const auto ask = [&] {
    Answers& answers = rounds.emplace_back(n);
    for (int i = 0; i < n; ++i) {
      EngineRequest request;
      request.request = asked[i % asked.size()];
      request.on_event = [&answer = answers[i]](const TokenEvent& event) {
        if (event.token) answer.push_back(*event.token);
        return true;
      };
      engine.submit(std::move(request));
    }
  };
  int n_begun = 0;
  do {
    ask();
    while (engine.step()) {
      if (n_begun == n_rebalances || is_busy(engine)) continue;
      const RebalanceReport last = engine.rebalance_report();
      EXPECT_TRUE(n_begun == 0 || last.state == RebalanceReport::State::kDone) << last.error;
      EXPECT_TRUE(engine.rebalance());
      EXPECT_FALSE(engine.rebalance()) << "one is under way";
      ++n_begun;
    }
  } while (n_begun < n_rebalances && rounds.size() < rounds.capacity());
  run_to_end(engine);
  EXPECT_EQ(engine.rebalance_report().number, n_rebalances);
  return rounds;
}

// The experts that move are a few times larger than what memory may grow by.
TEST(RebalanceWhileAnswering, MemoryDoesNotGrow) {
  on_grid({1, 2}, that_moves(tiny_r1(DeviceChoice::kCpu)), [&](LoadedModel& loaded) {
    Engine engine = moving_engine(loaded, {.plan = random_plan(6)});
    EngineRequest request;
    request.request.prompt = {1, 2, 3};
    request.request.max_new_tokens = 1;
    request.on_event = [](const TokenEvent&) { return true; };
    engine.submit(std::move(request));
    run_to_end(engine);
    int64_t before = 0, bytes = 0;
    for (int i = 0; i < 100; ++i) {
      if (i == 20) before = resident_bytes();
      ASSERT_TRUE(engine.rebalance());
      run_to_end(engine);
      if (i >= 20) bytes += engine.rebalance_report().n_bytes;
    }
    const int64_t growth = resident_bytes() - before;
    EXPECT_GT(bytes, 20 << 20);
    EXPECT_LT(growth, bytes / 8) << bytes;
  });
}

TEST(RebalanceWhileAnswering, AHundredInARowChangeNoToken) {
  struct Case {
    RankGrid grid;
    int n_rebalances;
  };
  for (const auto& [grid, n_rebalances] :
       {Case{{1, 2}, 100}, Case{{2, 1, ExpertDispatch::kAllToAll}, 20}}) {
    SCOPED_TRACE(grid.name());
    ModelOptions options = tiny_r1(DeviceChoice::kCpu);
    options.max_logits = 64;
    options.max_kv_tokens = 64 * 256;
    options.kv_fraction = 1;
    Answers want;
    on_grid(grid, that_moves(options),
            [&](LoadedModel& loaded) { want = answers_while(loaded, 64, 0)[0]; });
    on_grid(grid, that_moves(options), [&](LoadedModel& loaded) {
      for (const Answers& got : answers_while(loaded, 64, n_rebalances)) EXPECT_EQ(got, want);
    });
  }
}

// What ranks did, in order.
struct Calls {
  std::mutex mutex;
  std::vector<std::pair<int, std::string>> all;
  void add(int rank, const std::string& call) {
    const std::lock_guard lock(mutex);
    all.emplace_back(rank, call);
  }
  int count(const std::string& call) {
    const std::lock_guard lock(mutex);
    return static_cast<int>(
        std::count_if(all.begin(), all.end(), [&](const auto& c) { return c.second == call; }));
  }
};

// Loads nothing; rank 1 needs some calls of status(), or fails.
class FakeMover final : public ExpertMover {
 public:
  FakeMover(int rank, Calls& calls) : rank_(rank), calls_(calls) {}
  void load(std::span<const ExpertChange>) override {
    calls_.add(rank_, "load");
    status_.state = MoveStatus::State::kLoading;
    n_polls_ = 0;
  }
  MoveStatus status() const override {
    if (status_.state == MoveStatus::State::kLoading && (rank_ == 0 || ++n_polls_ > 3)) {
      status_.state = MoveStatus::State::kLoaded;
      if (rank_ == 1 && n_loads_++ == 1) {
        status_.state = MoveStatus::State::kFailed;
        std::strcpy(status_.why.data(), "the disk is broken");
      } else {
        calls_.add(rank_, "loaded");
      }
    }
    return status_;
  }
  void move() override {
    EXPECT_EQ(status_.state, MoveStatus::State::kLoaded);
    calls_.add(rank_, "move");
    status_ = {};
  }
  void keep() override {
    calls_.add(rank_, "keep");
    status_ = {};
  }

 private:
  const int rank_;
  Calls& calls_;
  mutable MoveStatus status_;
  mutable int n_polls_ = 0, n_loads_ = 0;
};

TEST(RebalanceWhileAnswering, AllMoveOnceAllHaveLoadedOrNoneDoes) {
  Calls calls;
  std::vector<std::unique_ptr<FakeMover>> movers;
  for (int rank = 0; rank < 3; ++rank) movers.push_back(std::make_unique<FakeMover>(rank, calls));
  const auto lead = [&](LoadedModel& loaded) {
    Engine engine = moving_engine(
        loaded, {.plan = [](const ExpertUses&, const ExpertHomes&) {
          return RebalancePlan{.waves = {{{1, 0, {2}}}}, .n_layers = 1, .n_arrivals = 1};
        }});
    EXPECT_TRUE(says(error_of([&] { engine.rebalance(); }), "no step is counted yet"));
    EngineRequest request;
    request.request.prompt = {1, 2, 3};
    request.request.max_new_tokens = 2;
    request.on_event = [](const TokenEvent&) { return true; };
    engine.submit(std::move(request));
    run_to_end(engine);
    const auto before = engine.expert_homes();
    EXPECT_NE(before->ranks[1][0], (std::vector<int>{2}));
    EXPECT_TRUE(engine.rebalance());
    run_to_end(engine);
    EXPECT_EQ(engine.rebalance_report().state, RebalanceReport::State::kDone);
    const auto after = engine.expert_homes();
    EXPECT_EQ(after->ranks[1][0], (std::vector<int>{2}));
    EXPECT_NE(before->ranks[1][0], (std::vector<int>{2})) << "who has read it keeps it";
    EXPECT_EQ(calls.count("move"), 3);

    EXPECT_TRUE(engine.rebalance());  // rank 1 fails
    run_to_end(engine);
    EXPECT_EQ(engine.rebalance_report().state, RebalanceReport::State::kFailed);
    EXPECT_EQ(engine.rebalance_report().error,
              "rank 1 cannot load its experts: the disk is broken");
    EXPECT_EQ(engine.rebalance_report().n_waves_moved, 0);
    EXPECT_EQ(calls.count("move"), 3);
    EXPECT_EQ(calls.count("keep"), 3);

    EXPECT_TRUE(engine.rebalance());  // and recovers
    run_to_end(engine);
    EXPECT_EQ(engine.rebalance_report().state, RebalanceReport::State::kDone);
    EXPECT_TRUE(engine.rebalance_report().error.empty());
    EXPECT_EQ(calls.count("move"), 6);
  };
  on_grid(
      {1, 3},
      that_moves({.directory = kRoot + "/tests/golden/v3_fp8", .context = 256, .max_logits = 64}),
      lead, [&](LoadedModel& loaded, int rank) { loaded.model().use(movers[rank].get()); });
  int n_loaded = 0;
  for (const auto& [rank, call] : calls.all) {
    if (call == "load") n_loaded = rank == 0 ? 0 : n_loaded;
    n_loaded += call == "loaded";
    EXPECT_TRUE(call != "move" || n_loaded >= 3) << "rank " << rank;
  }
}

// The mover of a rank that fails in some waves, after it has loaded.
class FailingMover final : public ExpertMover {
 public:
  explicit FailingMover(ExpertMover& real) : real_(real) {}
  void load(std::span<const ExpertChange> changes) override {
    fails_ = n_loads_++ % 3 == 1;
    real_.load(changes);
  }
  MoveStatus status() const override {
    MoveStatus status = real_.status();
    if (fails_ && status.state == MoveStatus::State::kLoaded)
      status.state = MoveStatus::State::kFailed;
    return status;
  }
  void move() override { real_.move(); }
  void keep() override {
    fails_ = false;
    real_.keep();
  }

 private:
  ExpertMover& real_;
  bool fails_ = false;
  int n_loads_ = 0;
};

TEST(RebalanceWhileAnswering, WhatWasLoadedForNothingIsGivenUp) {
  const std::string directory = kRoot + "/tests/golden/v3_fp8";
  const GoldenFile golden(directory + "/golden.safetensors");
  const std::vector<float> want = golden.floats("logits_17");
  std::unique_ptr<FailingMover> failing;
  on_grid(
      {1, 2}, that_moves({.directory = directory, .context = 256, .max_logits = 64}),
      [&](LoadedModel& loaded) {
        Engine engine = moving_engine(loaded, {.plan = random_plan(3)}, 64);
        int n_failed = 0;
        for (int i = 0; i < 12; ++i) {
          std::vector<std::vector<float>> logits;
          submit_text(engine, golden.ints("tokens_17"), logits);
          run_to_end(engine);
          const auto first = std::ssize(logits) - std::ssize(want) / loaded.config().vocab;
          std::vector<float> last;
          for (auto row = logits.begin() + first; row != logits.end(); ++row)
            last.insert(last.end(), row->begin(), row->end());
          expect_close(last, want, 3e-2 * largest(want));
          EXPECT_TRUE(engine.rebalance());
          run_to_end(engine);
          n_failed += engine.rebalance_report().state == RebalanceReport::State::kFailed;
        }
        EXPECT_GE(n_failed, 2);
      },
      [&](LoadedModel& loaded, int rank) {
        if (rank == 0) return;
        failing = std::make_unique<FailingMover>(*loaded.model().mover());
        loaded.model().use(failing.get());
      });
}

TEST(RebalanceWhileAnswering, BeginsByItselfWhereRanksAreUneven) {
  const std::function<bool(const ExpertUses&, const ExpertHomes&)> due =
      [](const ExpertUses& uses, const ExpertHomes& homes) { return is_uneven(uses, homes, 1); };
  for (const double below : {0.0, 1.0})
    on_grid({1, 2}, that_moves(tiny_r1(DeviceChoice::kCpu)), [&](LoadedModel& loaded) {
      Engine engine = moving_engine(
          loaded, {.is_due = below > 0 ? due : nullptr, .period = std::chrono::hours(1)});
      const auto submit = [&] {
        EngineRequest request;
        request.request.prompt.assign(20, 17);
        request.request.max_new_tokens = 60;
        request.on_event = [](const TokenEvent&) { return true; };
        engine.submit(std::move(request));
        run_to_end(engine);
      };
      const auto balance = [&] {
        return loads_of(*engine.expert_uses(), *engine.expert_homes()).balancedness;
      };
      submit();
      const RebalanceReport report = engine.rebalance_report();
      EXPECT_EQ(report.number, below > 0 ? 1 : 0);
      if (below == 0) return;
      EXPECT_EQ(report.state, RebalanceReport::State::kDone);
      EXPECT_GT(report.n_experts, 0);
      EXPECT_GT(report.after, report.before);
      EXPECT_GT(balance(), report.before);
      for (int i = 0; i < 3; ++i) submit();
      EXPECT_EQ(engine.rebalance_report().number, 1) << "an hour has not passed";
    });
}

TEST(RebalanceWhileAnswering, NeedsSeveralRanks) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.moves_experts = true;
  EXPECT_TRUE(says(error_of([&] { LoadedModel loaded(options); }),
                   "one process on the CPU has all experts"));
}

}  // namespace
}  // namespace tandem::test
