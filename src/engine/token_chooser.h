// The next tokens of a step: the device draws them where it can and a request needs no more than
// the logits; else the logits come to the host, to the request's sampler.
#pragma once
#include <memory>
#include <vector>

#include "engine/sampler.h"
#include "engine/step_runner.h"

namespace tandem {

class TokenChooser {
 public:
  // Both outlive the object, which allocates all it needs.
  TokenChooser(StepRunner& model, const Vocabulary& vocabulary);

  // After forward(): a sampler for each of its rows of logits; null: the row is for logits() and
  // logprobs().
  void begin(std::span<Sampler* const> samplers);
  // The token of a row, once. Throws Error if its logits are not finite.
  Sampled token(size_t row);
  // A row [model's vocabulary] that begin() was given no sampler for.
  std::span<const float> logits(size_t row) const {
    return {logits_.row<float>(static_cast<int64_t>(row)), static_cast<size_t>(logits_.cols)};
  }
  // What a row says of a token that is known, once. Throws Error as token(); its `top` is valid
  // until the next call.
  Sampled logprobs(size_t row, int32_t token, int n_top);

 private:
  std::span<float> host_row(size_t row) const {
    return {logits_.row<float>(static_cast<int64_t>(row)), static_cast<size_t>(vocabulary_.size)};
  }

  struct Row {
    Sampler* sampler;
    int32_t drawn;   // by the device, if it
    bool on_device;  // draws this row
  };

  StepRunner& model_;
  const Vocabulary& vocabulary_;
  Arena arena_;
  TensorView logits_;  // [max_logits, model vocab], the rows that came to the host
  const std::unique_ptr<DeviceSampler> device_sampler_;  // null: the device does not draw
  std::vector<Row> rows_;
  std::vector<Draw> draws_;
  std::vector<int32_t> drawn_;
  std::vector<TokenLogprob> scratch_;
};

}  // namespace tandem
