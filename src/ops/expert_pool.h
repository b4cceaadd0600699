// The routed experts as the forward pass sees them: a layer's work is submitted, and its sum is
// added when it is wanted. Who computes which expert is decided behind this (offload/).
#pragma once
#include "model/batch.h"

namespace tandem {

// One MoE layer of one micro-batch.
struct ExpertBatch {
  int layer;
  // [tokens, dim]. CPU experts also take rows that are already encoded for their kernels
  // (CpuExperts::activations()): kBF16, or kI8 with a scale a row.
  TensorView x;
  Routing routing;    // experts with a negative id are left out
  int first_row = 0;  // row of the step that the first row of x is
  const float* x_scales = nullptr;
};

// Work that was submitted and not yet added: the micro-batch that it is of, below
// ExpertPool::kMaxTickets.
using Ticket = int;
inline Ticket ticket_of(int first_row) { return first_row > 0 ? 1 : 0; }

// Sees what a pool is asked for, without changing it.
class ExpertObserver {
 public:
  virtual ~ExpertObserver() = default;
  // Before the batch's experts start. A recorded step calls it while it is recorded only.
  virtual void submitted(const ExpertBatch& batch) = 0;
  // All layers of a step of n_tokens are submitted and added; its device may still be computing.
  virtual void step_ended(int /*n_tokens*/) {}
};

class ExpertPool {
 public:
  static constexpr int kMaxTickets = 2;  // one a micro-batch

  virtual ~ExpertPool() = default;

  // Starts the experts of a batch. Its matrices stay as they are until add_to(). Throws RunError
  // when a device was lost.
  Ticket submit(const ExpertBatch& batch) {
    if (observer_) observer_->submitted(batch);
    return start(batch);
  }
  // Called once, when the backbone has nothing more to enqueue beside the ticket's experts. Whether
  // another device computes some of them, so that the backbone may turn to other work first.
  virtual bool waits(Ticket /*ticket*/) { return false; }
  // y += the sum of weight * expert(x), [tokens, dim], and ends the ticket. Throws RunError when a
  // device was lost.
  virtual void add_to(Ticket ticket, TensorView y) = 0;

  // Whether a step that decodes so many sequences takes less time as two micro-batches.
  virtual bool prefers_micro_batches(int /*n_sequences*/) const { return false; }
  // A device replays the recorded submit() and add_to() of a whole step: does the host's share of
  // it, layer by layer. Throws as add_to().
  virtual void follow(const MicroBatches& /*step*/) {}
  // Every ticket of the step is added.
  virtual void end_step(const MicroBatches& step) {
    if (observer_) observer_->step_ended(step.n_tokens());
  }

  // Notified from now on; null: no observer. Must outlive its use by the pool.
  void observe(ExpertObserver* observer) { observer_ = observer; }

 private:
  virtual Ticket start(const ExpertBatch& batch) = 0;

  ExpertObserver* observer_ = nullptr;
};

}  // namespace tandem
