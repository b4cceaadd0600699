// Routed experts of a backbone on a GPU: some on the card, the others in host memory, computed at
// the same time. One kernel writes what the CPU needs into mapped memory, one reads the sum there;
// signals in mapped words order them, so that a step may be one recorded graph (docs/hybrid.md).
#pragma once
#include <chrono>

#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "gpu_kernels/hand_off.h"
#include "gpu_kernels/signals.h"
#include "offload/cuda_experts.h"
#include "offload/cuda_streaming.h"
#include "offload/timeline.h"

namespace tandem {

class HybridExperts final : public RoutedExperts {
 public:
  struct Parts {
    const ModelWeights& weights;  // on the card, with the experts that are there
    CudaExperts& on_card;
    RoutedExperts& on_cpu;  // has all others, and takes rows as CpuExperts does
    // [layers] in which its kernels want rows; any for a layer without.
    std::vector<cpu::ActivationType> rows_on_cpu;
    gpu::Stream& stream;
  };
  // For steps of up to max_tokens tokens. References outlive the object. One thread, the CPU team's
  // own, makes all calls.
  HybridExperts(const ModelConfig& config, const Parts& parts, int max_tokens);
  // On the card.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  // Enqueues the hand-down, and the card's experts.
  void submit(const ExpertBatch& batch) override;
  // Enqueues the card's own part; of a layer that is streamed computes all.
  void add_to(TensorView y) override;
  // Enqueues the CPU's sum, then computes it, while the card does what was enqueued before: returns
  // when it is there for the card to read. Throws Error when the card has failed or does not come
  // to this layer in time; it is not held up by that, and what it computes is of no use from then
  // on.
  void add_rest_to(int layer, int first_row, TensorView y) override;
  bool wants_halves(int n_sequences) const override;
  // The CPU's part of all layers; throws the same.
  void follow(const StepParts& step) override;

  // Steps in which so many sequences and more decode go in two halves, so that the card has one
  // while the CPU has the other; 0: none.
  void halve_from(int n_sequences) { halve_from_ = n_sequences; }

  // Steps of so many tokens and more bring experts of host memory to the card, as `streaming`
  // divides them.
  void stream_from(int n_tokens, CudaStreaming& streaming);
  // From how many tokens on, up to max_tokens, that is faster, measured here and now with one
  // layer, whose experts are all used; 0: never.
  int measured_crossover(int max_tokens, CudaStreaming& streaming);

  // From now on, in every step, which then ends in waiting for the card. Recorded steps that exist
  // are not concerned.
  void record(Timeline& timeline);
  // While the CPU polls for the card, the threads that compute its part do so as well.
  void keep_awake(Team& team) { team_ = &team; }
  // How long the CPU waits for the card.
  void set_patience(std::chrono::duration<double> patience) { patience_ = patience; }

 private:
  struct Layer {
    bool on_card = false, on_cpu = false;
    gpu::RowType type = gpu::RowType::kF32;
  };
  // Of a step.
  struct Rows {
    int first, n;
    int half() const { return first > 0 ? 1 : 0; }
  };
  static Rows rows_of(const ExpertBatch& b) { return {b.first_row, static_cast<int>(b.x.rows)}; }
  bool streams(int64_t n_tokens) const;
  TensorView dense_ids(int64_t n_tokens) const;
  void hand_down(const ExpertBatch& batch);
  void serve(int layer, Rows rows);
  void share(int layer, TensorView y);
  TensorView sum_for(Rows rows) const;
  void give_up(int n_sums);
  void await_card(int layer);
  ExpertBatch batch_on_cpu(int layer, Rows rows) const;

  // Places in a layer's work on the card.
  enum Point {
    kEntered,
    kHandedDown,
    kSubmitted,
    kOthersDone,
    kCardDone,
    kAwaits,
    kSumSeen,
    kLeft,
    kPoints
  };
  struct CpuTimes {
    double waits, begins, ends;
  };
  uint64_t* stamp_at(int layer, int half, Point point) const {
    return stamps_.as<uint64_t>() + (half * std::ssize(layers_) + layer) * kPoints + point;
  }
  void stamp(int layer, int half, Point point);
  double seconds_of(int layer, int half, Point point) const;
  CpuTimes& cpu_times(int layer, int half) { return cpu_times_[half * layers_.size() + layer]; }
  void collect(int n_tokens, int n_parts);
  void collect_half(int half);

  const ModelConfig& c_;
  CudaExperts& card_;
  RoutedExperts& cpu_;
  gpu::Stream& stream_;
  std::chrono::duration<double> patience_{60};
  std::vector<Layer> layers_;
  gpu::Buffer places_;                         // [layers, n_experts] among those of the card
  gpu::Buffer card_ids_;                       // [max_tokens, n_active]
  gpu::Buffer ids_, weights_, scales_, rows_;  // mapped, handed down
  gpu::Buffer sum_;                            // mapped, [max_tokens, dim]
  gpu::SignalToHost handed_down_;
  gpu::SignalToStream sum_is_there_;
  ExpertBatch batch_ = {};  // of the last submit()
  int halve_from_ = 0;
  Team* team_ = nullptr;  // kept awake
  int n_open_ = 0;        // submitted, without add_rest_to() yet
  bool failed_ = false;
  CudaStreaming* streaming_ = nullptr;
  int stream_from_ = 0;
  bool streamed_ = false;  // the step of the last add_to()

  Timeline* timeline_ = nullptr;
  gpu::Buffer stamps_;               // mapped, [2, layers, kPoints]
  std::vector<CpuTimes> cpu_times_;  // [2, layers]
  double clock_offset_ = 0;          // the CPU's clock less the card's
};

}  // namespace tandem
