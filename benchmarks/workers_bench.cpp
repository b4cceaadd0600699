// Round trips between a backbone and an expert worker on this machine, over loopback, without the
// time that experts take: what travels is what R1's layers send, 7168 columns, BF16 out and float
// back.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "offload/workers/expert_server.h"
#include "offload/workers/worker_link.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

constexpr int kDim = 7168, kActive = 8, kExperts = 256, kMostRows = 512;

ModelConfig config() {
  ModelConfig c;
  c.dim = kDim;
  c.n_layers = 1;
  c.n_dense_layers = 0;
  c.router.n_experts = kExperts;
  c.router.n_active = kActive;
  return c;
}

// Sums of nothing.
class NoExperts final : public ExpertPool {
 public:
  void add_to(Ticket, TensorView) override {}

 private:
  Ticket start(const ExpertBatch&) override { return 0; }
};

class Answers final : public AnswerSink {
 public:
  std::span<std::byte> place_of_answer(uint64_t, uint64_t n_bytes) override {
    return memory_.span().first(n_bytes);
  }
  void answered(uint64_t) override { is_answered = true; }
  bool is_answered = false;

 private:
  Buffer memory_{int64_t{kMostRows} * kDim * 4};
};

void round_trip(benchmark::State& state) {
  const auto n = static_cast<int>(state.range(0));
  const std::unique_ptr<Transport> transport = tcp_transport();
  const ModelConfig c = config();
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const WorkerWelcome welcome = {.model = 1,
                                 .n_layers = 1,
                                 .n_active = kActive,
                                 .dim = kDim,
                                 .max_rows = kMostRows,
                                 .takes_bf16 = true,
                                 .experts = std::vector<bool>(kExperts, true),
                                 .arithmetic = {}};
  ExpertServer server(*transport, {});
  std::thread thread([&] {
    Team team(1);
    NoExperts none;
    server.run({c, kernels, none, team, welcome});
  });
  {
    const std::unique_ptr<MessageWaiter> waiter = transport->waiter();
    WorkerLink link(*transport, {.address = "127.0.0.1:" + std::to_string(server.port())});
    link.keep(welcome, kMostRows, *waiter);
    while (!link.is_up()) waiter->wait({}, nullptr, std::chrono::milliseconds(10));
    const RequestShape shape = {.n_active = kActive, .dim = kDim, .max_rows = kMostRows};
    const Buffer request(shape.bytes(n, RowType::kBf16));
    const RequestHead head = {.layer = 0, .n_rows = n, .type = RowType::kBf16};
    std::memcpy(request.data(), &head, sizeof head);
    const MessageBytes body = request.span();
    uint64_t number = 0;
    std::vector<double> us;  // of each round trip
    Answers answers;
    link.take();
    for (auto _ : state) {
      answers.is_answered = false;
      const Stopwatch watch;
      if (!link.request(++number, std::span(&body, 1))) return state.SkipWithError("lost");
      while (true) {
        if (!link.progress(answers)) return state.SkipWithError("lost");
        if (answers.is_answered) break;
        MessageConnection* const connection = link.connection();
        waiter->wait(std::span(&connection, 1), nullptr, std::chrono::milliseconds(100));
      }
      us.push_back(1e6 * watch.seconds());
    }
    link.release();
    std::nth_element(us.begin(), us.begin() + std::ssize(us) / 2, us.end());
    state.counters["median_us"] = us[us.size() / 2];
  }
  server.end();
  thread.join();
  state.SetBytesProcessed(state.iterations() * n * kDim * 6);
}
BENCHMARK(round_trip)
    ->Arg(1)
    ->Arg(16)
    ->Arg(128)
    ->Arg(512)
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tandem

BENCHMARK_MAIN();
