// Chooses the next tokens of a step: on the device if it can sample and a request needs the logits
// alone, otherwise with the request's sampler on the host.
#pragma once
#include <memory>
#include <vector>

#include "engine/sampler.h"
#include "engine/step_runner.h"

namespace tandem {

class TokenChooser {
 public:
  // Both outlive the object, which allocates all its memory.
  TokenChooser(StepRunner& model, const Vocabulary& vocabulary);

  // Who samples a row of logits, and after how many other rows of the same step.
  struct Use {
    Sampler* sampler;  // null: the row is for logits() or logprobs()
    int n_ahead = 0;
  };
  // After forward(): takes the use of each row.
  void begin(std::span<const Use> uses);
  // Samples the token of a row; call it at most once per row, in the order of a sampler's rows.
  // Throws Error if its logits are not finite.
  Sampled token(size_t row);
  // The logits of a row without a sampler, [vocab of the model].
  std::span<const float> logits(size_t row) const {
    return {logits_.row<float>(static_cast<int64_t>(row)), static_cast<size_t>(logits_.cols)};
  }
  // Log-probabilities of a known token and of the n_top most likely in a row without a sampler;
  // call it once per row. Throws Error as token() does; `top` is valid until the next call.
  Sampled logprobs(size_t row, int32_t token, int n_top);

 private:
  std::span<float> host_row(size_t row) const {
    return {logits_.row<float>(static_cast<int64_t>(row)), static_cast<size_t>(vocabulary_.size)};
  }

  struct Row {
    Sampler* sampler;
    int32_t drawn;   // the device's token, if on_device
    bool on_device;  // the device samples this row
  };

  StepRunner& model_;
  const Vocabulary& vocabulary_;
  Arena arena_;
  TensorView logits_;  // [max_logits, model vocab], the rows that were copied to the host
  const std::unique_ptr<DeviceSampler> device_sampler_;  // null: the device does not draw
  std::vector<Row> rows_;
  std::vector<Draw> draws_;
  std::vector<int32_t> drawn_;
  std::vector<TokenLogprob> scratch_;
};

}  // namespace tandem
