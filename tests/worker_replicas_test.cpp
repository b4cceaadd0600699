// Replicas of a backbone that have links of their own to expert workers; ranks are threads here.
// What they answer while workers are lost, what all learn of a step that fails on one, and what is
// refused.
#include <condition_variable>
#include <fstream>

#include "engine/engine.h"
#include "offload/ranks/replica_experts.h"
#include "tests/error_of.h"
#include "tests/rank_grids.h"
#include "tests/temp_directory.h"
#include "tests/whole_models.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

// Counts the calls, adds 1 to sums, and fails in the layer that is to fail.
class CountingPool final : public ExpertPool {
 public:
  int n_begun = 0, n_submitted = 0, n_added = 0, failing_layer = -1;

  bool waits(Ticket) override { return false; }
  void add_to(Ticket, TensorView y) override {
    ++n_added;
    if (layer_ == failing_layer) throw StepFailed(fmt::format("layer {} fails", layer_));
    for (int64_t i = 0; i < y.rows; ++i) *y.row<float>(i) += 1;
  }
  void begin_step(std::span<const Batch>, int) override { ++n_begun; }
  int micro_batches(std::span<const Batch>, bool) const override { return 3; }
  std::optional<double> seconds_waited() const override { return 0.5; }

 private:
  Ticket start(const ExpertBatch& batch) override {
    ++n_submitted;
    layer_ = batch.layer;
    return batch.micro_batch;
  }
  int layer_ = -1;
};

// Two layers of a step with n tokens; the value to which both have added.
float two_layers(ReplicaExperts& pool, int n_tokens) {
  float y = 0;
  const TensorView rows = {n_tokens > 0 ? &y : nullptr, n_tokens, 1, 1};
  pool.begin_step({}, 1);
  for (const int layer : {1, 2})
    pool.add_to(pool.submit({.layer = layer, .x = rows, .routing = {}}), rows);
  return y;
}

TEST(ReplicasWithWorkers, AskNoWorkerWithoutTokens) {
  run_local_ranks({2}, [](Group& group) {
    CountingPool workers;
    ReplicaExperts pool(group, workers);
    EXPECT_EQ(pool.micro_batches({}, true), 3);
    int n_submitted = 0;
    for (int step = 1; step <= 4; ++step) {
      const bool is_idle = (step + group.rank()) % 2 == 0;  // ranks take turns
      n_submitted += is_idle ? 0 : 2;
      EXPECT_EQ(two_layers(pool, is_idle ? 0 : 1), is_idle ? 0 : 2);
      pool.end_step({}, {});
      EXPECT_EQ(workers.n_begun, step) << "workers come and go between steps";
      EXPECT_EQ(workers.n_submitted, n_submitted);
      EXPECT_EQ(workers.n_added, n_submitted);
      EXPECT_EQ(pool.seconds_waited().has_value(), !is_idle);
    }
  });
}

// Whichever rank fails, rank 0 alone throws, all make the same calls, and the next step succeeds.
TEST(ReplicasWithWorkers, AllLearnThatAStepHasFailedOnOne) {
  for (const int failing : {0, 1, 2}) {
    SCOPED_TRACE(failing);
    run_local_ranks({3}, [&](Group& group) {
      CountingPool workers;
      ReplicaExperts pool(group, workers);
      workers.failing_layer = group.rank() == failing ? 1 : -1;
      EXPECT_EQ(two_layers(pool, 1), group.rank() == failing ? 0 : 2);
      EXPECT_EQ(workers.n_submitted, group.rank() == failing ? 1 : 2) << "no more of that step";
      if (group.rank() == 0) {
        EXPECT_EQ(error_of([&] { pool.end_step({}, {}); }), "layer 1 fails");
      } else {
        pool.end_step({}, {});
      }
      workers.failing_layer = -1;
      EXPECT_EQ(two_layers(pool, 1), 2);
      pool.end_step({}, {});
    });
  }
}

// The pool of a GPU goes on with a step that has failed, and says so when it ends: the same holds.
TEST(ReplicasWithWorkers, AllLearnThatAStepHasFailedAtItsEnd) {
  struct FailingAtTheEnd final : ExpertPool {
    bool fails = false;
    int n_followed = 0;
    void add_to(Ticket, TensorView) override {}
    void follow(LayerRange, const MicroBatches&) override { ++n_followed; }
    void end_step(LayerRange, const MicroBatches&) override {
      if (fails) throw StepFailed("it has failed before");
    }
    Ticket start(const ExpertBatch&) override { return 0; }
  };
  run_local_ranks({2}, [](Group& group) {
    FailingAtTheEnd mine;
    ReplicaExperts pool(group, mine);
    for (const bool fails : {true, false}) {
      mine.fails = fails && group.rank() == 1;
      const bool has_tokens = (group.rank() == 1) == fails;
      const int32_t token = 0;
      const Batch batch = {std::span(&token, has_tokens ? 1 : 0), {}, {}, {}};
      pool.begin_step({}, 1);
      pool.follow({}, {{batch}, 1});
      EXPECT_EQ(error_of([&] { pool.end_step({}, {}); }),
                fails && group.rank() == 0 ? "it has failed before" : "no error");
    }
    EXPECT_EQ(mine.n_followed, 1) << "only with tokens";
  });
}

// A step that stands still has no events; between steps there is no work, however long others
// compute.
TEST(ReplicasWithWorkers, SayThatAStepGetsOn) {
  run_local_ranks({2}, [](Group& group) {
    CountingPool workers;
    ReplicaExperts pool(group, workers);
    EXPECT_FALSE(pool.progress().has_work);
    pool.begin_step({}, 1);
    uint64_t events = pool.progress().events;
    EXPECT_TRUE(pool.progress().has_work);
    float y = 0;
    const TensorView rows = {&y, 1, 1, 1};
    for (const int layer : {1, 2}) {
      const Ticket ticket = pool.submit({.layer = layer, .x = rows, .routing = {}});
      EXPECT_NE(std::exchange(events, pool.progress().events), pool.progress().events);
      pool.add_to(ticket, rows);
      EXPECT_NE(std::exchange(events, pool.progress().events), pool.progress().events);
    }
    EXPECT_TRUE(pool.progress().has_work);
    if (group.rank() == 0) {
      std::thread other([&] {
        for (int i = 0; i < 1000 && pool.progress().has_work; ++i)
          std::this_thread::sleep_for(milliseconds(5));
        EXPECT_FALSE(pool.progress().has_work) << "it waits for the other rank";
        std::this_thread::sleep_for(milliseconds(50));
      });
      pool.end_step({}, {});
      other.join();
    } else {
      std::this_thread::sleep_for(milliseconds(300));
      EXPECT_TRUE(pool.progress().has_work);
      pool.end_step({}, {});
    }
  });
}

WorkerStatus status_of(const std::string& address, int64_t n) {
  return {.address = address,
          .is_up = n % 2 == 0,
          .has_joined = n % 3 == 0,
          .is_standby = n % 5 == 0,
          .n_experts = n,
          .n_on_gpu = n + 1,
          .is_loading = n % 7 == 0,
          .n_requests = n + 2,
          .n_failures = n + 3,
          .seconds = 0.5 * static_cast<double>(n)};
}

// Ranks may have different numbers of links.
TEST(ReplicasWithWorkers, TellOfTheirLinks) {
  struct Linked final : ExpertPool {
    std::vector<WorkerStatus> links;
    void add_to(Ticket, TensorView) override {}
    std::vector<WorkerStatus> workers() const override { return links; }
    Ticket start(const ExpertBatch&) override { return 0; }
  };
  run_local_ranks({3}, [](Group& group) {
    const auto links_of = [](int rank) {
      std::vector<WorkerStatus> links;
      for (int i = 0; i <= rank; ++i)
        links.push_back(status_of(std::string(100 * (rank + i), 'h') + ":1", 10 * rank + i));
      return links;
    };
    Linked mine;
    mine.links = links_of(group.rank());
    ReplicaExperts pool(group, mine);
    EXPECT_EQ(pool.workers().size(), mine.links.size()) << "nothing was heard";
    std::vector<std::string> told(3);
    for (int rank = 0; rank < 3; ++rank) {
      Linked other;
      other.links = links_of(rank);
      told[rank] = rank == group.rank() ? "own" : ReplicaExperts(group, other).told();
    }
    for (int round = 0; round < 2; ++round) {
      pool.hear(told);
      const std::vector<WorkerStatus> all = pool.workers();
      ASSERT_EQ(all.size(), 6u);
      for (int rank = 0, at = 0; rank < 3; ++rank)
        for (WorkerStatus want : links_of(rank)) {
          want.replica = rank;
          want.address.resize(
              std::min<size_t>(want.address.size(), rank == group.rank() ? 500 : 263));
          EXPECT_EQ(all[at++], want) << rank;
        }
    }
    told[(group.rank() + 1) % 3].clear();
    pool.hear(told);
    EXPECT_EQ(pool.workers().size(), 6u - ((group.rank() + 1) % 3 + 1)) << "its links are gone";
  });
}

// Several ranks may fail: the first one's error counts, and a long one is cut.
TEST(ReplicasWithWorkers, TellTheFirstError) {
  struct Failing final : ExpertPool {
    std::string why;
    void add_to(Ticket, TensorView) override { throw StepFailed(why); }
    Ticket start(const ExpertBatch&) override { return 0; }
  };
  run_local_ranks({3}, [](Group& group) {
    CountingPool sound;
    Failing fails;
    fails.why = std::string(2000, static_cast<char>('a' + group.rank()));
    ReplicaExperts pool(group, group.rank() == 0 ? static_cast<ExpertPool&>(sound) : fails);
    two_layers(pool, 1);
    const std::string said = error_of([&] { pool.end_step({}, {}); });
    EXPECT_EQ(said, group.rank() == 0 ? std::string(959, 'b') : "no error");
  });
}

ModelOptions replicas(ModelOptions options, int n) {
  options.n_replicas = n;
  return options;
}

// Prompts and decode steps, while one of two owners after the other is lost and comes back.
TEST(WorkersOfReplicas, AnswerWhoeverComputes) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.attention = AttentionForm::kAbsorbed;
  const std::vector<std::vector<int32_t>> want = answers(options, 6);
  Workers workers(served(kTinyR1, ""), {"auto", "auto"});
  options = replicas(options, 2);
  options.workers.addresses = workers.addresses;
  for (const int micro_batches : {1, 2, 0}) {
    options.micro_batches = micro_batches;
    while_owners_change(workers, served(kTinyR1, "auto"), [&] {
      for (int i = 0; i < 3; ++i)
        on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
          EXPECT_EQ(answers(of_rank, 6), want) << micro_batches;
        });
      return 0;
    });
  }
}

// As many replicas as there are requests, also of experts that are divided among workers, and where
// replicas compute those that no worker has.
TEST(WorkersOfReplicas, GiveTheTokensOfOneProcess) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.attention = AttentionForm::kAbsorbed;
  const std::vector<std::vector<int32_t>> want = answers(options, 5);
  for (const auto& division : std::vector<std::vector<std::string>>{
           {"auto"}, {"0-7", "8-15"}, {"0-9", "4-15"}, {"5-11"}}) {
    const Workers workers(served(kTinyR1, ""), division);
    for (const int n : {2, 3}) {
      ModelOptions mine = replicas(options, n);
      mine.workers.addresses = workers.addresses;
      on_ranks_of_backbone(
          n, mine, [&](const ModelOptions& of_rank) { EXPECT_EQ(answers(of_rank, 5), want) << n; });
    }
  }
}

// The requests of a step fail on all replicas while no worker is there, and later ones are
// answered.
TEST(WorkersOfReplicas, AnEngineGoesOnAfterAFailedStep) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.max_logits = 8;
  expect_replicas_answer_after_failed_steps(options, "0-15", answers(options, 4));
}

// A rank reads no expert that a worker has, and each of the others.
TEST(WorkersOfReplicas, ReadTheBackbone) {
  for (const char* experts : {"auto", "2-6"}) {
    const Workers workers(served(kServedModel, ""), {experts});
    const int64_t of_experts = LoadedExperts(served(kServedModel, experts)).load_report().bytes;
    const int64_t of_all =
        LoadedModel({.directory = kServedModel, .context = 64}).load_report().bytes;
    ModelOptions options = replicas({.directory = kServedModel, .context = 64}, 2);
    options.workers.addresses = workers.addresses;
    run_local_ranks({2}, [&](Group& group) {
      StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
      const LoadedModel loaded(on_rank(options, group, &steps));
      EXPECT_EQ(loaded.load_report().bytes, of_all - of_experts) << group.rank();
      if (!steps.leads()) return steps.follow();
      steps.end();
    });
  }
}

// The same tokens as of one process. Which sequences share a step, and so what is drafted, differs.
TEST(WorkersOfReplicas, DraftWithTheLayerForIt) {
  ModelOptions options = drafting(kTinyR1);
  options.max_logits = 32;
  options.draft_tokens = 2;
  const Drafted want = drafted(options);
  EXPECT_GT(want.n_accepted, 30);
  const Workers workers(with_mtp(kTinyR1, ""), {"0-7", "8-15"});
  options.workers.addresses = workers.addresses;
  on_ranks_of_backbone(2, replicas(options, 2), [&](const ModelOptions& of_rank) {
    const Drafted got = drafted(of_rank);
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_GT(got.n_accepted, 30);
  });
}

// Each rank follows the list of its own file.
TEST(WorkersOfReplicas, ComeAndGo) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.attention = AttentionForm::kAbsorbed;
  const std::vector<std::vector<int32_t>> want = answers(options, 4);
  std::optional<WorkerThread> first(std::in_place, served(kTinyR1, "auto"));
  const WorkerThread second(served(kTinyR1, "auto"));
  const TempDirectory folder;
  const std::string file = folder.file("workers");
  std::ofstream(file) << first->address() << "\n";
  options = replicas(options, 2);
  options.workers.file = file;
  options.workers.list_period = milliseconds(5);
  std::vector<Lines> notes(2);
  run_local_ranks({2}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    ModelOptions mine = on_rank(options, group, &steps);
    mine.note = notes[group.rank()].sink();
    LoadedModel loaded(mine);
    if (!steps.leads()) return steps.follow();
    const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
    Engine engine = engine_for(loaded, tokenizer);
    std::ofstream(file, std::ios::app) << second.address() << "\n";
    for (Lines& of_rank : notes) of_rank.await("worker " + second.address() + " is up");
    first.reset();
    const auto got = complete(engine, questions(kTinyR1, tokenizer, 4));
    for (size_t i = 0; i < want.size(); ++i)
      EXPECT_EQ(got[i].tokens, want[i]) << "the newcomer computes for both";
    steps.end();
  });
}

TEST(WorkersOfReplicas, AreRefused) {
  const WorkerThread some(served(kServedModel, "0-3,6")), all(served(kServedModel, "auto"));
  const auto with = [&](auto change) {
    return refusal_of_ranks(2, [&](int rank) {
      ModelOptions options = replicas({.directory = kServedModel, .context = 64}, 2);
      options.workers.addresses = {all.address()};
      options.workers.patience = milliseconds(300);
      change(options, rank);
      return options;
    });
  };
  EXPECT_EQ(with([&](ModelOptions& o, int) { o.n_replicas = 4; }),
            "--workers and --dp 4: each of the 2 ranks has a replica of the backbone and links to "
            "the workers: ask for --dp 2 without --tp, or leave --workers or --dp out");
  EXPECT_TRUE(says(with([&](ModelOptions& o, int) { o.tp = 2; }), "--workers and --dp 2: each of"));
  EXPECT_EQ(with([&](ModelOptions& o, int) { o.n_stages = 2; }),
            "--workers and --pp 2: pipeline stages have no workers: leave one of them out");
  for (const ExpertDispatch dispatch : {ExpertDispatch::kAllReduce, ExpertDispatch::kGather})
    EXPECT_TRUE(says(with([&](ModelOptions& o, int) { o.dispatch = dispatch; }),
                     "ranks with workers exchange no rows: leave it or --workers out"));
  EXPECT_TRUE(says(with([&](ModelOptions& o, int) { o.moves_experts = true; }),
                   "--rebalance, --workers and --dp 2: experts move between the workers of one"));
  EXPECT_TRUE(says(with([&](ModelOptions& o, int rank) {
                     if (rank == 1) o.workers.addresses.push_back(some.address());
                   }),
                   "the list of workers of rank 1 differs from that of rank 0"));
  EXPECT_TRUE(says(with([&](ModelOptions& o, int rank) {
                     if (rank == 1) o.workers.addresses = {"127.0.0.1:1"};
                   }),
                   "does not answer: Connection refused"));
}

}  // namespace
}  // namespace tandem::test
