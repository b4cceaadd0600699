// Expert workers and their backbones on this machine, over loopback; what travels is what R1's
// layers send, 7168 columns, BF16 or float out and float back.
//  shared/BACKBONES/ROWS/BF16/TOGETHER: backbones that decode with one worker's experts, 0.7 GB of
//  FP8 or 1.4 GB of BF16 in four layers; a thread that sleeps stands for what a backbone computes
//  itself. With TOGETHER 0 the requests of two backbones do not fit into one batch.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "bench/bench_model.h"
#include "bench/random_inputs.h"
#include "offload/cpu_experts.h"
#include "offload/workers/expert_server.h"
#include "offload/workers/worker_link.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

constexpr int kDim = 7168, kMostRows = 512;

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

constexpr int kLayers = 4, kServed = 16, kServedActive = 2, kSteps = 8, kWarmSteps = 16,
              kMeasuredSteps = 12;
constexpr std::chrono::microseconds kOwnTime(300), kBetweenSteps(2000);

ModelConfig served_config() {
  ModelConfig c;
  c.dim = kDim;
  c.n_dense_layers = 0;
  c.n_layers = kLayers;
  c.moe_layer_freq = 1;
  c.expert_dim = 512;
  c.router.n_experts = kServed;
  c.router.n_active = kServedActive;
  return c;
}

// Steps without pause, with random routings.
class SteadyBackbone {
 public:
  SteadyBackbone(const std::string& address, const WorkerWelcome& welcome, int n_rows, int seed)
      : link_(*transport_, {.address = address}) {
    const RowType type = welcome.takes_bf16 ? RowType::kBf16 : RowType::kF32;
    const RequestShape shape = {
        .n_active = kServedActive, .dim = kDim, .max_rows = welcome.max_rows};
    std::mt19937 random(seed);
    for (int i = 0; i < kLayers * kSteps; ++i) {
      const RandomRouting random_routing(served_config().router, n_rows, false, random);
      const Routing routing = random_routing.routing();
      const Buffer& body = requests_.emplace_back(shape.bytes(n_rows, type));
      const RequestHead head = {.layer = i % kLayers, .n_rows = n_rows, .type = type};
      std::memcpy(body.data(), &head, sizeof head);
      const int64_t n_pairs = int64_t{n_rows} * kServedActive;
      auto* const ids = reinterpret_cast<int32_t*>(body.data() + sizeof head);
      std::copy_n(routing.ids.row<int32_t>(0), n_pairs, ids);
      std::copy_n(routing.weights.row<float>(0), n_pairs, reinterpret_cast<float*>(ids + n_pairs));
    }
    link_.keep(welcome, welcome.max_rows, *waiter_);
    while (!link_.is_up()) waiter_->wait({}, nullptr, std::chrono::milliseconds(10));
    link_.take();
  }
  ~SteadyBackbone() { link_.release(); }

  void step(int number) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const MessageBytes body = requests_[(number % kSteps) * kLayers + layer].span();
      answers_.is_answered = false;
      check(link_.request(++request_, std::span(&body, 1)), "the worker is there");
      while (!answers_.is_answered) {
        MessageConnection* const connection = link_.connection();
        waiter_->wait(std::span(&connection, 1), nullptr, std::chrono::milliseconds(100));
        check(link_.progress(answers_), "the worker is there");
      }
      std::this_thread::sleep_for(kOwnTime);
    }
    std::this_thread::sleep_for(kBetweenSteps);
    ++n_steps;
  }
  std::atomic<int> n_steps{0};

 private:
  const std::unique_ptr<Transport> transport_ = tcp_transport();
  const std::unique_ptr<MessageWaiter> waiter_ = transport_->waiter();
  WorkerLink link_;
  Answers answers_;
  std::vector<Buffer> requests_;  // [kSteps * kLayers]
  uint64_t request_ = 0;
};

// What the worker serves; this thread is the team's.
struct ServedModel {
  DType format;
  ModelConfig config = served_config();
  cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  Team team{this_topology()};
  CpuWeights home{kernels, team.topology()};
  ModelWeights weights = random_weights(
      config, {{DType::kBF16}, {format}},
      [](const WeightSpec& spec) { return spec.use == WeightUse::kExpert; }, home, team);
  CpuExperts experts{kernels, config, weights, kMostRows, team};
};

void shared(benchmark::State& state) {
  static std::array<std::unique_ptr<ServedModel>, 2> models;
  std::unique_ptr<ServedModel>& place = models[state.range(2)];
  if (!place) place.reset(new ServedModel{state.range(2) != 0 ? DType::kBF16 : DType::kF8E4M3});
  ServedModel& model = *place;
  const auto n_backbones = static_cast<int>(state.range(0)),
             n_rows = static_cast<int>(state.range(1));
  const bool is_together = state.range(3) != 0;
  const WorkerWelcome welcome = {
      .model = 1,
      .n_layers = kLayers,
      .n_active = kServedActive,
      .dim = kDim,
      .max_rows = is_together ? kMostRows : n_rows,
      .takes_bf16 = model.experts.activations()[0] == cpu::ActivationType::kBF16,
      .experts = ExpertsOfLayers(kLayers, std::vector<bool>(kServed, true)),
      .arithmetic = {}};
  for (auto _ : state) {
    const std::unique_ptr<Transport> transport = tcp_transport();
    ExpertServer server(*transport, {});
    std::atomic<bool> ends{false};
    std::thread controller([&] {
      std::vector<std::unique_ptr<SteadyBackbone>> backbones;
      std::vector<std::thread> threads;
      const std::string address = "127.0.0.1:" + std::to_string(server.port());
      for (int b = 0; b < n_backbones; ++b)
        backbones.push_back(std::make_unique<SteadyBackbone>(address, welcome, n_rows, b));
      for (const auto& backbone : backbones) {
        SteadyBackbone* const one = backbone.get();
        threads.emplace_back([one, &ends] {
          for (int i = 0; !ends; ++i) one->step(i);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(13));
      }
      const auto await_steps = [&](int n) {
        for (const auto& backbone : backbones)
          while (backbone->n_steps < n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      const auto n_steps = [&] {
        int n = 0;
        for (const auto& backbone : backbones) n += backbone->n_steps;
        return n;
      };
      await_steps(kWarmSteps);
      const int before = n_steps();
      const ExpertServer::Counts counts = server.counts();
      const Stopwatch watch;
      await_steps(kWarmSteps + kMeasuredSteps);
      state.counters["tokens_per_s"] = n_rows * (n_steps() - before) / watch.seconds();
      const ExpertServer::Counts now = server.counts();
      state.counters["shared_batches"] = static_cast<double>(now.n_shared - counts.n_shared) /
                                         static_cast<double>(now.n_batches - counts.n_batches);
      ends = true;
      for (std::thread& thread : threads) thread.join();
      backbones.clear();
      server.end();
    });
    server.run({model.config, model.kernels, model.experts, model.team, welcome});
    controller.join();
  }
}
BENCHMARK(shared)
    ->ArgsProduct({{1, 2, 4}, {1, 16, 64}, {0, 1}, {0, 1}})
    ->ArgNames({"backbones", "rows", "bf16", "together"})
    ->Iterations(1)
    ->UseRealTime()
    ->Unit(benchmark::kSecond);

}  // namespace
}  // namespace tandem

BENCHMARK_MAIN();
