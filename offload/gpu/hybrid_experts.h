// Routed experts for a backbone on a GPU: some on the GPU, the others in host memory, computed at
// the same time, by the CPU or by workers. Long steps stream some of the latter to the GPU
// (cuda_streaming.h). Workers have the rows of several micro-batches at a time.
#pragma once
#include <array>
#include <optional>
#include <vector>

#include "core/run_error.h"
#include "offload/gpu/cuda_experts.h"
#include "offload/gpu/cuda_streaming.h"
#include "offload/gpu/hand_off.h"
#include "offload/gpu/step_trace.h"

namespace tandem {

class HybridExperts final : public ExpertPool {
 public:
  struct Parts {
    const ModelWeights& weights;  // on the GPU, with its experts
    CudaExperts& on_gpu;
    ExpertPool& on_cpu;  // has all others, and takes rows of the types below
    // [layers] row type of its kernels; any for a layer without experts on the CPU.
    std::vector<cpu::ActivationType> rows_on_cpu;
    gpu::Stream& stream;
    // [layers][n_experts] experts that neither device has; empty: there are none.
    std::vector<std::vector<bool>> on_other_ranks = {};
    bool hands_all_down = false;                 // on_cpu has the experts of the GPU too
    Team* team = nullptr;                        // computes on_cpu; polls while waiting for the GPU
    std::chrono::duration<double> patience{60};  // maximum wait for the GPU
    // Kernels may wait for the CPU. If not, they are launched when the CPU's sum is there, and no
    // step may be recorded.
    bool gpu_waits = true;
  };
  // How steps are divided.
  struct Division {
    // Sequences from which a decode step has two micro-batches; 0: as on_cpu.micro_batches() says.
    int micro_batches_from = 0;
    int stream_from = 0;  // tokens from which a step streams; 0: never
    CudaStreaming* streaming = nullptr;
  };
  // For steps of up to max_tokens tokens. References outlive the object. All calls come from one
  // thread, the CPU team's own.
  HybridExperts(const ModelConfig& config, const Parts& parts, int max_tokens);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens) {
    return HandOff::bytes_for(config, max_tokens);
  }

  // Applies from the next step on.
  void divide(const Division& division) {
    check(division.stream_from == 0 || division.streaming,
          "a streaming division needs CudaStreaming");
    division_ = division;
  }
  const Division& division() const { return division_; }
  // The number of tokens, up to max_tokens, from which on streaming is faster; 0: never. Measures
  // with one layer, of which all experts are used. Does not change division().
  int measured_crossover(int max_tokens, CudaStreaming& streaming);
  void record(Timeline& timeline) { trace_.record(timeline); }
  // Between steps: experts of a layer have been exchanged between GPU and CPU, as many in both
  // directions. places: as ExpertPlaces takes them.
  void moved(int layer, std::span<const int32_t> places) {
    hand_off_.set_places(layer, places);
    if (division_.streaming) division_.streaming->moved(layer);
  }

  bool waits(Ticket ticket) override;
  // Enqueues the GPU's part and the addition of the CPU's sum, and computes that sum while the GPU
  // does earlier work; in the other order where the GPU must not wait. Throws RunError when the GPU
  // has failed or takes too long; the GPU is released, and no later step is computed. After a
  // StepFailed of `on_cpu` the step's other sums are zeros, and end_step() throws it.
  void add_to(Ticket ticket, TensorView y) override;
  std::vector<WorkerStatus> workers() const override { return parts_.on_cpu.workers(); }
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  int micro_batches(std::span<const Batch> replicas, bool is_decode) const override;
  std::optional<double> seconds_waited() const override { return parts_.on_cpu.seconds_waited(); }
  void follow(LayerRange layers, const MicroBatches& step) override;
  void end_step(LayerRange layers, const MicroBatches& step) override;

 private:
  using Places = std::vector<std::vector<int32_t>>;  // as ExpertPlaces takes them
  // A layer of a micro-batch that the GPU hands down.
  struct HandedDown {
    int layer;
    StepRows rows;
    Ticket ticket;
    Ticket on_cpu = -1;  // its ticket there; -1: the step has failed
    double waits = 0, begins = 0;
  };
  HybridExperts(const ModelConfig& config, const Parts& parts, int max_tokens,
                const Places& places);
  Ticket start(const ExpertBatch& batch) override;
  bool computes_for_ranks(int layer) const;
  bool streams(int64_t n_tokens) const;
  bool cpu_computes(const ExpertBatch& batch) const;
  void add_from_cpu(const ExpertBatch& batch, TensorView y);
  void compute_on_cpu(Ticket ticket);
  bool submit_next();
  void compute_or_give_up(Ticket ticket);
  void share(const ExpertBatch& batch, Ticket ticket, TensorView y);
  void require_not_failed() const;
  void give_up(int n_sums);

  const Parts parts_;
  gpu::Stream& stream_;
  std::vector<StepTrace::Layer> layers_;
  HandOff hand_off_;
  StepTrace trace_;
  Division division_;
  std::array<ExpertBatch, kMaxTickets> batches_ = {};  // submitted and not yet added
  std::vector<HandedDown> handed_down_;  // not yet submitted to the CPU, in the GPU's order
  std::array<std::optional<HandedDown>, kMaxTickets> on_cpu_;  // submitted, by ticket
  bool streamed_ = false;  // whether a layer of the step streamed
  // Its kernels, launched or recorded, take and give as many signals in every step.
  StepInCommon step_;
  bool failed_ = false;
};

}  // namespace tandem
