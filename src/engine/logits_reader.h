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
  // Whether the device can draw tokens.
  bool draws() const { return sampler_ != nullptr; }
  // Waits for the step. tokens: [draws], -1 where a logit of the row is not finite; rows: [copied,
  // vocab], in host memory.
  void read(TensorView logits, const LogitsWanted& wanted, std::span<int32_t> tokens,
            TensorView rows);

 private:
  Device& device_;
  const std::unique_ptr<DeviceSampler> sampler_;
};

}  // namespace tandem
