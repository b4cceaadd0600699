// Runs the forward pass of a step: directly, or recorded and replayed by the device; as one pass,
// or as two micro-batches that alternate while experts are computed on another device.
#pragma once
#include "engine/deepseek.h"

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
  // Multi-token prediction, after forward(). `hidden`: rows of that step whose hidden states row i
  // of draft() continues.
  void take_hidden(std::span<const int32_t> rows) { model_.take_hidden(rows); }
  // The same, for rows of logits of the last draft().
  void take_drafted(std::span<const int32_t> rows) { model_.take_drafted(rows); }
  // Computes MTP layer `module` for a step whose token i follows the token of hidden state i: fills
  // the layer's cache, and computes logits() of the tokens after batch.logit_rows.
  void draft(int module, const Batch& batch, KvCache& cache);
  // Logits of the last step in the device's memory, [max_logits, vocab].
  TensorView logits() const { return model_.logits(); }

  Device& device() { return parts_.device; }
  const ModelConfig& config() const { return parts_.config; }
  const StepLimits& limits() const { return limits_; }

 private:
  MicroBatches micro_batches_of(const Batch& step) const;
  void run(LayerRange range, const MicroBatches& step, KvCache& cache);

  const ModelParts parts_;
  const StepLimits limits_;
  DeepSeek model_;
  PassMemory memory_;
};

}  // namespace tandem
