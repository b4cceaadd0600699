// Chooses the next tokens of a step: on the device if it can sample and a request needs the logits
// alone, otherwise with the request's sampler on the host.
#pragma once
#include <memory>
#include <vector>

#include "engine/step_runner.h"
#include "scheduling/sampler.h"

namespace tandem {

class TokenChooser {
 public:
  // Both outlive the object, which allocates all its memory.
  TokenChooser(StepRunner& model, const Vocabulary& vocabulary);

  // Who samples a row of logits, and after how many other rows of the same step.
  struct Use {
    Sampler* sampler;  // null: the row is for logits() or logprobs()
    int n_ahead = 0;
    int replica = 0;  // that has computed the row
  };
  // After forward(): takes the use of each row, the rows of replica 0 first.
  void begin(std::span<const Use> uses);
  // Samples the token of a row; call it at most once per row, in the order of a sampler's rows.
  // Throws Error if its logits are not finite.
  Sampled token(size_t row);
  // The logits of a row without a sampler, [vocab of the model].
  std::span<const float> logits(size_t row) const {
    return {logits_.row<float>(rows_[row].copied), static_cast<size_t>(logits_.cols)};
  }
  // Log-probabilities of a known token and of the n_top most likely in a row without a sampler;
  // call it once per row. Throws Error as token() does; `top` is valid until the next call.
  Sampled logprobs(size_t row, int32_t token, int n_top);

 private:
  std::span<float> host_row(size_t row) const {
    return {logits_.row<float>(rows_[row].copied), static_cast<size_t>(vocabulary_.size)};
  }

  struct Row {
    Sampler* sampler;
    bool is_drawn;   // by the device
    int64_t drawn;   // if so: index of its token
    int64_t copied;  // else: row of logits_
  };

  StepRunner& model_;
  const Vocabulary& vocabulary_;
  const std::vector<uint32_t> allowed_;  // bits of the vocabulary
  Arena arena_;
  TensorView logits_;  // [replicas * max_logits, model vocab], rows that were copied to the host
  std::vector<Row> rows_;
  std::vector<std::vector<Draw>> draws_;      // [replicas]
  std::vector<std::vector<int32_t>> copied_;  // [replicas]
  std::vector<LogitsWanted> wanted_;          // [replicas]
  std::vector<int32_t> drawn_;
  std::vector<TokenLogprob> scratch_;
};

}  // namespace tandem
