// Micro-batches whose experts workers compute: requests of several are under way at a time, sums
// stay the same, and a worker that is lost is replaced for all of them.
#include "core/clock.h"
#include "core/run_error.h"
#include "tests/error_of.h"
#include "tests/worker_backbones.h"

namespace tandem::test {
namespace {

using Fault = FaultyWorker::Fault;
using std::chrono::milliseconds;

// A step of two micro-batches, each with rows of its own.
struct Halves {
  Inputs first, second;
  Halves(int n_first, int n_second, int dim, int seed)
      : first(n_first, dim, seed), second(n_second, dim, seed + 1000) {}

  ExpertBatch batch(int micro_batch, int layer) {
    ExpertBatch batch = (micro_batch == 0 ? first : second).batch(layer);
    batch.micro_batch = micro_batch;
    batch.first_row = micro_batch == 0 ? 0 : first.n;
    return batch;
  }
};

std::vector<float> added(WorkerExperts& pool, Ticket ticket, const Inputs& inputs) {
  std::vector<float> y(inputs.n * inputs.dim, 0.5f);
  pool.add_to(ticket, {y.data(), inputs.n, inputs.dim, inputs.dim});
  return y;
}

// Some layers of a step, as the step runner's passes submit and add them.
void expect_right_halves(Local& local, Backbone& backbone, int seed) {
  for (const int n : {1, 7, kMostTokens / 2}) {
    Halves halves(n, n, local.dim, seed + n);
    WorkerExperts& pool = backbone.pool();
    pool.begin_step({}, 2);
    for (const int layer : {1, 2, 1}) {
      const std::vector<float> first = local.sums(halves.first, layer, backbone.shards()),
                               second = local.sums(halves.second, layer, backbone.shards());
      pool.submit(halves.batch(0, layer));
      pool.submit(halves.batch(1, layer));
      EXPECT_EQ(added(pool, 0, halves.first), first);
      // The first one is a layer further.
      const int next = layer == 1 ? 2 : 1;
      const std::vector<float> later = local.sums(halves.first, next, backbone.shards());
      pool.submit(halves.batch(0, next));
      EXPECT_EQ(added(pool, 1, halves.second), second);
      EXPECT_EQ(added(pool, 0, halves.first), later);
    }
  }
}

constexpr milliseconds kDeadline(1000);
constexpr Backbone::Options kTwo{.deadline = kDeadline, .micro_batches = 2};

TEST(WorkerOverlap, SumsAreTheSame) {
  Local local;
  for (const auto& division : std::vector<std::vector<std::string>>{{"auto"},
                                                                    {"auto", "auto"},
                                                                    {"3-7"},
                                                                    {"0-5", "2-7"},
                                                                    {"0-1", "2", "3-5", "6-7"},
                                                                    {"0-3,6", "0,4-7", "1,3,5"}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    const Workers workers(served(kServedModel, ""), division);
    Backbone backbone(local, workers.addresses, kTwo);
    for (int seed = 0; seed < 5; ++seed) expect_right_halves(local, backbone, 100 * seed);
    for (size_t w = 0; w < division.size(); ++w)
      EXPECT_EQ(backbone.status(static_cast<int>(w)).n_failures, 0);
  }
}

TEST(WorkerOverlap, RowsTravelAsBf16) {
  Local local;
  WorkerThread worker(served(kServedModel, "auto"), {},
                      [](WorkerWelcome& w) { w.takes_bf16 = true; });
  Backbone backbone(local, {worker.address()}, kTwo);
  for (int seed = 0; seed < 3; ++seed) expect_right_halves(local, backbone, 100 * seed);
}

// The worker computes both requests while the backbone does something else.
TEST(WorkerOverlap, SubmitReturnsWhileTheWorkerComputes) {
  Local local;
  SlowWorker worker(milliseconds(150));
  Backbone backbone(local, {worker.address()}, kTwo);
  Halves halves(3, 4, local.dim, 1);
  backbone.pool().begin_step({}, 2);
  const Stopwatch submits;
  for (const int i : {0, 1}) {
    backbone.pool().submit(halves.batch(i, 1));
    EXPECT_TRUE(backbone.pool().waits(i));
  }
  EXPECT_LT(submits.seconds(), 0.1);
  std::this_thread::sleep_for(milliseconds(800));
  const Stopwatch adds;
  EXPECT_EQ(added(backbone.pool(), 0, halves.first),
            local.sums(halves.first, 1, backbone.shards()));
  EXPECT_EQ(added(backbone.pool(), 1, halves.second),
            local.sums(halves.second, 1, backbone.shards()));
  EXPECT_LT(adds.seconds(), 0.1);
}

TEST(WorkerOverlap, AWholeStepDoesNotSuspend) {
  Local local;
  WorkerThread worker(served(kServedModel, "auto"));
  Backbone backbone(local, {worker.address()}, kTwo);
  Halves halves(3, 4, local.dim, 1);
  backbone.pool().begin_step({}, 1);
  backbone.pool().submit(halves.batch(0, 1));
  EXPECT_FALSE(backbone.pool().waits(0));
  added(backbone.pool(), 0, halves.first);
  EXPECT_GT(backbone.pool().seconds_waited().value_or(0), 0);
  backbone.pool().begin_step({}, 2);
  EXPECT_EQ(backbone.pool().seconds_waited(), 0);
  std::fill(halves.first.ids.begin(), halves.first.ids.end(), -1);
  backbone.pool().submit(halves.batch(0, 1));
  EXPECT_TRUE(backbone.pool().waits(0)) << "micro-batches keep their order";
  added(backbone.pool(), 0, halves.first);
}

// Long answers are received while the backbone computes.
TEST(WorkerOverlap, ConnectionsMakeProgressBetweenTwoCalls) {
  constexpr int kRows = 250;  // more than the pool leaves to the sockets
  Local local;
  WorkerThread worker(served(kServedModel, "auto"));
  Backbone backbone(local, {worker.address()},
                    {.deadline = kDeadline, .max_tokens = 2 * kRows, .micro_batches = 2});
  for (int seed = 0; seed < 3; ++seed) {
    Halves halves(kRows, kRows, local.dim, seed);
    const double before = backbone.status(0).seconds;
    backbone.pool().begin_step({}, 2);
    for (const int i : {0, 1}) backbone.pool().submit(halves.batch(i, 1));
    for (int i = 0; i < 2000 && backbone.status(0).seconds == before; ++i)
      std::this_thread::sleep_for(milliseconds(5));
    EXPECT_GT(backbone.status(0).seconds, before);
    EXPECT_EQ(added(backbone.pool(), 0, halves.first),
              local.sums(halves.first, 1, backbone.shards()));
    EXPECT_EQ(added(backbone.pool(), 1, halves.second),
              local.sums(halves.second, 1, backbone.shards()));
  }
}

// Of two owners the one with fewer rows under way is asked.
TEST(WorkerOverlap, MicroBatchesAreDividedAmongOwners) {
  Local local;
  WorkerThread first(served(kServedModel, "auto")), second(served(kServedModel, "auto"));
  Backbone backbone(local, {first.address(), second.address()}, kTwo);
  Halves halves(3, 4, local.dim, 1);
  for (const int layer : {1, 2}) {
    backbone.pool().begin_step({}, 2);
    for (const int i : {0, 1}) backbone.pool().submit(halves.batch(i, layer));
    added(backbone.pool(), 0, halves.first);
    added(backbone.pool(), 1, halves.second);
  }
  EXPECT_EQ(backbone.status(0).n_requests, 2);
  EXPECT_EQ(backbone.status(1).n_requests, 2);
}

class LostWithTwoRequests : public testing::TestWithParam<Fault> {};

// Both micro-batches are asked of the one worker that is up, which is lost when another one is.
TEST_P(LostWithTwoRequests, BothAreAskedOfAnotherOne) {
  Local local;
  WorkerThread first(served(kServedModel, "auto"));
  auto second = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  const std::string address = second->address();
  FaultyWorker faulty(first.address());
  Backbone backbone(local, {faulty.address(), address}, kTwo);
  expect_right_halves(local, backbone, 1);
  for (int round = 0; round < 3; ++round) {
    second.reset();
    backbone.await(1, false);
    backbone.await(0, true);
    const int64_t n_lost = backbone.status(0).n_failures;
    Halves halves(6, 9, local.dim, round);
    backbone.pool().begin_step({}, 2);
    faulty.set(GetParam());
    for (const int i : {0, 1}) backbone.pool().submit(halves.batch(i, 1));
    second = std::make_unique<WorkerThread>(served(kServedModel, "auto"),
                                            ExpertServer::Options{.address = address});
    backbone.await(1, true);
    EXPECT_EQ(added(backbone.pool(), 0, halves.first),
              local.sums(halves.first, 1, backbone.shards()));
    EXPECT_EQ(added(backbone.pool(), 1, halves.second),
              local.sums(halves.second, 1, backbone.shards()));
    EXPECT_GT(backbone.status(0).n_failures, n_lost);
    EXPECT_EQ(backbone.status(1).n_failures, 0);
    expect_right_halves(local, backbone, round);
    faulty.set(Fault::kNone);
  }
  backbone.await(0, true);
  expect_right_halves(local, backbone, 2);
}

INSTANTIATE_TEST_SUITE_P(Faults, LostWithTwoRequests,
                         testing::Values(Fault::kSilent, Fault::kCloses, Fault::kClosesLater,
                                         Fault::kLosesAnswer, Fault::kOtherNumber,
                                         Fault::kOtherLength, Fault::kGarbage));

// The same with answers that a thread of the pool receives.
TEST_P(LostWithTwoRequests, AlsoWhileTheBackboneComputes) {
  constexpr int kRows = 250;  // more than the pool leaves to the sockets
  Local local;
  WorkerThread first(served(kServedModel, "auto")), second(served(kServedModel, "auto"));
  FaultyWorker faulty(first.address());
  Backbone backbone(local, {faulty.address(), second.address()},
                    {.deadline = kDeadline, .max_tokens = 2 * kRows, .micro_batches = 2});
  for (int round = 0; round < 2; ++round) {
    backbone.await(0, true);
    const int64_t n_lost = backbone.status(0).n_failures;
    Halves halves(kRows, kRows, local.dim, round);
    backbone.pool().begin_step({}, 2);
    faulty.set(GetParam());
    for (const int i : {0, 1}) backbone.pool().submit(halves.batch(i, 1));
    std::this_thread::sleep_for(milliseconds(100 * round));
    EXPECT_EQ(added(backbone.pool(), 0, halves.first),
              local.sums(halves.first, 1, backbone.shards()));
    EXPECT_EQ(added(backbone.pool(), 1, halves.second),
              local.sums(halves.second, 1, backbone.shards()));
    if (GetParam() != Fault::kClosesLater) {
      EXPECT_GT(backbone.status(0).n_failures, n_lost);
    }
    EXPECT_EQ(backbone.status(1).n_failures, 0);
    faulty.set(Fault::kNone);
  }
}

// The step fails with both of its micro-batches, and the next one is right.
TEST(WorkerOverlap, AFailedStepLeavesNothingBehind) {
  Local local;
  auto worker = std::make_unique<WorkerThread>(served(kServedModel, "4-7"));
  WorkerThread other(served(kServedModel, "0-2"));
  const std::string address = worker->address();
  Backbone backbone(local, {address, other.address()},
                    {.patience = milliseconds(300), .deadline = kDeadline, .micro_batches = 2});
  for (int round = 0; round < 3; ++round) {
    expect_right_halves(local, backbone, round);
    worker.reset();
    backbone.await(0, false);
    Halves halves(6, 9, local.dim, round);
    for (const int failing : {0, 1}) {
      backbone.pool().begin_step({}, 2);
      for (const int i : {0, 1}) backbone.pool().submit(halves.batch(i, 1));
      const std::string error = error_of(
          [&] { added(backbone.pool(), failing, failing == 0 ? halves.first : halves.second); });
      EXPECT_TRUE(says(error, "experts 4-7 have had no worker for 0.3 s: " + address)) << error;
      // A step whose backbone fails leaves its tickets.
      backbone.pool().begin_step({}, 2);
      for (const int i : {0, 1}) backbone.pool().submit(halves.batch(i, 1));
    }
    worker = std::make_unique<WorkerThread>(served(kServedModel, "4-7"),
                                            ExpertServer::Options{.address = address});
    for (const int w : {0, 1}) backbone.await(w, true);
    EXPECT_EQ(backbone.status(1).n_failures, 0) << "its requests were given up";
  }
  expect_right_halves(local, backbone, 7);
}

}  // namespace
}  // namespace tandem::test
