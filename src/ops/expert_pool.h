// The routed experts as the forward pass uses them: a layer's work is submitted, and its sum is
// added when it is needed. The pool decides which device computes which expert (offload/).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "model/batch.h"

namespace tandem {

// One MoE layer of one micro-batch.
struct ExpertBatch {
  int layer;
  // [tokens, dim]. CPU experts also accept rows that are encoded for their kernels
  // (CpuExperts::activations()): kBF16, or kI8 with one scale per row.
  TensorView x;
  Routing routing;    // experts with a negative id are skipped
  int first_row = 0;  // row of the step where x starts
  const float* x_scales = nullptr;
  int micro_batch = 0;  // its number, which is the ticket
};

// Work that was submitted and not yet added, identified by its micro-batch; below
// ExpertPool::kMaxTickets.
using Ticket = int;

// Observes the batches that a pool computes, without changing them.
class ExpertObserver {
 public:
  virtual ~ExpertObserver() = default;
  // Called before the batch's experts start; for a recorded step only while it is recorded.
  virtual void submitted(const ExpertBatch& batch) = 0;
  // Called when all layers of a step of n_tokens are submitted and added; its device may still be
  // computing.
  virtual void step_ended(LayerRange /*layers*/, int /*n_tokens*/) {}
};

// Another process that computes experts for this one.
struct WorkerStatus {
  std::string address;
  bool is_up;
  bool has_joined;     // after the start
  bool is_standby;     // it loads experts of workers that are lost
  int64_t n_experts;   // of every layer that it has
  int64_t n_on_gpu;    // of these that are on its GPU
  bool is_loading;     // it was asked to load some, and has not answered
  int64_t n_requests;  // that were sent
  int64_t n_failures;  // how often it was lost
  double seconds;      // sum over the answered requests, from sending to the answer
  int replica = -1;    // of the backbone, whose link it is; -1: there is one
  bool operator==(const WorkerStatus&) const = default;
};

class ExpertPool {
 public:
  static constexpr int kMaxTickets = kMaxMicroBatches;

  virtual ~ExpertPool() = default;

  // Starts the experts of a batch. Its matrices must not change until add_to(). Throws RunError
  // when a device was lost, and StepFailed when the pool can take other batches afterwards.
  Ticket submit(const ExpertBatch& batch) {
    if (observer_) observer_->submitted(batch);
    return start(batch);
  }
  // Called once, when the backbone has nothing more to enqueue beside the ticket's experts. Returns
  // whether another device computes some of them, so that the backbone may do other work first.
  virtual bool waits(Ticket /*ticket*/) { return false; }
  // Called once after waits(). Computes experts of rows that have come from other ranks, and
  // returns whether sums are on their way to the ranks of the rows, so that the backbone may do
  // other work.
  virtual bool serve(Ticket /*ticket*/) { return false; }
  // y += sum of weight * expert(x), [tokens, dim]; ends the ticket. Throws as submit() does, and
  // ends the ticket then too.
  virtual void add_to(Ticket ticket, TensorView y) = 0;

  // Called before the layers of a step, with the tokens of all replicas of the backbone, each of
  // which divides its own into n_micro_batches (micro_batch_cuts()). One without tokens submits an
  // empty batch for each layer and so computes experts for the others.
  virtual void begin_step(std::span<const Batch> /*replicas*/, int /*n_micro_batches*/) {}
  // In how many micro-batches a step is fastest, up to kMaxTickets; kMeasured: what steps take
  // decides.
  virtual int micro_batches(std::span<const Batch> /*replicas*/, bool /*is_decode*/) const {
    return 1;
  }
  static constexpr int kMeasured = 0;
  // Tickets at a time of a pool whose steps have so many micro-batches.
  static constexpr int n_tickets(int micro_batches) {
    return micro_batches == kMeasured ? kMaxTickets : micro_batches;
  }
  // Whether what a step enqueues on this rank depends on the tokens of other replicas.
  virtual bool depends_on_replicas() const { return true; }
  // Whether a step without tokens submits an empty batch for each layer all the same, because the
  // pool computes experts for other ranks.
  virtual bool computes_for_others() const { return false; }
  // Seconds of the step in which this rank waited for rows and sums of other ranks, or for workers;
  // nothing: not known.
  virtual std::optional<double> seconds_waited() const { return {}; }
  // The workers that compute experts; thread-safe.
  virtual std::vector<WorkerStatus> workers() const { return {}; }
  // Does the host's part of a step, layer by layer, while a device replays its recorded submit()
  // and add_to(). Throws as add_to() does.
  virtual void follow(LayerRange /*layers*/, const MicroBatches& /*step*/) {}
  // Called when every ticket of a step of these layers has been added.
  virtual void end_step(LayerRange layers, const MicroBatches& step) {
    if (observer_) observer_->step_ended(layers, step.n_tokens());
  }

  // Sets the observer, which must outlive its use by the pool; null: none.
  void observe(ExpertObserver* observer) { observer_ = observer; }

 private:
  virtual Ticket start(const ExpertBatch& batch) = 0;

  ExpertObserver* observer_ = nullptr;
};

}  // namespace tandem
