// Standbys: workers that load experts when the workers that have them are lost. Sums are those of
// one process before, while and after a standby takes over.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "cli/conversation.h"
#include "core/clock.h"
#include "offload/workers/standby_choice.h"
#include "offload/workers/standby_loads.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

// What is to be loaded by whom.

StandbyState standby_state(bool takes_orders, const std::vector<bool>& may_load,
                           std::vector<bool> loads = {}) {
  loads.resize(may_load.size());
  return {takes_orders, loads, may_load};
}
using StandbyOrders = std::vector<StandbyOrder>;

TEST(StandbyChoice, TheFirstThatMayLoadAShardGetsIt) {
  const std::vector<StandbyState> standbys = {
      standby_state(false, {true, true}), standby_state(true, {false, true}),
      standby_state(true, {true, true}), standby_state(true, {true, true})};
  EXPECT_EQ(standby_orders(std::vector{0}, standbys), (StandbyOrders{{0, 2}}));
  EXPECT_EQ(standby_orders(std::vector{1}, standbys), (StandbyOrders{{1, 1}}));
  EXPECT_EQ(standby_orders({}, standbys), StandbyOrders{});
  EXPECT_EQ(standby_orders(std::vector{0}, {}), StandbyOrders{});
}

TEST(StandbyChoice, ShardsAreLoadedAtTheSameTimeByDifferentStandbys) {
  const std::vector<bool> all(3, true);
  const std::vector<int> lost = {0, 1, 2};
  EXPECT_EQ(standby_orders(lost, std::vector{standby_state(true, all), standby_state(true, all)}),
            (StandbyOrders{{0, 0}, {1, 1}}));
  EXPECT_EQ(standby_orders(lost, std::vector{standby_state(true, {false, false, true}),
                                             standby_state(true, {true, true, false})}),
            (StandbyOrders{{0, 1}, {2, 0}}));
}

TEST(StandbyChoice, AShardThatIsLoadedIsAskedForOnce) {
  const std::vector<bool> all(2, true);
  const std::vector<StandbyState> standbys = {standby_state(false, all, {true, false}),
                                              standby_state(true, all)};
  EXPECT_EQ(standby_orders(std::vector{0}, standbys), StandbyOrders{});
  EXPECT_EQ(standby_orders(std::vector{0, 1}, standbys), (StandbyOrders{{1, 1}}));
}

// What backbones of a standby are told.

class FakeLoader final : public ExpertLoader {
 public:
  void begin(const ExpertsOfLayers& experts) override {
    EXPECT_EQ(progress_.state, State::kIdle);
    begun.push_back(text_of_layers(experts));
    progress_ = {State::kLoading, 0, 10};
  }
  Progress progress() const override { return progress_; }
  void finish() override {
    progress_ = {};
    if (!failure.empty()) fail("{}", failure);
  }
  void get_on(int64_t bytes) { progress_.bytes_done = bytes; }
  void end() { progress_.state = State::kEnded; }

  std::vector<std::string> begun;
  std::string failure;

 private:
  Progress progress_;
};

// The experts of a text in each of two layers.
ExpertsOfLayers experts_of_text(const std::string& text) {
  return ExpertsOfLayers(2, experts_from_text(text, kServedExperts, "experts"));
}
ExpertsOfLayers none() { return ExpertsOfLayers(2, std::vector<bool>(kServedExperts)); }
LoadAnswer::State state_of(const StandbyLoads& loads, int peer) {
  return loads.answer(peer)->state;
}
using LoadState = LoadAnswer::State;

TEST(StandbyLoads, OneLoadAtATimeInTheOrderOfTheAsking) {
  FakeLoader loader;
  StandbyLoads loads(none(), &loader);
  loads.begin_next();
  EXPECT_FALSE(loads.answer(3));
  loads.ask(3, experts_of_text("4-7"));
  loads.ask(1, experts_of_text("0-5"));
  loads.begin_next();
  loads.begin_next();
  loader.get_on(4);
  for (const int peer : {1, 3}) {
    EXPECT_EQ(state_of(loads, peer), LoadState::kLoading);
    EXPECT_EQ(loads.answer(peer)->bytes_done, 4);
    EXPECT_EQ(loads.answer(peer)->bytes_total, 10);
  }
  EXPECT_FALSE(loads.has_ended());
  loader.end();
  EXPECT_TRUE(loads.has_ended());
  EXPECT_EQ(state_of(loads, 3), LoadState::kLoading) << "nothing is computed before finish()";
  EXPECT_EQ(loads.finish(), "experts 4-7 are loaded");
  EXPECT_EQ(loads.experts(), experts_of_text("4-7"));
  EXPECT_EQ(state_of(loads, 3), LoadState::kLoaded);
  EXPECT_EQ(state_of(loads, 1), LoadState::kLoading);
  loads.told(3);
  EXPECT_FALSE(loads.answer(3));
  loads.begin_next();
  loader.end();
  EXPECT_EQ(loads.finish(), "experts 0-3 are loaded") << "what it has is not loaded again";
  EXPECT_EQ(state_of(loads, 1), LoadState::kLoaded);
  EXPECT_EQ(loader.begun, (std::vector<std::string>{"4-7", "0-3"}));
  loads.ask(5, experts_of_text("2,6"));
  EXPECT_EQ(state_of(loads, 5), LoadState::kLoaded) << "they are here already";
}

TEST(StandbyLoads, ARefusalIsForThoseWhoWantedIt) {
  FakeLoader loader;
  StandbyLoads loads(experts_of_text("7"), &loader);
  loads.ask(0, experts_of_text("0-2"));
  loads.ask(1, experts_of_text("2-3"));
  loads.ask(2, experts_of_text("4"));
  loads.begin_next();
  loader.failure = "too little memory";
  loader.end();
  EXPECT_EQ(loads.finish(), "experts 0-2 are not loaded: too little memory");
  for (const int peer : {0, 1}) {
    EXPECT_EQ(state_of(loads, peer), LoadState::kRefused);
    EXPECT_EQ(loads.answer(peer)->why, "too little memory");
  }
  EXPECT_EQ(loads.experts(), experts_of_text("7"));
  loader.failure.clear();
  loads.begin_next();
  EXPECT_EQ(loader.begun.back(), "4") << "what is refused is not loaded";
}

TEST(StandbyLoads, WhoHasLeftIsForgottenAndItsLoadIsKept) {
  FakeLoader loader;
  StandbyLoads loads(none(), &loader);
  loads.ask(0, experts_of_text("0-2"));
  loads.begin_next();
  loads.left(0);
  EXPECT_FALSE(loads.answer(0));
  loads.ask(0, experts_of_text("3"));
  loader.end();
  loads.finish();
  EXPECT_EQ(loads.experts(), experts_of_text("0-2"));
  loads.left(0);
  loads.begin_next();
  EXPECT_EQ(loader.begun.size(), 1u);
}

TEST(StandbyLoads, ABackboneAsksForOneThingAtATime) {
  FakeLoader loader;
  StandbyLoads loads(none(), &loader);
  loads.ask(0, experts_of_text("0"));
  EXPECT_THROW(loads.ask(0, experts_of_text("1")), ProtocolError);
  StandbyLoads of_worker(experts_of_text("0"), nullptr);
  EXPECT_THROW(of_worker.ask(0, experts_of_text("1")), ProtocolError);
}

// Pools and standbys.

// A standby of the served model with room for so many experts.
LoadedExpertsOptions standby_with_room(int n_experts = kServedExperts) {
  LoadedExpertsOptions options = served(kServedModel, std::string(kStandby));
  const LoadedExperts one(options);
  const int64_t bytes = one.standby()->expert_bytes();
  const auto n_free = std::make_shared<std::atomic<int>>(n_experts);
  options.free_bytes = [=] { return *n_free * bytes; };
  return options;
}

void await_loaded(const Backbone& backbone, const std::string& address, int64_t n_experts) {
  const auto has = [&] {
    const std::optional<WorkerStatus> status = backbone.status_of(address);
    return status && status->is_up && status->n_experts == n_experts;
  };
  for (int i = 0; i < 2000 && !has(); ++i) std::this_thread::sleep_for(milliseconds(5));
  ASSERT_TRUE(has()) << address;
}

// The rows of a step wait while the standby loads, and go to it within the step.
TEST(WorkerStandby, TakesOverFromAWorkerThatIsKilled) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "0-3"));
  WorkerThread second(served(kServedModel, "4-7")), standby(standby_with_room());
  Lines warnings, notes;
  Backbone backbone(local, {first->address(), second.address(), standby.address()},
                    {.notes = &notes, .warnings = &warnings});
  ASSERT_EQ(backbone.shards().size(), 2u);
  EXPECT_EQ(backbone.shards()[0].owners, std::vector<int>{0});
  expect_right_sums(local, backbone, 1);
  EXPECT_TRUE(backbone.status(2).is_standby);
  EXPECT_EQ(backbone.status(2).n_experts, 0);
  EXPECT_EQ(backbone.status(2).n_requests, 0);
  const std::string address = first->address();
  first.reset();
  for (int i = 0; i < 5; ++i) expect_right_sums(local, backbone, 10 + i);
  EXPECT_EQ(backbone.shards()[0].owners, (std::vector<int>{0, 2}));
  EXPECT_EQ(backbone.status(2).n_experts, 4);
  EXPECT_GT(backbone.status(2).n_requests, 0);
  EXPECT_EQ(backbone.status(2).n_failures, 0);
  EXPECT_EQ(warnings.count("experts 0-3 have no worker that is up: the standby " +
                           standby.address() + " loads them"),
            1);
  EXPECT_EQ(notes.count("worker " + standby.address() + " has loaded experts 0-3"), 1);
  // The worker comes back: the standby keeps what it has, and both share the load.
  first = std::make_unique<WorkerThread>(served(kServedModel, "0-3"),
                                         ExpertServer::Options{.address = address});
  backbone.await(0, true);
  const std::vector<WorkerStatus> before = backbone.pool().workers();
  for (int i = 0; i < 10; ++i) expect_right_sums(local, backbone, 20 + i);
  for (const int worker : {0, 2})
    EXPECT_GT(backbone.status(worker).n_requests, before[worker].n_requests) << worker;
  EXPECT_EQ(warnings.count("the standby"), 1);
}

// The link's thread looks every 5 s, and does not wait for that: neither while nothing uses the
// connection nor after a step has used it.
TEST(WorkerStandby, AnOrderLeavesAtOnce) {
  for (const bool in_use : {false, true}) {
    WorkerThread standby(standby_with_room());
    FaultyWorker between(standby.address());
    const std::unique_ptr<Transport> transport = transport_of_tests();
    const std::unique_ptr<MessageWaiter> waiter = transport->waiter();
    WorkerLink link(*transport, {.address = between.address(),
                                 .path = path_of_tests(),
                                 .deadline = std::chrono::seconds(20)});
    const WorkerWelcome welcome = link.ask();
    link.keep(welcome, kMostTokens, *waiter);
    for (int i = 0; i < 2000 && !link.is_up(); ++i) std::this_thread::sleep_for(milliseconds(5));
    std::this_thread::sleep_for(milliseconds(100));  // the thread has gone to sleep
    if (in_use) {
      ASSERT_TRUE(link.take());
    }
    EXPECT_TRUE(link.ask_to_load(
        ExpertsOfLayers(welcome.n_layers, experts_from_text("0-3", kServedExperts, "experts"))));
    if (in_use) {
      std::this_thread::sleep_for(milliseconds(100));
      EXPECT_EQ(between.n_loads(), 0);
      link.release();
    }
    for (int i = 0; i < 200 && between.n_loads() == 0; ++i)
      std::this_thread::sleep_for(milliseconds(5));
    EXPECT_EQ(between.n_loads(), 1) << (in_use ? "after a step" : "idle");
  }
}

// It serves the first shard while it loads the second.
TEST(WorkerStandby, TakesOverAllWorkersOneAfterTheOther) {
  Local local;
  auto workers = std::make_unique<Workers>(served(kServedModel, ""),
                                           std::vector<std::string>{"0-2", "3-4", "5-7"});
  WorkerThread standby(standby_with_room());
  std::vector<std::string> addresses = workers->addresses;
  addresses.push_back(standby.address());
  Backbone backbone(local, addresses);
  for (int lost = 0; lost < 3; ++lost) {
    workers->threads[lost].reset();
    for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, 10 * lost + i);
  }
  EXPECT_EQ(backbone.status(3).n_experts, 8);
  EXPECT_EQ(backbone.status(3).n_failures, 0);
}

// The standby loads while nothing is computed, so later steps do not wait for it.
TEST(WorkerStandby, AnIdleBackboneAsksToo) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  WorkerThread standby(standby_with_room());
  const std::vector<std::string> addresses = {first->address(), standby.address()};
  Backbone backbone(local, addresses);
  first.reset();
  backbone.await(0, false);
  for (int i = 0; i < 2000 && !backbone.status(1).is_loading; ++i) {
    backbone.pool().update_workers(addresses);
    if (backbone.status(1).n_experts > 0) break;
    std::this_thread::sleep_for(milliseconds(5));
  }
  await_loaded(backbone, addresses[1], 8);
  expect_right_sums(local, backbone, 1);
}

TEST(WorkerStandby, AWorkerThatSaysGoodbyeIsReplaced) {
  Local local;
  WorkerThread first(served(kServedModel, "auto")), standby(standby_with_room());
  Backbone backbone(local, {first.address(), standby.address()});
  first.end();
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(backbone.status(1).n_requests, 0);
  EXPECT_EQ(backbone.status(0).n_failures, 0);
}

// One that is not listed any more is left once the standby has its experts.
TEST(WorkerStandby, AWorkerThatIsNotListedIsReplaced) {
  Local local;
  WorkerThread first(served(kServedModel, "auto")), standby(standby_with_room());
  const std::vector<std::string> listed = {standby.address()};
  Backbone backbone(local, {first.address(), standby.address()});
  backbone.pool().update_workers(listed);
  expect_right_sums(local, backbone, 1);
  for (int i = 0; i < 2000 && backbone.status_of(first.address()); ++i) {
    std::this_thread::sleep_for(milliseconds(5));
    backbone.pool().update_workers(listed);
  }
  EXPECT_FALSE(backbone.status_of(first.address()));
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_EQ(backbone.shards()[0].owners, std::vector<int>{0});
}

// A standby may come later, as other workers do.
TEST(WorkerStandby, RowsThatWaitGoToAStandbyThatJoins) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  WorkerThread standby(standby_with_room());
  const std::string address = first->address();
  Backbone backbone(local, {address});
  first.reset();
  backbone.await(0, false);
  std::thread list([&] {
    std::this_thread::sleep_for(milliseconds(200));
    backbone.pool().update_workers({address, standby.address()});
  });
  expect_right_sums(local, backbone, 2);
  list.join();
  EXPECT_GT(backbone.status_of(standby.address())->n_requests, 0);
}

// The first standby lacks memory and refuses. With no other standby the error gives its refusal.
TEST(WorkerStandby, WhatDoesNotFitIsRefused) {
  Local local;
  Lines notes;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "0-3"));
  auto second = std::make_unique<WorkerThread>(served(kServedModel, "4-6"));
  WorkerThread small(standby_with_room(3)), large(standby_with_room(4));
  Backbone backbone(local, {first->address(), second->address(), small.address(), large.address()},
                    {.patience = milliseconds(500), .notes = &notes});
  first.reset();
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  notes.await("worker " + small.address() + " does not load experts 0-3: experts 0-3 need ");
  EXPECT_EQ(backbone.status(2).n_experts, 0);
  EXPECT_EQ(backbone.status(3).n_experts, 4);
  // What it has refused does not prevent another load.
  second.reset();
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, 10 + i);
  EXPECT_EQ(backbone.status(2).n_experts, 3);
  EXPECT_EQ(backbone.status(3).n_experts, 4);
}

TEST(WorkerStandby, TheErrorOfAStepNamesTheRefusal) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  WorkerThread small(standby_with_room(7));
  Backbone backbone(local, {first->address(), small.address()}, {.patience = milliseconds(300)});
  first.reset();
  Inputs inputs(2, local.dim, 1);
  const std::string error = error_of([&] { backbone.sums(inputs, 1); });
  EXPECT_TRUE(says(error, "experts 0-7 have had no worker for 0.3 s: "));
  EXPECT_TRUE(says(error, "), standby " + small.address() + " (experts 0-7 need 0."));
  EXPECT_TRUE(says(error, " are free): start one of them again"));
}

// Another one is asked when a standby is lost.
TEST(WorkerStandby, AStandbyThatIsLostIsReplaced) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  auto third = std::make_unique<WorkerThread>(standby_with_room());
  WorkerThread second(standby_with_room());
  Backbone backbone(local, {first->address(), third->address(), second.address()});
  first.reset();
  expect_right_sums(local, backbone, 1);
  EXPECT_EQ(backbone.status(1).n_experts, 8) << "the first that is listed";
  EXPECT_EQ(backbone.status(2).n_experts, 0);
  third.reset();
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, 10 + i);
  EXPECT_EQ(backbone.status(2).n_experts, 8);
}

// A standby that was started again loads what it had before it is used.
TEST(WorkerStandby, AStandbyThatIsStartedAgainLoadsAgain) {
  Local local;
  Lines notes;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  auto standby = std::make_unique<WorkerThread>(standby_with_room());
  const std::string address = standby->address();
  Backbone backbone(local, {first->address(), address}, {.notes = &notes});
  first.reset();
  expect_right_sums(local, backbone, 1);
  standby.reset();
  backbone.await(1, false);
  standby = std::make_unique<WorkerThread>(standby_with_room(),
                                           ExpertServer::Options{.address = address});
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, 10 + i);
  EXPECT_EQ(notes.count("worker " + address + " has loaded experts 0-7"), 2);
  EXPECT_EQ(backbone.status(1).n_failures, 0);
}

// A connection that is closed and made again is no reason to load anything.
TEST(WorkerStandby, IsNotAskedWhereTheWorkerIsBackAtOnce) {
  Local local;
  Lines warnings;
  WorkerThread worker(served(kServedModel, "auto")), standby(standby_with_room());
  FaultyWorker between(worker.address());
  Backbone backbone(local, {between.address(), standby.address()}, {.warnings = &warnings});
  between.set(FaultyWorker::Fault::kCloses);
  std::thread heal([&] {
    for (int i = 0; i < 2000 && between.n_faults() == 0; ++i)
      std::this_thread::sleep_for(milliseconds(1));
    between.set(FaultyWorker::Fault::kNone);
  });
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  heal.join();
  EXPECT_GT(backbone.status(0).n_failures, 0);
  EXPECT_EQ(warnings.count("the standby"), 0);
  EXPECT_EQ(backbone.status(1).n_experts, 0);
}

// A standby that was cut off is not a worker of other experts than before.
TEST(WorkerStandby, ReconnectsWithWhatItHas) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  WorkerThread standby(standby_with_room());
  FaultyWorker between(standby.address());
  Backbone backbone(local, {first->address(), between.address()});
  first.reset();
  expect_right_sums(local, backbone, 1);
  between.set(FaultyWorker::Fault::kCloses);
  std::thread heal([&] {
    for (int i = 0; i < 2000 && between.n_faults() == 0; ++i)
      std::this_thread::sleep_for(milliseconds(1));
    between.set(FaultyWorker::Fault::kNone);
  });
  expect_right_sums(local, backbone, 2);
  heal.join();
  EXPECT_EQ(backbone.status(1).n_experts, 8);
  EXPECT_GT(backbone.status(1).n_failures, 0);
}

// Two backbones lose different workers; each has its shards, and the standby loads for both.
TEST(WorkerStandby, LoadsForSeveralBackbones) {
  Local one, other;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "0-4"));
  auto second = std::make_unique<WorkerThread>(served(kServedModel, "3-7"));
  WorkerThread standby(standby_with_room());
  Backbone a(one, {first->address(), standby.address()}),
      b(other, {second->address(), standby.address()});
  first.reset();
  second.reset();
  std::thread of_b([&] {
    for (int i = 0; i < 5; ++i) expect_right_sums(other, b, i);
  });
  for (int i = 0; i < 5; ++i) expect_right_sums(one, a, i);
  of_b.join();
  EXPECT_GT(a.status(1).n_requests, 0);
  EXPECT_GT(b.status(1).n_requests, 0);
}

// Loads as another loader does, and says for a time that it gets on.
class SlowLoader final : public ExpertLoader {
 public:
  SlowLoader(ExpertLoader& loader, milliseconds pause) : loader_(loader), pause_(pause) {}
  void begin(const ExpertsOfLayers& experts) override {
    begun_ = Clock::now();
    loader_.begin(experts);
  }
  Progress progress() const override {
    const auto since = std::chrono::ceil<milliseconds>(Clock::now() - begun_);
    if (since >= pause_) return loader_.progress();
    return {State::kLoading, since.count(), pause_.count()};
  }
  void finish() override { loader_.finish(); }

 private:
  ExpertLoader& loader_;
  const milliseconds pause_;
  Clock::time_point begun_{};
};

class SlowStandby {
 public:
  explicit SlowStandby(milliseconds pause)
      : server_(*transport_, {}), thread_([this, pause] {
          LoadedExperts loaded(standby_with_room());
          ServedExperts of = loaded.served();
          SlowLoader slow(*of.loader, pause);
          of.loader = &slow;
          server_.run(of);
        }) {}
  ~SlowStandby() {
    server_.end();
    thread_.join();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(server_.port()); }

 private:
  const std::unique_ptr<Transport> transport_ = transport_of_tests();
  ExpertServer server_;
  std::thread thread_;
};

// A step waits for longer than the patience while the standby gets on.
TEST(WorkerStandby, StepsWaitWhileItGetsOn) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  SlowStandby standby(milliseconds(2500));
  Backbone backbone(local, {first->address(), standby.address()}, {.patience = milliseconds(1000)});
  first.reset();
  const Stopwatch watch;
  expect_right_sums(local, backbone, 1);
  EXPECT_GT(watch.seconds(), 2);
  EXPECT_FALSE(backbone.status(1).is_loading);
}

// The experts that it has are computed while it loads others.
TEST(WorkerStandby, ComputesWhileItLoads) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "0-3"));
  auto second = std::make_unique<WorkerThread>(served(kServedModel, "4-7"));
  SlowStandby standby(milliseconds(500));
  const std::vector<std::string> addresses = {first->address(), second->address(),
                                              standby.address()};
  Backbone backbone(local, addresses);
  first.reset();
  expect_right_sums(local, backbone, 1);
  EXPECT_EQ(backbone.status(2).n_experts, 4);
  // The second worker is needed until the standby has what it has.
  backbone.pool().update_workers({addresses[0], addresses[2]});
  EXPECT_TRUE(backbone.status(2).is_loading);
  const int64_t n_before = backbone.status(2).n_requests;
  for (int i = 0; backbone.status(2).is_loading; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(backbone.status(2).n_requests, n_before);
  EXPECT_EQ(backbone.status(2).n_experts, 8);
  backbone.pool().update_workers({addresses[0], addresses[2]});
  second.reset();
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_EQ(backbone.status_of(addresses[2])->n_failures, 0);
}

// One that does not get on is waited for as long as the patience.
TEST(WorkerStandby, StepsDoNotWaitForALoadThatHangs) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  LoadedExpertsOptions options = standby_with_room();
  const auto hangs = std::make_shared<std::atomic<bool>>(false);
  options.free_bytes = [hangs, free = options.free_bytes] {
    while (*hangs) std::this_thread::sleep_for(milliseconds(5));
    return free();
  };
  WorkerThread standby(options);
  Backbone backbone(local, {first->address(), standby.address()}, {.patience = milliseconds(300)});
  *hangs = true;
  first.reset();
  Inputs inputs(2, local.dim, 1);
  EXPECT_TRUE(says(error_of([&] { backbone.sums(inputs, 1); }),
                   "), standby " + standby.address() + " (it loads them): start one"));
  EXPECT_TRUE(backbone.status(1).is_up) << "it beats";
  *hangs = false;
  await_loaded(backbone, standby.address(), 8);
  expect_right_sums(local, backbone, 1);
}

TEST(WorkerStandby, OthersThanStandbysAreNotAsked) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "0-3"));
  WorkerThread second(served(kServedModel, "4-7"));
  Backbone backbone(local, {first->address(), second.address()}, {.patience = milliseconds(300)});
  first.reset();
  Inputs inputs(8, local.dim, 1);
  EXPECT_TRUE(says(error_of([&] { backbone.sums(inputs, 1); }), "experts 0-3 have had no worker"));
  EXPECT_EQ(backbone.status(1).n_failures, 0);
}

TEST(WorkerStandby, OneThatDoesNotFitIsRefused) {
  Local local;
  Lines notes;
  WorkerThread first(served(kServedModel, "auto"));
  Backbone backbone(local, {first.address()}, {.notes = &notes});
  LoadedExpertsOptions reference = standby_with_room(), few_rows = standby_with_room();
  reference.isa = cpu::Isa::kReference;
  few_rows.max_rows = 4;
  WorkerThread other_kernels(reference), small(few_rows),
      other_model(served(kGolden + "v3_bf16", std::string(kStandby)));
  backbone.pool().update_workers(
      {first.address(), other_kernels.address(), small.address(), other_model.address()});
  const auto await = [&](const WorkerThread& worker, const std::string& why) {
    notes.await("worker " + worker.address() + " has not joined: " + why);
  };
  await(other_kernels, "it is a standby that would compute other sums (\"kernels reference");
  await(small, "a step has up to 40 tokens, and it takes 4 rows");
  await(other_model, "it has another model");
}

TEST(WorkerStandby, IsRefusedAtTheStart) {
  WorkerThread all(served(kServedModel, "auto")), standby(standby_with_room());
  LoadedExpertsOptions reference = standby_with_room();
  reference.isa = cpu::Isa::kReference;
  WorkerThread other_kernels(reference);
  ModelOptions options = {.directory = kServedModel, .context = 64};
  const auto refusal = [&](std::vector<std::string> addresses) {
    options.workers.addresses = std::move(addresses);
    return error_of([&] { LoadedModel loaded(options); });
  };
  EXPECT_TRUE(says(refusal({standby.address()}), "all workers are standbys, which only take over"));
  EXPECT_TRUE(says(
      refusal({all.address(), other_kernels.address()}),
      "the worker " + other_kernels.address() + ": it is a standby that would compute other sums"));
  EXPECT_EQ(refusal({all.address(), standby.address()}), "no error");
  EXPECT_TRUE(says(error_of([] { LoadedExperts loaded(standby_with_room(0)); }),
                   "--experts standby: one expert of every layer needs 0."));
}

// Formats and kernels that standbys have in common with workers, and what they say before they
// have loaded anything.
TEST(WorkerStandby, SaysWhatOthersSay) {
  for (const char* model : {"v3_fp8", "v3_bf16", "kimi_k2_thinking"})
    for (const auto& format : {std::optional<WeightFormat>(), std::optional(weight_format("int8")),
                               std::optional(weight_format("bf16"))}) {
      LoadedExpertsOptions options = served(kGolden + model, "0-2");
      options.format = format;
      LoadedExperts worker(options);
      options.experts = kStandby;
      LoadedExperts standby(options);
      const WorkerWelcome a = worker.served().welcome, b = standby.served().welcome;
      EXPECT_EQ(a.arithmetic, b.arithmetic) << model;
      EXPECT_EQ(a.takes_bf16, b.takes_bf16) << model;
      EXPECT_EQ(a.model, b.model) << model;
      EXPECT_TRUE(b.is_standby && !a.is_standby);
      EXPECT_FALSE(has_any(b.experts));
    }
}

// Ten answers stream while their only worker ends.
TEST(WorkerStandby, AnswersAreThoseOfOneProcess) {
  constexpr int kAnswers = 10;
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.max_logits = kAnswers;
  const std::vector<std::vector<int32_t>> want = answers(options, kAnswers);
  auto first = std::make_unique<WorkerThread>(served(kTinyR1, "4-11"));
  WorkerThread standby(served(kTinyR1, std::string(kStandby)));
  options.workers.addresses = {first->address(), standby.address()};
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  LoadedModel loaded(options);
  Engine engine = engine_for(loaded, tokenizer);
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<int32_t>> tokens(kAnswers);
  int n_streaming = 0, n_ended = 0;
  std::thread client([&] {
    const std::vector<Request> requests = questions(kTinyR1, tokenizer, kAnswers);
    for (int i = 0; i < kAnswers; ++i) {
      EngineRequest request;
      request.request = requests[i];
      request.on_event = [&, i](const TokenEvent& event) {
        const std::lock_guard lock(mutex);
        EXPECT_EQ(event.error, "");
        if (event.token) {
          n_streaming += tokens[i].empty();
          tokens[i].push_back(*event.token);
        }
        n_ended += event.finish.has_value();
        changed.notify_all();
        return true;
      };
      engine.submit(std::move(request));
    }
    std::unique_lock lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(60), [&] { return n_streaming == kAnswers; });
    lock.unlock();
    first.reset();
    lock.lock();
    EXPECT_TRUE(
        changed.wait_for(lock, std::chrono::seconds(60), [&] { return n_ended == kAnswers; }));
    lock.unlock();
    engine.stop();
  });
  engine.run();
  client.join();
  EXPECT_EQ(tokens, want);
  EXPECT_GT(engine.workers()[1].n_requests, 0);
}

}  // namespace
}  // namespace tandem::test
