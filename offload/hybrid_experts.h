// Routed experts of a backbone on a GPU: some on the GPU, the others in host memory, computed at
// the same time. In long steps some of host memory's are streamed to the GPU (cuda_streaming.h).
#pragma once
#include <array>

#include "offload/cuda_experts.h"
#include "offload/cuda_streaming.h"
#include "offload/hand_off.h"
#include "offload/step_trace.h"

namespace tandem {

class HybridExperts final : public ExpertPool {
 public:
  struct Parts {
    const ModelWeights& weights;  // on the GPU, with the experts that are there
    CudaExperts& on_gpu;
    ExpertPool& on_cpu;  // has all others, and takes rows as CpuExperts does
    // [layers] in which its kernels want rows; any for a layer without.
    std::vector<cpu::ActivationType> rows_on_cpu;
    gpu::Stream& stream;
    Team* team = nullptr;                        // computes on_cpu; polls while the GPU is awaited
    std::chrono::duration<double> patience{60};  // with the GPU
  };
  // How steps are divided.
  struct Division {
    int micro_batches_from = 0;  // sequences of a decode step that has two; 0: never
    int stream_from = 0;         // tokens of a step that streams; 0: never
    CudaStreaming* streaming = nullptr;
  };
  // For steps of up to max_tokens tokens. References outlive the object. One thread, the CPU team's
  // own, makes all calls.
  HybridExperts(const ModelConfig& config, const Parts& parts, int max_tokens);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens) {
    return HandOff::bytes_for(config, max_tokens);
  }

  // From the next step on.
  void divide(const Division& division) {
    check(division.stream_from == 0 || division.streaming, "who streams");
    division_ = division;
  }
  const Division& division() const { return division_; }
  // The number of tokens, up to max_tokens, from which on streaming is faster, measured here and
  // now with one layer, all of whose experts are used; 0: never. Division stays as it is.
  int measured_crossover(int max_tokens, CudaStreaming& streaming);
  void record(Timeline& timeline) { trace_.record(timeline); }

  bool waits(Ticket ticket) override;
  // Enqueues the GPU's part and the CPU's sum, and computes that while the GPU does what was
  // enqueued before. Throws RunError when the GPU has failed or is late; it is not held up by that,
  // and no later step is computed.
  void add_to(Ticket ticket, TensorView y) override;
  bool prefers_micro_batches(int n_sequences) const override;
  void follow(const MicroBatches& step) override;
  void end_step(const MicroBatches& step) override;

 private:
  Ticket start(const ExpertBatch& batch) override;
  bool streams(int64_t n_tokens) const;
  bool cpu_computes(const ExpertBatch& batch) const;
  void add_from_cpu(int layer, StepRows rows, Ticket ticket, TensorView y);
  void serve(int layer, StepRows rows, Ticket ticket);
  void share(const ExpertBatch& batch, Ticket ticket, TensorView y);
  void require_not_failed() const;
  void give_up(int n_sums);

  const Parts parts_;
  gpu::Stream& stream_;
  std::vector<StepTrace::Layer> layers_;
  HandOff hand_off_;
  StepTrace trace_;
  Division division_;
  std::array<ExpertBatch, kMaxTickets> batches_ = {};  // under way
  bool streamed_ = false;                              // some layer of the step
  bool failed_ = false;
};

}  // namespace tandem
