// Workers that come and go while a backbone computes, as threads here: newcomers share the load and
// take over, those that do not fit are refused, and those that are not listed any more are left.
#include "cli/conversation.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

// Waits until the worker is one of the backbone's and is up, or is none of them.
void await_up(const Backbone& backbone, const std::string& address) {
  const auto is_up = [&] { return backbone.status_of(address).value_or(WorkerStatus()).is_up; };
  for (int i = 0; i < 2000 && !is_up(); ++i) std::this_thread::sleep_for(milliseconds(5));
  ASSERT_TRUE(is_up()) << address;
}
void await_gone(Backbone& backbone, const std::string& address,
                const std::vector<std::string>& listed) {
  for (int i = 0; i < 2000 && backbone.status_of(address); ++i) {
    std::this_thread::sleep_for(milliseconds(5));
    backbone.pool().update_workers(listed);
  }
  ASSERT_FALSE(backbone.status_of(address)) << address;
}

TEST(WorkerJoins, ANewcomerSharesTheLoadAndTakesOver) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "0-3"));
  auto second = std::make_unique<WorkerThread>(served(kServedModel, "4-7"));
  Backbone backbone(local, {first->address(), second->address()});
  const std::vector<Shard> shards = backbone.shards();
  expect_right_sums(local, backbone, 1);
  EXPECT_FALSE(backbone.status(0).has_joined);

  // One that has both shards, and one that has the second.
  const Workers newcomers(served(kServedModel, ""), {"auto", "4-7"});
  std::vector<std::string> listed = {first->address(), second->address()};
  listed.insert(listed.end(), newcomers.addresses.begin(), newcomers.addresses.end());
  backbone.pool().update_workers(listed);
  for (const std::string& address : newcomers.addresses) await_up(backbone, address);
  for (int i = 0; i < 10; ++i) expect_right_sums(local, backbone, i);
  for (const std::string& address : newcomers.addresses) {
    EXPECT_GT(backbone.status_of(address)->n_requests, 0);
    EXPECT_TRUE(backbone.status_of(address)->has_joined);
  }
  ASSERT_EQ(backbone.shards().size(), shards.size());
  for (size_t s = 0; s < shards.size(); ++s)
    EXPECT_EQ(backbone.shards()[s].experts, shards[s].experts);
  EXPECT_EQ(backbone.shards()[0].owners, (std::vector<int>{0, 2}));
  EXPECT_EQ(backbone.shards()[1].owners, (std::vector<int>{1, 2, 3}));

  first.reset();
  second.reset();
  for (int i = 0; i < 10; ++i) expect_right_sums(local, backbone, 10 + i);
}

// The load is shared evenly: of rows under way each owner gets the same number.
TEST(WorkerJoins, ANewcomerGetsHalfOfTheRequests) {
  Local local;
  const Workers workers(served(kServedModel, ""), {"auto", "auto"});
  Backbone backbone(local, {workers.addresses[0]});
  backbone.pool().update_workers(workers.addresses);
  await_up(backbone, workers.addresses[1]);
  Inputs inputs(5, local.dim, 1);
  for (int i = 0; i < 10; ++i)
    for (const int layer : {1, 2}) backbone.sums(inputs, layer);
  EXPECT_EQ(backbone.status(0).n_requests, 10);
  EXPECT_EQ(backbone.status(1).n_requests, 10);
}

// A worker that is listed before it listens joins once it does.
TEST(WorkerJoins, AWorkerMayBeListedBeforeItListens) {
  Local local;
  Lines lines;
  WorkerThread first(served(kServedModel, "auto"));
  auto second = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  const std::string address = second->address();
  second.reset();
  Backbone backbone(local, {first.address()}, {.notes = &lines});
  backbone.pool().update_workers({first.address(), address});
  lines.await("worker " + address + " has not joined: Connection refused");
  expect_right_sums(local, backbone, 1);
  EXPECT_FALSE(backbone.status_of(address)->is_up);
  EXPECT_FALSE(backbone.status_of(address)->has_joined);
  second = std::make_unique<WorkerThread>(served(kServedModel, "auto"),
                                          ExpertServer::Options{.address = address});
  await_up(backbone, address);
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(backbone.status_of(address)->n_requests, 0);
}

// Rows that wait for an owner go to one that joins meanwhile, in the middle of their step.
TEST(WorkerJoins, RowsThatWaitGoToANewcomer) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  WorkerThread second(served(kServedModel, "auto"));
  const std::string address = first->address();
  Backbone backbone(local, {address});
  first.reset();
  backbone.await(0, false);
  std::thread list([&] {
    std::this_thread::sleep_for(milliseconds(200));
    backbone.pool().update_workers({address, second.address()});
  });
  expect_right_sums(local, backbone, 2);
  list.join();
  EXPECT_GT(backbone.status_of(second.address())->n_requests, 0);
}

// Answers that are under way when a worker is no longer listed are waited for.
TEST(WorkerJoins, AWorkerThatIsNotListedAnswersWhatItHas) {
  Local local;
  SlowWorker slow(milliseconds(300));
  auto other = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  Backbone backbone(local, {slow.address(), other->address()});
  // Requests of this layer go to the first of two owners.
  const int layer = 2;
  Inputs inputs(3, local.dim, 1);
  const std::vector<float> want = local.sums(inputs, layer, backbone.shards());
  std::thread leave([&] {
    for (int i = 0; i < 2000 && backbone.status(0).n_requests == 0; ++i)
      std::this_thread::sleep_for(milliseconds(1));
    backbone.pool().update_workers({other->address()});
  });
  EXPECT_EQ(backbone.sums(inputs, layer), want);
  leave.join();
  EXPECT_FALSE(backbone.status_of(slow.address())) << "it is not reported any more";
  EXPECT_EQ(slow.counts().n_requests, 1);
  EXPECT_EQ(backbone.status_of(other->address())->n_requests, 0);
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_EQ(slow.counts().n_requests, 1);
  EXPECT_GT(backbone.status_of(other->address())->n_requests, 0);
}

// The numbers of others change when a worker is forgotten.
TEST(WorkerJoins, OthersStayWhenAWorkerIsForgotten) {
  Local local;
  const Workers workers(served(kServedModel, ""), {"0-3", "4-7", "0-3", "4-7"});
  const std::vector<std::string>& a = workers.addresses;
  Backbone backbone(local, a);
  expect_right_sums(local, backbone, 1);
  backbone.pool().update_workers({a[1], a[2], a[3]});
  expect_right_sums(local, backbone, 2);
  EXPECT_EQ(backbone.shards()[0].owners, std::vector<int>{1});
  EXPECT_EQ(backbone.shards()[1].owners, (std::vector<int>{0, 2}));
  backbone.pool().update_workers({a[2], a[3]});
  expect_right_sums(local, backbone, 3);
  EXPECT_EQ(backbone.shards()[1].owners, std::vector<int>{1});
  // Listed again, it is a newcomer.
  backbone.pool().update_workers({a[2], a[3], a[0]});
  await_up(backbone, a[0]);
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(backbone.status_of(a[0])->n_requests, 0);
}

// A worker ends at once after it was left: no connection of the backbone remains, also when the
// backbone computes nothing.
TEST(WorkerJoins, AnIdleBackboneLeavesToo) {
  Local local;
  auto first = std::make_unique<WorkerThread>(
      served(kServedModel, "auto"), ExpertServer::Options{.drain = std::chrono::seconds(60)});
  WorkerThread second(served(kServedModel, "auto"));
  Lines lines;
  Backbone backbone(local, {first->address(), second.address()}, {.notes = &lines});
  backbone.pool().update_workers({second.address()});
  lines.await("worker " + first->address() + " is down: it is not listed any more");
  first.reset();
  expect_right_sums(local, backbone, 1);
}

TEST(WorkerJoins, TheLastOwnerStaysUntilThereIsAnother) {
  Local local;
  Lines warnings;
  WorkerThread first(served(kServedModel, "0-3")), second(served(kServedModel, "4-7")),
      third(served(kServedModel, "0-3"));
  Backbone backbone(local, {first.address(), second.address()}, {.warnings = &warnings});
  for (int i = 0; i < 3; ++i) {
    backbone.pool().update_workers({second.address()});
    expect_right_sums(local, backbone, i);
  }
  const std::string said = "worker " + first.address() +
                           " is not listed any more, but no other worker that is up has experts "
                           "0-3: it is used until one is";
  EXPECT_EQ(warnings.count(said), 1) << "it is told once";
  EXPECT_TRUE(backbone.status_of(first.address())->is_up);
  // A newcomer replaces it.
  const std::vector<std::string> listed = {second.address(), third.address()};
  await_gone(backbone, first.address(), listed);
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(backbone.status_of(third.address())->n_requests, 0);
  // All at once: each is the last owner of its experts.
  backbone.pool().update_workers({"127.0.0.1:1"});
  expect_right_sums(local, backbone, 4);
  EXPECT_EQ(warnings.count("experts 0-3"), 2);
  EXPECT_EQ(warnings.count("experts 4-7"), 1);
  EXPECT_FALSE(backbone.status_of("127.0.0.1:1")->is_up);
}

// Of two owners that are removed one stays.
TEST(WorkerJoins, OneOfTheLastTwoOwnersStays) {
  Local local;
  Lines warnings;
  const Workers workers(served(kServedModel, ""), {"auto", "auto"});
  Backbone backbone(local, workers.addresses, {.warnings = &warnings});
  backbone.pool().update_workers({"127.0.0.1:1"});
  EXPECT_EQ(warnings.count("is not listed any more"), 1);
  expect_right_sums(local, backbone, 1);
  EXPECT_FALSE(backbone.status_of(workers.addresses[0]));
  EXPECT_TRUE(backbone.status_of(workers.addresses[1])->is_up);
}

// One that is down is left as soon as another owner is up, and does not count as one itself.
TEST(WorkerJoins, AWorkerThatIsDownIsNoOtherOwner) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  auto second = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  const std::string down = second->address();
  Backbone backbone(local, {first->address(), down});
  second.reset();
  backbone.await(1, false);
  backbone.pool().update_workers({down});
  EXPECT_TRUE(backbone.status_of(first->address())->is_up);
  expect_right_sums(local, backbone, 1);
  second = std::make_unique<WorkerThread>(served(kServedModel, "auto"),
                                          ExpertServer::Options{.address = down});
  await_gone(backbone, first->address(), {down});
  expect_right_sums(local, backbone, 2);
}

// A newcomer that is refused is asked again, so it may be started again as it should be.
TEST(WorkerJoins, ANewcomerThatDoesNotFitIsRefused) {
  Local local;
  Lines lines;
  const Workers workers(served(kServedModel, ""), {"0-3", "4-6"});
  Backbone backbone(local, workers.addresses, {.notes = &lines});
  LoadedExpertsOptions reference = served(kServedModel, "0-3"),
                       few_rows = served(kServedModel, "0-3");
  reference.isa = cpu::Isa::kReference;
  few_rows.max_rows = 4;
  WorkerThread other_kernels(reference), small(few_rows), no_shard(served(kServedModel, "7")),
      other_model(served(kGolden + "v3_bf16", "0-3"));
  auto part = std::make_unique<WorkerThread>(served(kServedModel, "0-5"));
  const std::string of_part = part->address();
  std::vector<std::string> listed = workers.addresses;
  for (const WorkerThread* const worker :
       {&other_kernels, &small, &no_shard, &other_model, part.get()})
    listed.push_back(worker->address());
  backbone.pool().update_workers(listed);
  const auto await = [&](const std::string& address, const std::string& why) {
    lines.await("worker " + address + " has not joined: " + why);
  };
  await(of_part,
        "it has experts 0-5, and 4-6 of them only in part: answers keep their bits where workers "
        "have whole shards, which are 0-3 and 4-6: start it with --experts of one or several of "
        "them, or start this program again");
  await(no_shard.address(), "it has experts 7, and workers are asked for 0-3 and 4-6: start it");
  await(other_model.address(), "it has another model: start it with a copy");
  await(small.address(), "a step has up to 40 tokens, and it takes 4 rows: start it with --chunk");
  await(other_kernels.address(), "it would compute other sums of experts 0-3 than");
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  for (size_t i = 2; i < listed.size(); ++i) {
    EXPECT_EQ(backbone.status_of(listed[i])->n_requests, 0);
    EXPECT_FALSE(backbone.status_of(listed[i])->has_joined);
  }
  part.reset();
  // The backbone's own expert 7 does not count.
  part = std::make_unique<WorkerThread>(served(kServedModel, "4-7"),
                                        ExpertServer::Options{.address = of_part});
  await_up(backbone, of_part);
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(backbone.status_of(of_part)->n_requests, 0);
  // What was refused is forgotten when it is not listed any more.
  backbone.pool().update_workers(workers.addresses);
  EXPECT_EQ(backbone.pool().workers().size(), 2u);
}

TEST(WorkerJoins, ANewcomerTakesRowsAsTheyTravel) {
  Local local;
  const auto bf16 = [](WorkerWelcome& w) { w.takes_bf16 = true; };
  const auto f32 = [](WorkerWelcome& w) { w.takes_bf16 = false; };
  WorkerThread with(served(kServedModel, "auto"), {}, bf16);
  WorkerThread without(served(kServedModel, "auto"), {}, f32);
  for (const bool travels_as_bf16 : {true, false}) {
    Lines lines;
    const WorkerThread &first = travels_as_bf16 ? with : without,
                       &newcomer = travels_as_bf16 ? without : with;
    Backbone backbone(local, {first.address()}, {.notes = &lines});
    backbone.pool().update_workers({first.address(), newcomer.address()});
    if (travels_as_bf16)
      lines.await("other workers take rows of BF16, and it does not");
    else
      await_up(backbone, newcomer.address());
    expect_right_sums(local, backbone, 1);
  }
}

// A newcomer that has joined must come back as it was.
TEST(WorkerJoins, ANewcomerThatHasChangedIsNotUsed) {
  Local local;
  Lines lines;
  const Workers workers(served(kServedModel, ""), {"0-3", "4-7"});
  auto newcomer = std::make_unique<WorkerThread>(served(kServedModel, "0-3"));
  const std::string address = newcomer->address();
  Backbone backbone(local, workers.addresses, {.notes = &lines});
  backbone.pool().update_workers({workers.addresses[0], workers.addresses[1], address});
  await_up(backbone, address);
  expect_right_sums(local, backbone, 1);
  newcomer.reset();
  newcomer = std::make_unique<WorkerThread>(served(kServedModel, "4-7"),
                                            ExpertServer::Options{.address = address});
  lines.await("worker " + address + " is down: it has another model, other experts");
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
}

// Faults of every kind while the list changes without pause.
TEST(WorkerJoins, SumsAreRightWhileWorkersComeAndGo) {
  Local local;
  const Workers workers(served(kServedModel, ""), {"0-3", "4-7", "auto", "0-3", "auto"});
  const std::vector<std::string>& a = workers.addresses;
  Backbone backbone(local, {a[0], a[1]});
  std::atomic<bool> is_over = false;
  std::thread change([&] {
    std::mt19937 random(1);
    while (!is_over) {
      std::vector<std::string> listed;
      for (const std::string& address : a)
        if (random() % 2 == 0) listed.push_back(address);
      backbone.pool().update_workers(listed);
      for (const WorkerStatus& worker : backbone.pool().workers()) EXPECT_GE(worker.n_requests, 0);
      std::this_thread::sleep_for(milliseconds(random() % 30));
    }
  });
  for (int i = 0; i < 60; ++i) expect_right_sums(local, backbone, i);
  is_over = true;
  change.join();
}

// Micro-batches have requests under way with several workers when the list changes.
TEST(WorkerJoins, LogitsStayWhileWorkersComeAndGo) {
  const std::string directory = kServedModel;
  const std::vector<std::string> experts = {"0-4", "5-7", "auto", "0-4"};
  const Workers workers(served(directory, ""), experts);
  const TempDirectory folder;
  const std::string file = folder.file("workers");
  const auto list = [&](const std::vector<int>& listed) {
    std::ofstream out(file, std::ios::trunc);
    for (const int worker : listed) out << workers.addresses[worker] << "\n";
  };
  for (const int micro_batches : {1, 2}) {
    list({0, 1});
    ModelOptions options = {.directory = directory,
                            .context = 256,
                            .max_logits = 64,
                            .attention = AttentionForm::kAbsorbed,
                            .micro_batches = micro_batches};
    options.workers.file = file;
    options.workers.list_period = milliseconds(5);
    LoadedModel loaded(options);
    std::vector<int32_t> tokens(40);
    for (int i = 0; i < 40; ++i) tokens[i] = (i * 37 + 5) % 120;
    const Logits want = logits_after(loaded, tokens);
    const auto has = [&](const std::vector<int>& listed) {
      const std::vector<WorkerStatus> all = loaded.model().workers();
      const auto is_up = [&](int worker) {
        return std::any_of(all.begin(), all.end(), [&](const WorkerStatus& status) {
          return status.address == workers.addresses[worker] && status.is_up;
        });
      };
      return all.size() == listed.size() && std::all_of(listed.begin(), listed.end(), is_up);
    };
    for (const std::vector<int>& listed :
         std::vector<std::vector<int>>{{0, 1, 2}, {2}, {1, 2, 3}, {1, 3}, {0, 1, 2, 3}, {1, 0}}) {
      list(listed);
      for (int i = 0; i < 500 && !has(listed); ++i) EXPECT_EQ(logits_after(loaded, tokens), want);
      EXPECT_TRUE(has(listed));
      EXPECT_EQ(logits_after(loaded, tokens), want);
    }
  }
}

// Ten answers stream while a newcomer joins by the file and the only worker of the start ends.
TEST(WorkerJoins, AnswersAreThoseOfOneProcess) {
  constexpr int kAnswers = 10;
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.max_logits = kAnswers;
  const std::vector<std::vector<int32_t>> want = answers(options, kAnswers);
  const TempDirectory folder;
  const std::string file = folder.file("workers");
  auto first = std::make_unique<WorkerThread>(served(kTinyR1, "4-11"));
  WorkerThread second(served(kTinyR1, "4-11"));
  std::ofstream(file) << first->address() << "\n";
  options.workers.file = file;
  options.workers.list_period = milliseconds(5);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  LoadedModel loaded(options);
  Engine engine = engine_for(loaded, tokenizer);
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<int32_t>> tokens;
  int n_streaming = 0, n_ended = 0;
  // Asks all questions; `meanwhile` is called once all of their answers have begun.
  const auto ask = [&](const std::function<void()>& meanwhile) {
    const std::vector<Request> requests = questions(kTinyR1, tokenizer, kAnswers);
    tokens.assign(kAnswers, {});
    n_streaming = n_ended = 0;
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
    meanwhile();
    lock.lock();
    EXPECT_TRUE(
        changed.wait_for(lock, std::chrono::seconds(60), [&] { return n_ended == kAnswers; }));
    EXPECT_EQ(tokens, want);
  };
  const auto is_used = [&] {
    const std::vector<WorkerStatus> workers = engine.workers();
    return workers.size() == 2 && workers[1].has_joined && workers[1].n_requests > 0;
  };
  std::thread client([&] {
    ask([] {});
    ask([&] { std::ofstream(file, std::ios::app) << second.address() << "\n"; });
    for (int i = 0; i < 200 && !is_used(); ++i) ask([] {});
    EXPECT_TRUE(is_used());
    ask([&] { first.reset(); });
    ask([] {});
    engine.stop();
  });
  engine.run();
  client.join();
}

// A name stands for all of its addresses, of which two have workers at the start.
TEST(WorkerJoins, ANameMeansAllOfItsAddresses) {
  std::mutex mutex;
  std::vector<std::string> found;
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 3);
  const Workers workers(served(kTinyR1, ""), {"auto", "auto", "auto"});
  const std::vector<std::string>& a = workers.addresses;
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  Lines warnings;
  options.warn = warnings.sink();
  options.workers.addresses = {"experts.local:9000"};
  options.workers.patience = milliseconds(300);
  options.workers.list_period = milliseconds(5);
  options.workers.resolve = [&](const std::string& name) {
    EXPECT_EQ(name, "experts.local:9000");
    const std::lock_guard lock(mutex);
    return found;
  };
  found = {a[0], "127.0.0.1:1", a[1]};
  {
    LoadedModel loaded(options);
    EXPECT_EQ(warnings.count("the worker 127.0.0.1:1 does not answer: it may join later"), 1);
    const auto n_of = [&](size_t worker) {
      const std::vector<WorkerStatus> all = loaded.model().workers();
      return worker < all.size() ? all[worker].n_requests : 0;
    };
    std::vector<int32_t> tokens(10, 5);
    const Logits logits = logits_after(loaded, tokens);
    EXPECT_GT(n_of(0), 0);
    EXPECT_GT(n_of(1), 0);
    {
      const std::lock_guard lock(mutex);
      found = {a[0], a[1], a[2]};
    }
    const auto third_is_used = [&] {
      for (const WorkerStatus& worker : loaded.model().workers())
        if (worker.address == a[2] && worker.n_requests > 0) return true;
      return false;
    };
    for (int i = 0; i < 1000 && !third_is_used(); ++i)
      EXPECT_EQ(logits_after(loaded, tokens), logits);
    EXPECT_TRUE(third_is_used());
  }
  found = a;
  EXPECT_EQ(answers(options, 3), want);
  found = {"127.0.0.1:1", "127.0.0.1:2"};
  EXPECT_TRUE(says(error_of([&] { LoadedModel loaded(options); }), "none of the workers answers"));
}

TEST(WorkerJoins, AFileIsRefusedAtTheStart) {
  const TempDirectory folder;
  ModelOptions options = {.directory = kServedModel, .context = 64};
  options.workers.file = folder.file("workers");
  const auto refusal = [&] { return error_of([&] { LoadedModel loaded(options); }); };
  EXPECT_TRUE(says(refusal(), "cannot open"));
  std::ofstream(options.workers.file) << "# none\n";
  EXPECT_TRUE(says(refusal(), "workers: there is no worker in it"));
  std::ofstream(options.workers.file) << "127.0.0.1\n";
  EXPECT_TRUE(says(refusal(), "workers line 1: 127.0.0.1: an address is HOST:PORT"));
  options.workers.addresses = {"a:1", "b:2"};
  EXPECT_TRUE(says(refusal(), "--workers a:1,b:2 and --workers-file " + options.workers.file));
}

}  // namespace
}  // namespace tandem::test
