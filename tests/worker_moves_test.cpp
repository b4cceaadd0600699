// Experts that move between running workers: before and after every move sums have the bits of one
// process that adds up the same shards, also while a worker is lost. What one backbone gives away
// stays as long as another one uses it.
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "offload/workers/standby_loads.h"
#include "offload/workers/worker_move.h"
#include "tests/error_of.h"
#include "tests/expert_moves.h"
#include "tests/temp_directory.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

LoadedExpertsOptions moving(const std::string& experts, const std::string& model = kServedModel) {
  LoadedExpertsOptions options = served(model, experts);
  options.moves_experts = true;
  return options;
}

// Workers that end are noticed at once, and a busy machine is not taken for a lost one.
constexpr milliseconds kPatientDeadline(1500);
Backbone::Options patient() { return {.deadline = kPatientDeadline}; }

// A change of layer 1 or 2 of the served model; workers are numbered from 1.
ExpertChange to_worker(int layer, int expert, int worker) { return {layer, expert, {worker}}; }

// Waits until the workers have loaded, and returns the state.
WorkerMoveState loaded(const Backbone& backbone, WorkerExperts& pool) {
  for (int i = 0; i < 4000 && pool.move_state().is_loading; ++i)
    std::this_thread::sleep_for(milliseconds(5));
  EXPECT_FALSE(pool.move_state().is_loading) << backbone.shards().size();
  return pool.move_state();
}

// Moves at once, which is to succeed.
void move(Backbone& backbone, const std::vector<ExpertChange>& changes) {
  WorkerExperts& pool = backbone.pool();
  pool.begin_move(pool.homes(), changes);
  const WorkerMoveState state = loaded(backbone, pool);
  ASSERT_EQ(state.why, "");
  EXPECT_GT(state.n_bytes, 0);
  ASSERT_EQ(pool.finish_move(), "");
}

// The state once nothing is loaded any more that says why the move cannot be made.
std::string why_not(Backbone& backbone) {
  WorkerExperts& pool = backbone.pool();
  std::string why = loaded(backbone, pool).why;
  EXPECT_EQ(pool.finish_move(), why);
  pool.give_up_move();
  return why;
}

const std::vector<ExpertChange> kSwap = {to_worker(1, 0, 2), to_worker(1, 5, 1)};
const std::vector<ExpertChange> kBack = {to_worker(1, 0, 1), to_worker(1, 5, 2)};

TEST(WorkerMoves, SumsAreThoseOfTheNewShards) {
  Local local;
  const Workers workers(moving(""), {"0-3", "4-7"});
  Backbone backbone(local, workers.addresses, patient());
  expect_right_sums(local, backbone, 1);
  const std::vector<std::vector<int>> before = backbone.shards()[0].experts;
  move(backbone, kSwap);
  ASSERT_EQ(backbone.shards().size(), 2u);
  EXPECT_EQ(backbone.shards()[0].experts[1], (std::vector<int>{1, 2, 3, 5}));
  EXPECT_EQ(backbone.shards()[1].experts[1], (std::vector<int>{0, 4, 6, 7}));
  EXPECT_EQ(backbone.shards()[0].experts[2], before[2]) << "in the other layer nothing moves";
  for (int i = 0; i < 5; ++i) expect_right_sums(local, backbone, 10 + i);
  // Room is for as many as a worker has of a layer, so it is used again and again.
  for (int i = 0; i < 10; ++i) {
    move(backbone, i % 2 == 0 ? kBack : kSwap);
    expect_right_sums(local, backbone, 20 + i);
  }
  EXPECT_EQ(backbone.status(0).n_failures + backbone.status(1).n_failures, 0);
}

// A wave gives every worker another half of each layer: all spare memory is used.
TEST(WorkerMoves, WholeLayersMove) {
  Local local;
  const Workers workers(moving(""), {"0-3", "4-7"});
  Backbone backbone(local, workers.addresses, patient());
  for (int round = 0; round < 4; ++round)
    for (const int layer : {1, 2}) {
      std::vector<ExpertChange> changes;
      for (int e = 0; e < kServedExperts; ++e)
        changes.push_back(to_worker(layer, e, (e < 4) == (round % 2 == 0) ? 2 : 1));
      move(backbone, changes);
      expect_right_sums(local, backbone, round * 2 + layer);
    }
}

// Experts of this process and of a worker without the option stay; an expert may have two owners.
TEST(WorkerMoves, OthersKeepTheirExperts) {
  Local local;
  const Workers workers(moving(""), {"0-1", "1-3"});
  WorkerThread fixed(served(kServedModel, "4-5"));
  Backbone backbone(local, {workers.addresses[0], fixed.address(), workers.addresses[1]},
                    patient());
  const WorkerHomes homes = backbone.pool().homes();
  EXPECT_EQ(homes.homes.fixed, (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(homes.homes.ranks[1][7], std::vector<int>{0}) << "this process";
  EXPECT_EQ(homes.homes.ranks[2][1], (std::vector<int>{1, 3}));
  EXPECT_TRUE(homes.homes.ranks[0].empty()) << "a dense layer";
  move(backbone, {{2, 1, {3}}, {2, 2, {1, 3}}});
  EXPECT_EQ(backbone.pool().homes().homes.ranks[2][2], (std::vector<int>{1, 3}));
  for (int i = 0; i < 5; ++i) expect_right_sums(local, backbone, i);
}

// The worker that comes back has its command line's experts, and is brought to what is needed.
TEST(WorkerMoves, AWorkerThatStartsAgainLoadsWhatHasComeToIt) {
  Local local;
  Workers workers(moving(""), {"0-3", "4-7"});
  Lines notes;
  Backbone backbone(local, workers.addresses, {.deadline = kPatientDeadline, .notes = &notes});
  std::vector<ExpertChange> all;
  for (const int layer : {1, 2})
    for (int e = 0; e < kServedExperts; ++e) all.push_back(to_worker(layer, e, e < 4 ? 2 : 1));
  move(backbone, {all.begin(), all.begin() + kServedExperts});
  move(backbone, {all.begin() + kServedExperts, all.end()});
  expect_right_sums(local, backbone, 1);
  for (int w = 0; w < 2; ++w) {
    workers.threads[w].reset();
    backbone.await(w, false);
    workers.threads[w] = std::make_unique<WorkerThread>(
        moving(w == 0 ? "0-3" : "4-7"), ExpertServer::Options{.address = workers.addresses[w]});
    expect_right_sums(local, backbone, 2 + w);  // the step waits meanwhile
  }
  notes.await("has loaded experts");
  move(backbone, kBack);
  expect_right_sums(local, backbone, 9);
}

// What one backbone gives away another one still uses, so its memory is not free.
TEST(WorkerMoves, AnotherBackboneKeepsWhatItUses) {
  Local local, other;
  const Workers workers(moving(""), {"0-3", "4-7"});
  Backbone a(local, workers.addresses, patient());
  {
    Backbone b(other, workers.addresses, patient());
    std::vector<ExpertChange> whole_layer, back;
    for (int e = 0; e < kServedExperts; ++e) {
      whole_layer.push_back(to_worker(1, e, e < 4 ? 2 : 1));
      back.push_back(to_worker(2, e, e < 4 ? 2 : 1));
    }
    move(a, whole_layer);
    for (int i = 0; i < 3; ++i) {
      expect_right_sums(local, a, i);
      expect_right_sums(other, b, i);
    }
    a.pool().begin_move(a.pool().homes(), back);
    EXPECT_TRUE(says(why_not(a), "the spare memory has no room for 4 experts"));
    expect_right_sums(local, a, 5);
    expect_right_sums(other, b, 5);
  }
  // Without it there is room again.
  for (int i = 0; i < 200; ++i) {
    a.pool().begin_move(a.pool().homes(), std::vector{to_worker(2, 0, 2), to_worker(2, 7, 1)});
    if (loaded(a, a.pool()).why.empty()) break;
    why_not(a);
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(a.pool().finish_move(), "");
  expect_right_sums(local, a, 6);
}

// A worker that has no room for what one backbone needs, because another one uses what left it, is
// asked again until it has.
TEST(WorkerMoves, AWorkerWithoutRoomIsAskedAgain) {
  Local local, other;
  Workers workers(moving(""), {"0-3", "4-7"});
  FaultyWorker proxy(workers.addresses[0]);
  Lines notes;
  Backbone a(local, {proxy.address(), workers.addresses[1]},
             {.deadline = kPatientDeadline, .notes = &notes});
  for (const int layer : {1, 2}) {
    std::vector<ExpertChange> changes;
    for (int e = 0; e < kServedExperts; ++e) changes.push_back(to_worker(layer, e, e < 4 ? 2 : 1));
    move(a, changes);
  }
  expect_right_sums(local, a, 2);
  proxy.set(FaultyWorker::Fault::kSilent);  // and so it is to those who connect
  workers.threads[0].reset();
  workers.threads[0] = std::make_unique<WorkerThread>(
      moving("0-3"), ExpertServer::Options{.address = workers.addresses[0]});
  std::optional<Backbone> b;
  b.emplace(other, workers.addresses, patient());
  proxy.set(FaultyWorker::Fault::kNone);
  notes.await("has no room for 8 experts");
  EXPECT_FALSE(a.status(0).is_up);
  b.reset();
  a.await(0, true);
  expect_right_sums(local, a, 3);
}

// What was loaded for a move that is given up makes room for the next one.
TEST(WorkerMoves, AMoveThatIsGivenUpLeavesRoom) {
  Local local;
  const Workers workers(moving(""), {"0-3", "4-7"});
  Backbone backbone(local, workers.addresses, patient());
  std::vector<ExpertChange> whole_layer;
  for (int e = 0; e < kServedExperts; ++e) whole_layer.push_back(to_worker(2, e, e < 4 ? 2 : 1));
  for (int i = 0; i < 6; ++i) {
    backbone.pool().begin_move(backbone.pool().homes(), whole_layer);
    if (i % 2 == 0) loaded(backbone, backbone.pool());
    backbone.pool().give_up_move();
    loaded(backbone, backbone.pool());
    expect_right_sums(local, backbone, i);
  }
  move(backbone, whole_layer);
  expect_right_sums(local, backbone, 7);
}

// The disk of a worker fails, and works again.
TEST(WorkerMoves, ALoadThatFailsLeavesEverythingAsItWas) {
  const TempDirectory dir;
  std::filesystem::copy(kServedModel, dir.file("model"));
  const std::string file = dir.file("model/model.safetensors");
  Local local;
  WorkerThread first(moving("0-3")), second(moving("4-7", dir.file("model")));
  Backbone backbone(local, {first.address(), second.address()}, patient());
  std::vector<ExpertChange> whole_layer;
  for (int e = 0; e < kServedExperts; ++e) whole_layer.push_back(to_worker(2, e, e < 4 ? 2 : 1));
  const auto size = std::filesystem::file_size(file);
  std::filesystem::resize_file(file, size - 100);
  for (int i = 0; i < 3; ++i) {
    backbone.pool().begin_move(backbone.pool().homes(), whole_layer);
    EXPECT_TRUE(
        says(why_not(backbone), "worker " + second.address() + " cannot load its experts: "));
    expect_right_sums(local, backbone, i);
  }
  std::filesystem::copy_file(kServedModel + "/model.safetensors", file,
                             std::filesystem::copy_options::overwrite_existing);
  move(backbone, whole_layer);
  expect_right_sums(local, backbone, 4);
}

TEST(WorkerMoves, AWorkerThatIsLostStopsTheMove) {
  Local local;
  Workers workers(moving(""), {"0-3", "4-7"});
  Backbone backbone(local, workers.addresses, patient());
  for (const bool after_loading : {false, true}) {
    backbone.pool().begin_move(backbone.pool().homes(), kSwap);
    if (after_loading) {
      EXPECT_EQ(loaded(backbone, backbone.pool()).why, "");
    }
    workers.threads[1].reset();
    backbone.await(1, false);
    EXPECT_EQ(why_not(backbone), "worker " + workers.addresses[1] + " was lost");
    workers.threads[1] = std::make_unique<WorkerThread>(
        moving("4-7"), ExpertServer::Options{.address = workers.addresses[1]});
    backbone.await(1, true);
    expect_right_sums(local, backbone, 3);
    EXPECT_EQ(backbone.shards()[0].experts[1], (std::vector<int>{0, 1, 2, 3}));
  }
  move(backbone, kSwap);
  expect_right_sums(local, backbone, 4);
}

// A standby takes over the shard of a worker that others' experts have come to.
TEST(WorkerMoves, AStandbyLoadsMovedShards) {
  Local local;
  Workers workers(moving(""), {"0-3", "4-7"});
  WorkerThread standby(served(kServedModel, std::string(kStandby)));
  Lines warnings;
  Backbone backbone(local, {workers.addresses[0], workers.addresses[1], standby.address()},
                    {.deadline = kPatientDeadline, .warnings = &warnings});
  move(backbone, kSwap);
  workers.threads[1].reset();
  for (int i = 0; i < 5; ++i) expect_right_sums(local, backbone, i);
  EXPECT_EQ(warnings.count("experts 0,4-7, not all in every layer have no worker that is up"), 1);
}

// Which experts may move, of whom.
TEST(WorkerMoves, HomesNameWhoMoves) {
  const auto worker = [](const std::string& address, std::vector<bool> experts, bool moves,
                         const std::string& arithmetic) {
    WorkerWelcome welcome = {
        .n_layers = 1, .experts = {std::move(experts)}, .arithmetic = arithmetic};
    return WorkerHomes::Worker{address, welcome, moves};
  };
  const WorkerHomes homes = worker_homes(
      {worker("a", {true, false, false}, false, "x"), worker("b", {true, true, false}, true, "y"),
       worker("c", {false, true, false}, true, "z"), worker("d", {false, true, false}, true, "y")},
      1);
  EXPECT_EQ(homes.homes.fixed, (std::vector<bool>{true, true, false, true, false}));
  EXPECT_EQ(homes.homes.ranks,
            (std::vector<std::vector<std::vector<int>>>{{{1, 2}, {2, 3, 4}, {0}}}));
  const WorkerMove move = worker_move(homes, std::vector<ExpertChange>{{0, 1, {2}}, {0, 2, {4}}});
  ASSERT_EQ(move.parts.size(), 2u);
  EXPECT_EQ(move.parts[0].address, "c");
  EXPECT_EQ(move.parts[0].leaving, (ExpertsOfLayers{{false, true, false}}));
  EXPECT_FALSE(has_any(move.parts[0].arriving));
  EXPECT_EQ(move.parts[1].address, "d");
  EXPECT_EQ(move.parts[1].arriving, (ExpertsOfLayers{{false, false, true}}));
  EXPECT_EQ(move.parts[1].leaving, (ExpertsOfLayers{{false, true, false}}));
}

// A backbone on a GPU has what is there, also where workers have it.
TEST(WorkerMoves, HomesNameWhatAGpuHas) {
  const auto worker = [](std::vector<bool> experts) {
    WorkerWelcome welcome = {.n_layers = 2, .experts = {{}, std::move(experts)}, .arithmetic = "x"};
    return WorkerHomes::Worker{"a", welcome, true};
  };
  ExpertHomes homes =
      worker_homes({worker({true, true, false, false}), worker({false, true, true, false})}, 2)
          .homes;
  const std::vector<std::vector<bool>> on_gpu = {{}, {true, true, false, false}};
  keep_on_gpu(on_gpu, homes);
  EXPECT_EQ(homes.on_gpu, on_gpu);
  EXPECT_EQ(homes.ranks, (std::vector<std::vector<std::vector<int>>>{{}, {{0}, {0}, {2}, {0}}}));
  keep_on_gpu({}, homes);
  EXPECT_TRUE(homes.on_gpu.empty()) << "the backbone is on the CPU";
}

// Engines.

ModelOptions with_workers(const std::vector<std::string>& addresses) {
  ModelOptions options = that_moves(tiny_r1(DeviceChoice::kCpu));
  options.workers.addresses = addresses;
  options.workers.deadline = kPatientDeadline;
  return options;
}

// Tokens of greedy answers stay while experts move.
TEST(WorkerMoves, AnswersAreThoseOfOneProcess) {
  constexpr int kAnswers = 8;
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), kAnswers);
  const Workers workers(moving("", kTinyR1), {"0-7", "8-15"});
  LoadedModel loaded(with_workers(workers.addresses));
  EXPECT_EQ(loaded.expert_homes().n_ranks, 3);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  Engine engine = moving_engine(loaded, {.plan = random_plan(7)});
  int64_t n_moved = 0;
  for (int round = 0; round < 4; ++round) {
    std::vector<std::vector<int32_t>> got;
    submit_all(engine, questions(kTinyR1, tokenizer, kAnswers), got);
    for (int i = 0; i < 10; ++i) step_or_wait(engine);
    n_moved += move_now(engine);
    EXPECT_EQ(got, want);
  }
  EXPECT_GT(n_moved, 0);
  EXPECT_EQ(engine.rebalance_report().error, "");
}

TEST(WorkerMoves, ARebalanceThatFailsSaysWhy) {
  Workers workers(moving("", kTinyR1), {"0-7", "8-15"});
  LoadedModel loaded(with_workers(workers.addresses));
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  // The workers are lost as soon as the plan is made.
  const auto plan = random_plan(7);
  Engine engine =
      moving_engine(loaded, {.plan = [&](const ExpertUses& uses, const ExpertHomes& homes) {
                      workers.threads[1].reset();
                      while (loaded.model().workers()[1].is_up)
                        std::this_thread::sleep_for(milliseconds(5));
                      return plan(uses, homes);
                    }});
  EngineRequest request;
  request.request = questions(kTinyR1, tokenizer, 1)[0];
  request.on_event = [](const TokenEvent&) { return true; };
  engine.submit(std::move(request));
  while (engine.expert_uses()->n_steps == 0) step_or_wait(engine);
  run_to_end(engine);
  ASSERT_TRUE(engine.rebalance());
  run_to_end(engine);
  EXPECT_EQ(engine.rebalance_report().state, RebalanceReport::State::kFailed);
  EXPECT_EQ(engine.rebalance_report().error, "worker " + workers.addresses[1] + " was lost");
}

TEST(WorkerMoves, TwoWorkersOrMoreAreNeeded) {
  const Workers some(moving("", kTinyR1), {"0-7"}), others(served(kTinyR1, ""), {"8-15"});
  EXPECT_TRUE(says(error_of([&] {
                     LoadedModel(with_workers({some.addresses[0], others.addresses[0]}));
                   }),
                   "--rebalance: experts move between two or more workers that are started with "
                   "--experts-move, and of these 2 1 is so"));
}

TEST(WorkerMoves, WorkersThatCannotAreRefused) {
  LoadedExpertsOptions standby = moving(std::string(kStandby));
  EXPECT_TRUE(says(error_of([&] { LoadedExperts loaded(standby); }),
                   "--experts standby and --experts-move"));
  LoadedExpertsOptions small = moving("0-3");
  small.free_bytes = [] { return 1000; };
  EXPECT_TRUE(says(error_of([&] { LoadedExperts loaded(small); }),
                   "--experts-move: room for 4 more experts needs"));
}

// The worker's book.

class RoomLoader final : public ExpertLoader {
 public:
  explicit RoomLoader(int64_t room) : room_(room) {}
  void begin(const ExpertsOfLayers& experts) override {
    EXPECT_TRUE(has_room(experts));
    loading_ = n_of_all_layers(experts);
    progress_ = {State::kEnded, 5, 5};
  }
  Progress progress() const override { return progress_; }
  void finish() override {
    progress_ = {};
    room_ -= loading_;
  }
  bool has_room(const ExpertsOfLayers& experts) const override {
    return n_of_all_layers(experts) <= room_;
  }
  void drop(const ExpertsOfLayers& experts) override { room_ += n_of_all_layers(experts); }

 private:
  int64_t room_, loading_ = 0;
  Progress progress_;
};

ExpertsOfLayers one_layer(const std::string& text) {
  return {experts_from_text(text, kServedExperts, "experts")};
}

TEST(WorkerMoves, ExpertsAreDroppedOnceNoBackboneUsesThem) {
  RoomLoader loader(1);
  StandbyLoads loads(one_layer("0-3"), &loader, true);
  for (const int peer : {0, 1}) {
    loads.joined(peer);
    loads.uses(peer, one_layer("0-3"));
  }
  EXPECT_THROW(loads.uses(0, one_layer("4")), ProtocolError) << "it was not asked for";
  loads.ask(0, one_layer("5"));
  loads.begin_next();
  loads.finish();
  EXPECT_EQ(loads.answer(0)->state, LoadAnswer::State::kLoaded);
  EXPECT_EQ(loads.answer(0)->bytes_total, 5);
  loads.told(0);
  EXPECT_EQ(loads.used_by(0), one_layer("0-3,5"));
  EXPECT_EQ(loads.used_by(1), one_layer("0-3"));
  loads.uses(0, one_layer("1-3,5"));
  EXPECT_FALSE(loads.has_unused()) << "the other backbone uses it";
  loads.uses(1, one_layer("0-2"));
  EXPECT_FALSE(loads.has_unused()) << "each is used by one";
  loads.uses(1, one_layer("1-2"));
  ASSERT_TRUE(loads.has_unused());
  loads.drop_unused();
  EXPECT_EQ(loads.experts(), one_layer("1-3,5"));
  EXPECT_FALSE(loads.has_unused());
  EXPECT_TRUE(loader.has_room(one_layer("7")));
}

// One that says for the first time what it uses gives nothing away: others may be back soon.
TEST(WorkerMoves, WhatIsNotUsedMakesRoomOnlyWhereRoomIsNeeded) {
  RoomLoader loader(1);
  StandbyLoads loads(one_layer("0-3"), &loader, true);
  loads.joined(0);
  loads.uses(0, one_layer("2-3"));
  EXPECT_FALSE(loads.has_unused());
  loads.ask(0, one_layer("6"));
  EXPECT_FALSE(loads.has_unused()) << "there is room for one";
  loads.begin_next();
  loads.finish();
  loads.told(0);
  loads.ask(0, one_layer("7"));
  ASSERT_TRUE(loads.has_unused());
  loads.begin_next();
  EXPECT_EQ(loads.answer(0)->state, LoadAnswer::State::kLoading);
  loads.drop_unused();
  EXPECT_EQ(loads.experts(), one_layer("1-3,6")) << "no more than needed";
  loads.begin_next();
  loads.finish();
  EXPECT_EQ(loads.experts(), one_layer("1-3,6-7"));
}

TEST(WorkerMoves, WhatWasLoadedForALostBackboneIsDropped) {
  RoomLoader loader(1);
  StandbyLoads loads(one_layer("0-3"), &loader, true);
  loads.joined(0);
  loads.ask(0, one_layer("6"));
  loads.begin_next();
  loads.left(0);
  loads.finish();
  ASSERT_TRUE(loads.has_unused());
  loads.drop_unused();
  EXPECT_EQ(loads.experts(), one_layer("0-3")) << "also where no backbone is there";
  StandbyLoads of_standby(one_layer("0"), &loader);
  of_standby.joined(0);
  EXPECT_THROW(of_standby.uses(0, one_layer("0")), ProtocolError);
}

}  // namespace
}  // namespace tandem::test
