// Ranks that divide a backbone, of which the first has expert workers; both are threads here. What
// each computes, golden logits, answers and drafts while workers are lost, and what is refused.
#include <atomic>
#include <cstring>
#include <fstream>

#include "engine/completion.h"
#include "offload/ranks/rank_experts.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/rank_grids.h"
#include "tests/temp_directory.h"
#include "tests/whole_models.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

// Layers 1 and 2 have experts, of which workers have those that are true.
std::vector<std::vector<bool>> in_both_layers(const std::vector<bool>& on_workers) {
  return {{}, on_workers, on_workers};
}

ModelConfig served_config() { return ModelConfig::from_directory(kServedModel); }

TEST(RanksBesideWorkers, EachHaveAsManyOfTheOtherExperts) {
  const std::vector<bool> on_workers = {true, false, true, false, true, false, false, false};
  const auto ranks = ranks_beside_workers(in_both_layers(on_workers), 2);
  ASSERT_EQ(ranks.size(), 3u);
  EXPECT_TRUE(ranks[0].empty());
  EXPECT_EQ(ranks[1], (std::vector<std::vector<int>>{{0}, {0}, {0}, {1}, {0}, {0}, {1}, {0}}));
  EXPECT_EQ(ranks[2], ranks[1]);
  EXPECT_TRUE(ranks_beside_workers({}, 2).empty());
}

// The sums of all ranks' parts, shard by shard and to the bit, also of two micro-batches at a time.
TEST(RanksBesideWorkers, ComputeEveryExpertOnce) {
  Local local;
  const Workers workers(served(kServedModel, ""), {"0-2", "2-4"});
  Backbone backbone(local, workers.addresses, {.micro_batches = 2});
  const std::vector<bool> on_workers = {true, true, true, true, true, false, false, false};
  const ExpertOwners owners =
      owners_of(ranks_beside_workers(in_both_layers(on_workers), 2), served_config(), 2);
  std::vector<Shard> of_first = backbone.shards();
  for (Shard& shard : of_first)
    if (shard.owners.empty()) shard.experts.assign(3, {5, 7});
  const std::vector<Shard> of_second = {{{{6}, {6}, {6}}, {}}};
  for (const int rank : {0, 1}) {
    SCOPED_TRACE(rank);
    RankExperts pool({.owners = owners,
                      .rank = rank,
                      .mine = local.experts,
                      .workers = rank == 0 ? &backbone.pool() : nullptr,
                      .micro_batches = 2});
    EXPECT_EQ(pool.micro_batches({}, true), 2);
    EXPECT_EQ(pool.workers().size(), rank == 0 ? 2u : 0u);
    EXPECT_EQ(pool.seconds_waited().has_value(), rank == 0);
    for (const int layer : {1, 2})
      for (const int n_micro_batches : {1, 2}) {
        Inputs first(13, local.dim, layer), second(7, local.dim, 10 + layer);
        pool.begin_step({}, n_micro_batches);
        std::vector<float> y(first.n * local.dim, 0.5f), z(second.n * local.dim, 0.5f);
        const Ticket one = pool.submit(first.batch(layer));
        EXPECT_EQ(pool.waits(one), n_micro_batches == 2) << "as on every other rank";
        if (n_micro_batches == 2) {
          ExpertBatch batch = second.batch(layer);
          batch.micro_batch = 1;
          batch.first_row = first.n;
          const Ticket other = pool.submit(batch);
          EXPECT_TRUE(pool.waits(other));
          pool.add_to(one, {y.data(), first.n, local.dim, local.dim});
          pool.add_to(other, {z.data(), second.n, local.dim, local.dim});
        } else {
          pool.add_to(one, {y.data(), first.n, local.dim, local.dim});
        }
        pool.end_step({}, {});
        const std::vector<Shard>& mine = rank == 0 ? of_first : of_second;
        EXPECT_EQ(y, local.sums(first, layer, mine));
        if (n_micro_batches == 2) {
          EXPECT_EQ(z, local.sums(second, layer, mine));
        }
      }
  }
}

// The other ranks make as many calls together in a step that fails as in any other.
TEST(RanksBesideWorkers, GoOnWithZerosToTheEndOfAStepThatFails) {
  Local local;
  auto worker = std::make_unique<WorkerThread>(served(kServedModel, "0-4"));
  const std::string address = worker->address();
  Backbone backbone(local, {address}, {.patience = milliseconds(300)});
  const std::vector<bool> on_workers = {true, true, true, true, true, false, false, false};
  const ExpertOwners owners =
      owners_of(ranks_beside_workers(in_both_layers(on_workers), 2), served_config(), 2);
  RankExperts pool(
      {.owners = owners, .rank = 0, .mine = local.experts, .workers = &backbone.pool()});
  Inputs inputs(9, local.dim, 3);
  const auto sums = [&](int layer) {
    std::vector<float> y(inputs.n * local.dim, 0.5f);
    pool.add_to(pool.submit(inputs.batch(layer)), {y.data(), inputs.n, local.dim, local.dim});
    return y;
  };
  std::vector<Shard> mine = backbone.shards();
  mine.back().experts.assign(3, {5, 7});
  pool.begin_step({}, 1);
  EXPECT_EQ(sums(1), local.sums(inputs, 1, mine));
  pool.end_step({}, {});
  worker.reset();
  for (int round = 0; round < 2; ++round) {
    pool.begin_step({}, 1);
    const std::vector<float> zeros(inputs.n * local.dim, 0.5f);
    EXPECT_EQ(sums(1), zeros);
    const auto begin = Clock::now();
    EXPECT_EQ(sums(2), zeros);
    EXPECT_LT(Clock::now() - begin, milliseconds(200)) << "it does not wait again";
    EXPECT_TRUE(says(error_of([&] { pool.end_step({}, {}); }),
                     "experts 0-4 have had no worker for 0.3 s: " + address));
  }
  worker = std::make_unique<WorkerThread>(served(kServedModel, "0-4"),
                                          ExpertServer::Options{.address = address});
  backbone.await(0, true);
  for (const int layer : {1, 2}) {
    pool.begin_step({}, 1);
    EXPECT_EQ(sums(layer), local.sums(inputs, layer, mine));
    pool.end_step({}, {});
  }
}

// A worker that computes for long is not lost, but ranks that compute the same step end when this
// one does not come.
TEST(RanksBesideWorkers, DoNotWaitLongerThanTheOtherRanks) {
  Local local;
  SlowWorker slow(milliseconds(1500));
  Backbone backbone(local, {slow.address()}, {.longest_wait = milliseconds(300)});
  Inputs inputs(3, local.dim, 1);
  const auto begin = Clock::now();
  EXPECT_EQ(error_of([&] { backbone.sums(inputs, 1); }),
            "experts 0-7 were not computed within 0.3 s, and other ranks wait no longer: " +
                slow.address() + ": give a larger --worker-patience");
  EXPECT_LT(Clock::now() - begin, milliseconds(1200));
  EXPECT_EQ(backbone.status(0).n_failures, 0) << "it was not lost";
}

// Other ranks still wait when a step fails for want of workers.
TEST(RanksBesideWorkers, WaitForEachOtherLongerThanForWorkers) {
  WorkerOptions workers;
  const std::chrono::duration<double> usual = std::chrono::seconds(20);
  workers.patience = std::chrono::seconds(300);
  EXPECT_EQ(rank_patience(workers, usual), usual) << "there are no workers";
  workers.addresses = {"a:1"};
  EXPECT_GT(rank_patience(workers, usual), longest_wait(workers));
  EXPECT_GT(longest_wait(workers), workers.patience);
  workers.patience = std::chrono::seconds(10);
  EXPECT_EQ(rank_patience(workers, usual), usual);
  EXPECT_GT(rank_patience(workers, std::chrono::seconds(12)), longest_wait(workers));
}

class RanksWithWorkers : public testing::TestWithParam<std::string> {};

TEST_P(RanksWithWorkers, GiveTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  // t1 has near ties between experts, which only float32 decides as the golden values do.
  const bool is_t1 = GetParam() == "t1";
  const auto isa = is_t1 ? std::optional(cpu::Isa::kReference) : std::nullopt;
  const int n_experts = ModelConfig::from_directory(directory).router.n_experts;
  if (n_experts == 0) GTEST_SKIP() << "there are no routed experts";
  const char* const length = golden.has("tokens_17") ? "17" : "5";
  const std::vector<int32_t> tokens = golden.ints(fmt::format("tokens_{}", length));
  const std::vector<float> want = golden.floats(fmt::format("logits_{}", length));
  const std::string first = fmt::format("0-{}", n_experts / 2 - 1),
                    last = fmt::format("{}-{}", n_experts / 2, n_experts - 1);
  for (const auto& division :
       std::vector<std::vector<std::string>>{{"auto"}, {first, last}, {first}, {last}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    LoadedExpertsOptions of_worker = served(directory, "");
    of_worker.isa = isa;
    const Workers workers(of_worker, division);
    ModelOptions options = {.directory = directory, .isa = isa, .context = 256, .max_logits = 64};
    options.workers.addresses = workers.addresses;
    for (const int n_ranks : {1, 2, 3}) {
      SCOPED_TRACE(n_ranks);
      std::vector<std::vector<float>> of_rank(n_ranks);
      std::vector<WorkerStatus> used;
      run_local_ranks({n_ranks}, [&](Group& group) {
        LoadedModel loaded(on_rank(options, group));
        const auto n_rows = std::ssize(want) / loaded.config().vocab;
        score(loaded.model(), loaded.cache(), tokens, std::ssize(tokens) - n_rows,
              [&](int64_t, std::span<const float> row) {
                std::vector<float>& all = of_rank[group.rank()];
                all.insert(all.end(), row.begin(), row.end());
              });
        if (group.rank() == 0) used = loaded.model().workers();
      });
      expect_close(of_rank[0], want, (is_t1 ? 2e-4 : 3e-2) * largest(want));
      for (int rank = 1; rank < n_ranks; ++rank) EXPECT_EQ(of_rank[rank], of_rank[0]) << rank;
      ASSERT_EQ(used.size(), division.size());
      expect_all_used(used);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RanksWithWorkers, testing::ValuesIn(golden_families(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// Prompts are cut into micro-batches. With one form of attention no bit changes.
TEST(WorkersOfRanks, GiveTheSameBitsInMicroBatches) {
  std::vector<int32_t> tokens(40);
  for (int i = 0; i < 40; ++i) tokens[i] = (i * 37 + 5) % 120;
  for (const auto& division :
       std::vector<std::vector<std::string>>{{"auto"}, {"0-4", "5-7"}, {"3-7"}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    const Workers workers(served(kServedModel, ""), division);
    ModelOptions options = {.directory = kServedModel,
                            .context = 256,
                            .max_logits = 64,
                            .attention = AttentionForm::kAbsorbed};
    options.workers.addresses = workers.addresses;
    Logits whole;
    for (const int n : {1, 2, 4, 0}) {
      options.micro_batches = n;
      on_ranks_of_backbone(3, options, [&](const ModelOptions& of_rank) {
        LoadedModel loaded(of_rank);
        const Logits logits = logits_after(loaded, tokens);
        if (n == 1) whole = logits;
        EXPECT_EQ(logits, whole) << n;
        if (n > 0 && division[0] == "auto") {
          EXPECT_EQ(loaded.model().workers()[0].n_requests, 2 * n) << "of two layers";
        }
        // With numbers that are measured, some steps are tried in micro-batches.
        for (int i = 0; n == 0 && i < 20; ++i) EXPECT_EQ(logits_after(loaded, tokens), whole) << i;
      });
    }
  }
}

// Steps in which the first rank waits for workers are tried in micro-batches.
TEST(WorkersOfRanks, DivideStepsAsMeasured) {
  constexpr int kSteps = 20;
  SlowWorker worker(milliseconds(1));
  ModelOptions options = {.directory = kServedModel, .context = 64, .max_logits = 64};
  options.workers.addresses = {worker.address()};
  const std::vector<int32_t> tokens(40, 5);
  on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
    LoadedModel loaded(of_rank);
    for (int i = 0; i < kSteps; ++i)
      score(loaded.model(), loaded.cache(), tokens, 39, [](int64_t, std::span<const float>) {});
    EXPECT_GT(loaded.model().workers()[0].n_requests, 2 * kSteps);
  });
}

// Decode steps of several sequences and prompts beside them, while one of two owners after the
// other is lost and comes back.
TEST(WorkersOfRanks, AnswerWhoeverComputes) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.attention = AttentionForm::kAbsorbed;
  const std::vector<std::vector<int32_t>> want = answers(options, 6);
  Workers workers(served(kTinyR1, ""), {"2-11", "2-11"});
  options.workers.addresses = workers.addresses;
  for (const int micro_batches : {1, 2, 0}) {
    options.micro_batches = micro_batches;
    while_owners_change(workers, served(kTinyR1, "2-11"), [&] {
      for (int i = 0; i < 4; ++i)
        on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
          EXPECT_EQ(answers(of_rank, 6), want) << micro_batches;
        });
      return 0;
    });
  }
}

TEST(WorkersOfRanks, AnEngineGoesOnAfterAFailedStep) {
  for (const DraftChoice draft : {DraftChoice::kOff, DraftChoice::kMtp})
    for (const int micro_batches : {1, 2}) {
      ModelOptions options = tiny_r1(DeviceChoice::kCpu);
      options.draft = draft;
      options.max_logits = 8;
      options.micro_batches = micro_batches;
      ModelOptions alone = options;
      alone.micro_batches = 0;
      const std::vector<std::vector<int32_t>> want = answers(alone, 4);
      on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
        expect_answers_after_failed_steps(of_rank, want);
      });
    }
}

// The same tokens as of one process, of which as many were drafted.
TEST(WorkersOfRanks, DraftWithTheLayerForIt) {
  ModelOptions options = drafting(kTinyR1);
  options.max_logits = 32;
  options.draft_tokens = 2;
  const Drafted want = drafted(options);
  EXPECT_GT(want.n_accepted, 30);
  for (const auto& division : std::vector<std::vector<std::string>>{{"auto"}, {"0-7", "8-13"}}) {
    const Workers workers(with_mtp(kTinyR1, ""), division);
    options.workers.addresses = workers.addresses;
    on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
      const Drafted got = drafted(of_rank);
      EXPECT_EQ(got.tokens, want.tokens);
      EXPECT_EQ(got.n_accepted, want.n_accepted);
      EXPECT_EQ(got.n_rejected, want.n_rejected);
    });
  }
}

// All ranks agree on it, although only the first one knows the workers.
TEST(WorkersOfRanks, LookDraftsUpWhereAWorkerLacksTheLayer) {
  const Workers workers(with_mtp(kTinyR1, ""), {"0-7", "8-15"});
  const WorkerThread without(served(kTinyR1, "8-15"));
  for (const bool all_have : {true, false}) {
    ModelOptions options = drafting(kTinyR1);
    options.workers.addresses = {workers.addresses[0],
                                 all_have ? workers.addresses[1] : without.address()};
    options.draft = DraftChoice::kAuto;
    options.largest_mtp_share = 1;
    Lines notes;
    options.note = notes.sink();
    std::atomic<int> n_with_layer = 0;
    run_local_ranks({2}, [&](Group& group) {
      n_with_layer +=
          LoadedModel(on_rank(options, group)).drafting().source == Drafting::Source::kMtp;
    });
    EXPECT_EQ(n_with_layer, all_have ? 2 : 0);
    EXPECT_EQ(notes.count("drafts are looked up in the text: the worker " + without.address()),
              all_have ? 0 : 1);
    options.draft = DraftChoice::kMtp;
    if (!all_have) {
      EXPECT_TRUE(says(refusal_of_ranks(2, [&](int) { return options; }),
                       "--draft mtp: the worker " + without.address()));
    }
  }
}

// Two workers of the embedded model whose experts move. The ranks have the last four experts.
struct MovingWorkers : Workers {
  MovingWorkers() : Workers(options(), {"0-5", "6-11"}) {}
  static LoadedExpertsOptions options() {
    LoadedExpertsOptions of_worker = served(kTinyR1, "");
    of_worker.moves_experts = true;
    return of_worker;
  }
  ModelOptions of_backbone() const {
    ModelOptions options = that_moves(tiny_r1(DeviceChoice::kCpu));
    options.max_logits = 8;
    options.workers.addresses = addresses;
    options.workers.deadline = milliseconds(1500);  // a busy machine is no lost worker
    return options;
  }
};

void submit_question(Engine& engine, const Request& question, std::vector<int32_t>& tokens) {
  EngineRequest request;
  request.request = question;
  request.on_event = [&tokens](const TokenEvent& event) {
    if (event.token) tokens.push_back(*event.token);
    EXPECT_EQ(event.error, "");
    return true;
  };
  engine.submit(std::move(request));
}

TEST(WorkersOfRanks, AnswersStayWhileExpertsMove) {
  constexpr int kAnswers = 8;
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), kAnswers);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> asked = questions(kTinyR1, tokenizer, kAnswers);
  for (const int micro_batches : {1, 2}) {
    MovingWorkers workers;
    ModelOptions options = workers.of_backbone();
    options.micro_batches = micro_batches;
    on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
      LoadedModel loaded(of_rank);
      EXPECT_EQ(loaded.expert_homes().n_ranks, 3) << "the backbone and two workers";
      EXPECT_EQ(loaded.expert_homes().ranks[1][15], std::vector<int>{0});
      bool loses = false;
      Engine engine = moving_engine(
          loaded, {.plan = [&, plan = random_plan(7)](const auto& uses, const auto& homes) {
            if (loses) {
              workers.threads[1].reset();
              while (loaded.model().workers()[1].is_up)
                std::this_thread::sleep_for(milliseconds(5));
            }
            return plan(uses, homes);
          }});
      int64_t n_moved = 0;
      for (int round = 0; round < 3; ++round) {
        std::vector<std::vector<int32_t>> got(kAnswers);
        for (int i = 0; i < kAnswers; ++i) submit_question(engine, asked[i], got[i]);
        for (int i = 0; i < 10; ++i) step_or_wait(engine);
        n_moved += move_now(engine);
        EXPECT_EQ(got, want);
      }
      EXPECT_GT(n_moved, 0);
      loses = true;
      ASSERT_TRUE(engine.rebalance());
      run_to_end(engine);
      EXPECT_EQ(engine.rebalance_report().state, RebalanceReport::State::kFailed);
      EXPECT_EQ(engine.rebalance_report().error, "worker " + workers.addresses[1] + " was lost");
    });
  }
}

// Says that everything is loaded, and then that a worker was lost.
class LosesAWorker final : public ExpertMover {
 public:
  void load(std::span<const ExpertChange>) override { status_.state = MoveStatus::State::kLoaded; }
  MoveStatus status() const override { return status_; }
  void move() override {
    status_.state = MoveStatus::State::kFailed;
    std::strcpy(status_.why.data(), "a worker was lost");
  }
  void keep() override { status_ = {}; }

 private:
  MoveStatus status_;
};

TEST(WorkersOfRanks, AMoveThatFailsOnTheFirstRankHasNotMovedAnything) {
  const MovingWorkers workers;
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  on_ranks_of_backbone(2, workers.of_backbone(), [&](const ModelOptions& of_rank) {
    LosesAWorker mover;
    LoadedModel loaded(of_rank);
    loaded.model().use(&mover);
    Engine engine = moving_engine(loaded, {.plan = random_plan(7)});
    std::vector<int32_t> tokens;
    submit_question(engine, questions(kTinyR1, tokenizer, 1)[0], tokens);
    run_to_end(engine);
    ASSERT_TRUE(engine.rebalance());
    run_to_end(engine);
    const RebalanceReport report = engine.rebalance_report();
    EXPECT_EQ(report.state, RebalanceReport::State::kFailed);
    EXPECT_EQ(report.error, "a worker was lost");
    EXPECT_EQ(report.n_waves_moved, 0);
    EXPECT_EQ(engine.expert_homes()->ranks, loaded.expert_homes().ranks);
  });
}

// Of eight experts workers have four, whichever these are, and each rank reads two of the others.
TEST(WorkersOfRanks, ReadOnlyTheirParts) {
  const auto bytes_of_ranks = [&](const std::vector<std::string>& addresses) {
    ModelOptions options = {.directory = kServedModel, .context = 64};
    options.workers.addresses = addresses;
    std::vector<int64_t> bytes(2);
    run_local_ranks({2}, [&](Group& group) {
      bytes[group.rank()] = LoadedModel(on_rank(options, group)).load_report().bytes;
    });
    return bytes;
  };
  const int64_t of_two = LoadedExperts(served(kServedModel, "0-1")).load_report().bytes;
  const std::vector<int64_t> all = bytes_of_ranks({});
  for (const char* experts : {"0-3", "4-7", "0,2,4,6", "1,3,5,7"}) {
    const Workers workers(served(kServedModel, ""), {experts});
    const std::vector<int64_t> bytes = bytes_of_ranks(workers.addresses);
    EXPECT_EQ(bytes[0], all[0] - of_two) << experts;
    EXPECT_EQ(bytes[1], all[1] - of_two) << experts;
  }
  const Workers workers(served(kServedModel, ""), {"auto"});
  const std::vector<int64_t> none = bytes_of_ranks(workers.addresses);
  EXPECT_EQ(none[0], all[0] - 2 * of_two);
  EXPECT_EQ(none[1], all[1] - 2 * of_two);
}

TEST(WorkersOfRanks, AreRefused) {
  LoadedExpertsOptions few_rows = served(kServedModel, "auto");
  few_rows.max_rows = 4;
  const WorkerThread worker(served(kServedModel, "0-3")), small(few_rows);
  const auto with = [&](auto change) {
    return refusal_of_ranks(4, [&](int) {
      ModelOptions options = {.directory = kServedModel, .context = 64};
      options.workers.addresses = {worker.address()};
      options.workers.patience = milliseconds(300);
      change(options);
      return options;
    });
  };
  EXPECT_EQ(with([](ModelOptions& o) { o.n_stages = 2; }),
            "--workers and --pp 2: pipeline stages have no workers: leave one of them out");
  EXPECT_EQ(
      with([](ModelOptions& o) { o.tp = 2; }),
      "--workers: ranks use workers where all 4 divide one backbone, or with --dp 4 where each has "
      "a replica: leave --workers, or --tp 2, out");
  EXPECT_TRUE(says(with([](ModelOptions& o) { o.placement = "none.json"; }),
                   "--workers and --placement none.json: several ranks do not use"));
  EXPECT_TRUE(says(with([](ModelOptions& o) { o.dispatch = ExpertDispatch::kAllToAll; }),
                   "--ep-dispatch all-to-all: ranks with workers exchange no rows"));
  EXPECT_EQ(with([](ModelOptions& o) { o.rows = ExpertRows::kFp8; }),
            "--ep-rows fp8: ranks with workers exchange no rows: leave it or --workers out");
  // What only the first rank finds.
  EXPECT_TRUE(says(with([](ModelOptions& o) { o.moves_experts = true; }),
                   "--rebalance: experts move between two or more workers"));
  EXPECT_TRUE(says(with([](ModelOptions& o) { o.workers.addresses = {"127.0.0.1:1"}; }),
                   "does not answer: Connection refused"));
  EXPECT_TRUE(says(with([](ModelOptions& o) { o.directory = kGolden + "v3_bf16"; }),
                   "has another model than"));
  EXPECT_TRUE(says(with([&](ModelOptions& o) { o.workers.addresses = {small.address()}; }),
                   "takes 4 rows: start it with --chunk"));
}

// The first rank's file alone is looked at.
TEST(WorkersOfRanks, ComeAndGo) {
  const WorkerThread first(served(kServedModel, "0-3")), second(served(kServedModel, "0-3"));
  const TempDirectory folder;
  const std::string file = folder.file("workers");
  std::ofstream(file) << first.address() << "\n";
  Lines notes;
  ModelOptions options = {.directory = kServedModel, .context = 64};
  options.max_logits = 64;
  options.note = notes.sink();
  options.workers.file = file;
  options.workers.list_period = milliseconds(5);
  run_local_ranks({2}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    ModelOptions mine = on_rank(options, group, &steps);
    if (group.rank() > 0) mine.workers.file = "/none";
    LoadedModel loaded(mine);
    if (group.rank() > 0) return steps.follow();
    const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6};
    const Logits want = logits_after(loaded, tokens);
    std::ofstream(file, std::ios::app) << second.address() << "\n";
    notes.await("worker " + second.address() + " is up");
    for (int i = 0; i < 4; ++i) EXPECT_EQ(logits_after(loaded, tokens), want);
    const std::vector<WorkerStatus> workers = loaded.model().workers();
    ASSERT_EQ(workers.size(), 2u);
    for (const WorkerStatus& worker : workers) EXPECT_GT(worker.n_requests, 0) << worker.address;
    steps.end();
  });
  EXPECT_EQ(notes.count("experts 4-7: the ranks"), 1);
}

}  // namespace
}  // namespace tandem::test
