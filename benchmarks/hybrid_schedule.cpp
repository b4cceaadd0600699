// The schedule of a decode step that GPU and CPU share, on a machine without a GPU: the real
// forward pass, hand-off and experts of R1's shape on one core, and on another a simulated GPU that
// only delays (stated_gpu.h). Prints the table of docs/measurements/hybrid_schedule.md.
//
//     hybrid_schedule [GB of experts, 3]
#include <cstdio>
#include <cstdlib>

#include "bench/gpu/hybrid_steps.h"
#include "bench/machine/machine_speed.h"
#include "core/machine_info.h"
#include "model/cost.h"
#include "stated_gpu.h"

namespace tandem {
namespace {

constexpr StatedRates kRtx4090 = {1008e9, 165.2e12};  // of its data sheet: memory; BF16, dense
constexpr int kLayers = 4, kContext = 1536;
// Three speeds of the GPU: as stated; so slow that GPU and this core relate as an RTX 4090 and two
// Xeon 6454S do in the planner (docs/measurements/hybrid_schedule.md); so slow that both take
// equally long.
struct Row {
  int sequences;
  double beside_server;  // the GPU's part over the CPU's
} constexpr kRows[] = {{1, 26.5 / 51.5}, {8, 30.9 / 374.0}, {32, 38.1 / 1105.0}};
constexpr double kSeconds = 3;  // a row, and at least five steps

// R1's layers with experts, all of their routed ones. These share the memory of a few, which are
// more than any cache holds: every expert that a step asks for comes from memory.
struct Model {
  Model(double gb, const cpu::KernelTable& kernels, Team& team) : home(kernels, team.topology()) {
    config.n_layers = kLayers;
    config.n_dense_layers = config.n_mtp_layers = 0;
    ModelConfig some = config;
    some.n_layers = 1;
    some = with_resident_experts(some, format, static_cast<int64_t>(gb * 1e9));
    n_resident = some.router.n_experts;
    resident = random_weights(
        some, {format, format}, [](const WeightSpec& s) { return s.use == WeightUse::kExpert; },
        home, team);
    weights.slices = resident.slices;
    weights.layers.resize(kLayers);
    const std::vector<FfnWeights>& from = resident.layers[0].experts;
    const int64_t n_experts = config.router.n_experts;
    for (LayerWeights& layer : weights.layers) {
      layer.experts.resize(std::ssize(from) / n_resident * n_experts);
      for (int64_t e = 0; e < std::ssize(layer.experts); ++e)
        layer.experts[e] = from[e / n_experts * n_resident + e % n_experts % n_resident];
    }
  }

  ModelConfig config = bench_config("r1");
  const WeightFormat format = stored_expert_format(config);
  CpuWeights home;
  ModelWeights resident, weights;
  int n_resident;
};

// The medians of a step's time as the timeline has it: from the end of its first layer to that of
// its last, and as long again a layer for the first, whose beginning has no mark.
struct Traced {
  double step, halves;
};
Traced traced(const Timeline& timeline, double least_cpu_seconds) {
  struct Step {
    double first_left = 0, last_left = 0, cpu = 0;
    bool halves = false;
  };
  std::vector<Step> steps(timeline.n_steps());
  for (const Timeline::Span& s : timeline.spans()) {
    Step& step = steps[s.step];
    step.halves |= s.half == 1;
    const std::string name = s.name;
    if (name == "experts") step.cpu += s.end - s.begin;
    if (name != "adds the CPU's sum" || s.half == 1) continue;
    if (s.layer == 0) step.first_left = s.end;
    if (s.layer == kLayers - 1) step.last_left = s.end;
  }
  std::vector<double> whole, halves;
  for (const Step& step : steps)
    if (step.cpu >= least_cpu_seconds)  // else the CPU had nothing to compute
      (step.halves ? halves : whole)
          .push_back((step.last_left - step.first_left) * kLayers / (kLayers - 1));
  return {median(whole), halves.empty() ? 0 : median(halves)};
}

class Schedule {
 public:
  Schedule(Model& model, const cpu::KernelTable& kernels, Team& team, int gpu_cpu)
      : model_(model),
        experts_(kernels, model.config, model.weights, kMaxBatch, team),
        gpu_cpu_(gpu_cpu) {}

  HybridSteps::Decode print_row(int n, StatedRates rates) {
    Timeline timeline;
    const StepLimits limits = {kMaxBatch, 1};
    const ModelOnGpu on_gpu(
        [&](const GpuBenchOptions& options) {
          return std::make_unique<StatedGpu>(options, rates, gpu_cpu_, timeline);
        },
        {.config = model_.config,
         .formats = {model_.format, model_.format},
         .wanted = [](const WeightSpec& s) { return s.use != WeightUse::kExpert; },
         .max_tokens = kMaxBatch,
         .context = kContext},
        limits, int64_t{n} * kContext);
    HybridSteps steps({model_.config, experts_, on_gpu, limits});
    const HybridSteps::Decode m = steps.decode(kContext, n, kSeconds);
    const Traced t = traced(timeline, m.cpu / 2);
    std::printf("| %.3g x | %d | %.2f ms | %.1f ms | %.1f ms | %.1f ms | %.2f |", rates.slower, n,
                m.gpu * 1e3, m.cpu * 1e3, m.step * 1e3, t.step * 1e3,
                t.step / std::max(m.gpu, m.cpu));
    if (n > 1)
      std::printf(" %.1f ms | %.2f x |\n", t.halves * 1e3, t.step / t.halves);
    else
      std::printf(" | |\n");
    std::fflush(stdout);
    return m;
  }

 private:
  static constexpr int kMaxBatch = 32;
  Model& model_;
  CpuExperts experts_;
  const int gpu_cpu_;
};

void print(double gb) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const Topology topology = this_topology();
  const int gpu_cpu = topology.nodes.back().cpus.back();
  require(topology.n_cores() >= 2, "two cores are needed, one for the experts and one for the GPU");
  Team team(with_threads(topology, 1));
  Model model(gb, kernels, team);
  std::printf(
      "%s, %s kernels, one core for the experts (%d of R1's in memory, %.1f GB), one for the GPU; "
      "%d MoE layers, context %d\n\n"
      "| GPU, times as slow | sequences | GPU alone (stated) | CPU alone (measured) | step, by "
      "the "
      "clock | step, by the timeline | / the larger | two micro-batches | gain |\n"
      "|---|---|---|---|---|---|---|---|---|\n",
      machine_info().cpu.c_str(), kernels.name, model.n_resident,
      1e-9 *
          static_cast<double>(model.n_resident * routed_expert_bytes(model.config, model.format)),
      kLayers, kContext);
  Schedule schedule(model, kernels, team, gpu_cpu);
  for (const Row& row : kRows) {
    const HybridSteps::Decode m = schedule.print_row(row.sequences, kRtx4090);
    for (const double part : {row.beside_server, 1.}) {
      StatedRates slow = kRtx4090;
      slow.slower = part * m.cpu / m.gpu;
      schedule.print_row(row.sequences, slow);
    }
  }
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  try {
    tandem::print(argc > 1 ? std::atof(argv[1]) : 3);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
