// Reads what is wanted of the logits that a device has computed: drawn tokens, or rows.
#pragma once
#include <memory>
#include <vector>

#include "engine/step_message.h"

namespace tandem {

class LogitsReader {
 public:
  // For up to max_rows rows; the device outlives the object.
  LogitsReader(Device& device, const DrawnVocabulary& vocabulary, int max_rows);
  DrawnVocabulary vocabulary() const { return {allowed_, n_tokens_}; }
  // Whether it is the same one.
  bool draws_from(const DrawnVocabulary& vocabulary) const;
  // Whether the device can draw tokens.
  bool draws() const { return sampler_ != nullptr; }
  // Waits for the step. tokens: [draws], -1 where a logit of the row is not finite; rows: [copied,
  // vocab], in host memory.
  void read(TensorView logits, const LogitsWanted& wanted, std::span<int32_t> tokens,
            TensorView rows);

 private:
  Device& device_;
  const std::vector<uint32_t> allowed_;
  const int32_t n_tokens_;
  const std::unique_ptr<DeviceSampler> sampler_;
};

}  // namespace tandem
