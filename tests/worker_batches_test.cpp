// Requests of several backbones that a worker computes together.
#include <array>
#include <latch>

#include "tests/worker_backbones.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Ends after so many requests with random layers and rows.
void expect_right_sums_of_random_requests(const std::vector<std::string>& addresses, int seed,
                                          int n_requests) {
  Local local;
  Backbone backbone(local, addresses);
  std::mt19937 random(seed);
  for (int i = 0; i < n_requests; ++i) {
    const int layer = 1 + static_cast<int>(random() % 2);
    Inputs inputs(1 + static_cast<int>(random() % kMostTokens), local.dim,
                  static_cast<int>(random()));
    ASSERT_EQ(backbone.sums(inputs, layer), local.sums(inputs, layer, backbone.shards()))
        << "seed " << seed << ", request " << i;
  }
}

// Two backbones send rows as BF16, and others as floats, because they have a second worker that
// takes only these. In every other round few requests fit into a batch.
TEST(ExpertServer, ComputesRequestsTogetherWithTheBitsOfEachAlone) {
  int64_t n_shared = 0;
  for (int seed = 0; seed < 6; ++seed) {
    SlowWorker worker(milliseconds(3), seed % 2 == 0 ? 512 : 64, {},
                      [](WorkerWelcome& w) { w.takes_bf16 = true; });
    SlowWorker of_floats(milliseconds(1), kMostTokens);
    std::vector<std::thread> backbones;
    for (int b = 0; b < 2 + seed % 3; ++b)
      backbones.emplace_back([&, b] {
        std::vector<std::string> addresses = {worker.address()};
        if (b >= 2 || seed == 3) addresses.push_back(of_floats.address());
        expect_right_sums_of_random_requests(addresses, 10 * seed + b, 40);
      });
    for (std::thread& backbone : backbones) backbone.join();
    const ExpertServer::Counts counts = worker.counts();
    EXPECT_GE(counts.n_requests, counts.n_batches + counts.n_shared);
    n_shared += counts.n_shared;
  }
  EXPECT_GT(n_shared, 40);
}

// A backbone that asks again at once does not delay another one for longer than one request. No two
// requests fit into a batch.
TEST(ExpertServer, TakesTurnsAmongBackbones) {
  SlowWorker worker(milliseconds(5), kMostTokens);
  std::array<std::atomic<int>, 3> n_done{};
  std::atomic<bool> ends{false};
  std::vector<std::thread> backbones;
  for (int b = 0; b < 3; ++b)
    backbones.emplace_back([&, b] {
      Local local;
      Backbone backbone(local, {worker.address()});
      Inputs inputs(kMostTokens, local.dim, b);
      for (; !ends; ++n_done[b]) backbone.sums(inputs, 1);
    });
  const auto least = [&] {
    return std::min({n_done[0].load(), n_done[1].load(), n_done[2].load()});
  };
  for (int i = 0; i < 2000 && least() < 1; ++i) std::this_thread::sleep_for(milliseconds(5));
  std::array<int, 3> begin{n_done[0], n_done[1], n_done[2]};
  for (int i = 0; i < 2000 && least() < 40; ++i) std::this_thread::sleep_for(milliseconds(5));
  std::array<int, 3> n{};
  for (int b = 0; b < 3; ++b) n[b] = n_done[b] - begin[b];
  ends = true;
  for (std::thread& backbone : backbones) backbone.join();
  EXPECT_EQ(worker.counts().n_shared, 0);
  EXPECT_GE(*std::min_element(n.begin(), n.end()), 20);
  EXPECT_LT(*std::max_element(n.begin(), n.end()), 1.5 * *std::min_element(n.begin(), n.end()));
}

// A backbone's connection is closed while its request waits or is computed with others. Its memory
// is in use then; the others get their sums, and so does it when it is back.
TEST(ExpertServer, LosesABackboneWhoseRequestIsInABatch) {
  std::atomic<int> n_left{0};
  SlowWorker worker(milliseconds(300), 512, {.note = [&](const std::string& line) {
                      n_left += line.find("has left") != std::string::npos;
                    }});
  FaultyWorker proxy(worker.address());
  std::atomic<bool> ends{false};
  std::vector<std::thread> backbones;
  for (int b = 0; b < 3; ++b)
    backbones.emplace_back([&, b] {
      Local local;
      Backbone backbone(local, {b == 0 ? proxy.address() : worker.address()},
                        {.deadline = milliseconds(b == 0 ? 400 : 3000)});
      for (int i = 0; !ends; ++i) {
        Inputs inputs(5 + b, local.dim, 10 * i + b);
        const int layer = 1 + i % 2;
        ASSERT_EQ(backbone.sums(inputs, layer), local.sums(inputs, layer, backbone.shards()));
      }
    });
  for (int i = 0; i < 2000 && worker.counts().n_shared < 2; ++i)
    std::this_thread::sleep_for(milliseconds(5));
  EXPECT_GE(worker.counts().n_shared, 2);
  for (int kill = 0; kill < 4; ++kill) {
    proxy.set(FaultyWorker::Fault::kSilent);
    const int n_faults = proxy.n_faults();
    for (int i = 0; i < 2000 && proxy.n_faults() == n_faults; ++i)
      std::this_thread::sleep_for(milliseconds(2));
    proxy.set(FaultyWorker::Fault::kNone);
    std::this_thread::sleep_for(milliseconds(1100 + 170 * kill));
  }
  ends = true;
  for (std::thread& backbone : backbones) backbone.join();
  for (int i = 0; i < 1000 && n_left < 7; ++i) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_EQ(n_left, 7) << "four times the first one, and each at its end";
}

// A worker that ends answers the requests of its last batch, and no backbone loses it.
TEST(ExpertServer, AnswersBatchesOfSeveralBackbonesWhenItEnds) {
  SlowWorker other(milliseconds(0));
  for (int round = 0; round < 3; ++round) {
    std::optional<SlowWorker> worker(std::in_place, milliseconds(20));
    const std::string address = worker->address();
    std::atomic<int> n_failures{0};
    std::latch connected(3);
    std::vector<std::thread> backbones;
    for (int b = 0; b < 3; ++b)
      backbones.emplace_back([&, b] {
        Local local;
        Backbone backbone(local, {address, other.address()});
        connected.count_down();
        for (int i = 0; i < 60; ++i) {  // in this layer the first worker has the first turn
          Inputs inputs(4, local.dim, 100 * i + b);
          ASSERT_EQ(backbone.sums(inputs, 2), local.sums(inputs, 2, backbone.shards()));
        }
        n_failures += static_cast<int>(backbone.status(0).n_failures);
      });
    for (int i = 0; i < 2000 && worker->counts().n_shared < 3; ++i)
      std::this_thread::sleep_for(milliseconds(5));
    EXPECT_GE(worker->counts().n_shared, 3);
    connected.wait();  // two of them alone may have had these requests
    const Stopwatch watch;
    worker.reset();
    EXPECT_LT(watch.seconds(), 15) << "it does not wait until the drain is over";
    for (std::thread& backbone : backbones) backbone.join();
    EXPECT_EQ(n_failures, 0);
  }
}

// The first backbone's steps wait for those of the second one, which has a pause between steps.
// Both hear the worker meanwhile.
TEST(ExpertServer, BeatsWhileRequestsWaitForOthers) {
  SlowWorker worker(milliseconds(250));
  std::atomic<bool> ends{false};
  std::vector<std::thread> backbones;
  for (int b = 0; b < 2; ++b)
    backbones.emplace_back([&, b] {
      Local local;
      Backbone backbone(local, {worker.address()}, {.deadline = milliseconds(200)});
      for (int i = 0; !ends; ++i) {
        Inputs inputs(4, local.dim, b);
        backbone.sums(inputs, 1 + i % 2);
        if (b == 1 && i % 2 == 1) std::this_thread::sleep_for(milliseconds(250));
      }
      EXPECT_EQ(backbone.status(0).n_failures, 0);
    });
  for (int i = 0; i < 4000 && worker.counts().n_shared < 12; ++i)
    std::this_thread::sleep_for(milliseconds(5));
  EXPECT_GE(worker.counts().n_shared, 12);
  ends = true;
  for (std::thread& backbone : backbones) backbone.join();
}

}  // namespace
}  // namespace tandem::test
