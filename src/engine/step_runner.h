// Runs the forward pass of a step: directly, or recorded and replayed by the device; as one pass,
// or as two micro-batches that alternate while experts are computed on another device.
#pragma once
#include "engine/deepseek.h"
#include "engine/step_channel.h"

namespace tandem {

class StepRunner {
 public:
  StepRunner(const ModelParts& parts, StepLimits limits, AttentionForm form);

  // Fills the cache for every token of `batch` and computes one row of logits() for each of
  // batch.logit_rows. The step may still be running when this returns; later work on device()
  // follows it. Throws RunError when a device was lost.
  void forward(const Batch& batch, KvCache& cache);
  // The same, and copies the logits [n_logits, vocab] to the host.
  void forward(const Batch& batch, KvCache& cache, TensorView logits);
  // After forward(): computes layer `module` for multi-token prediction, for a step whose token i
  // follows the token of hidden state i: fills the layer's cache, and computes logits() of the
  // tokens after batch.logit_rows. Throws RunError as forward() does.
  void draft(int module, HiddenStates states, const Batch& batch, KvCache& cache);
  // Copies a page of the cache to another one.
  void copy_page(KvCache& cache, int32_t from, int32_t to);
  // From now on the other ranks of the channel are told of every call of the above; this is their
  // model of that number.
  void announce_on(StepChannel& channel, int number) {
    channel_ = &channel;
    number_ = number;
  }
  // Logits of the last step in the device's memory, [max_logits, vocab].
  TensorView logits() const { return model_.logits(); }

  Device& device() { return parts_.device; }
  const ModelConfig& config() const { return parts_.config; }
  const StepLimits& limits() const { return limits_; }

 private:
  // The operations of a step.
  struct Work {
    LayerRange layers;
    int variant;     // of these layers' operations
    bool is_decode;  // the next token of each sequence, with drafts or without: such steps repeat
    const Batch& batch;
    const MicroBatches& step;  // `batch` as it passes through the layers
    KvCache& cache;
  };
  StepChannel::Turn announced(StepOrder order, const Batch& batch = {}) const;
  bool is_decode(const Batch& step) const;
  MicroBatches micro_batches_of(const Batch& step) const;
  void compute(const Work& work, const std::function<void()>& enqueue);
  void run(const Work& work);

  const ModelParts parts_;
  const StepLimits limits_;
  DeepSeek model_;
  PassMemory memory_;
  StepChannel* channel_ = nullptr;  // null: no other rank repeats the steps
  int number_ = 0;                  // of this model in the channel
};

}  // namespace tandem
