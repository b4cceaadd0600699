// Draws tokens from rows of logits on a CPU.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/team.h"
#include "ops/device.h"

namespace tandem {

constexpr bool is_more_likely(float value, int32_t token, float than, int32_t other) {
  return value != than ? value > than : token < other;  // equal ones: the lower token
}

// Draws one token at a time, and keeps the memory for that.
class TokenDraw {
 public:
  // Applies temperature, then top-k, top-p and min-p, then draws with how.uniform: the most likely
  // token if the temperature is 0. Logits of -infinity are left out; one must be finite. The result
  // depends on the arguments alone, on every machine.
  int32_t operator()(std::span<const float> logits, const Draw& how);

 private:
  struct Candidate {
    int32_t token;
    float value;  // probability relative to the most likely
  };
  size_t keep_top_p(size_t n, float top_p);

  std::vector<Candidate> candidates_;  // grows to the number of logits
};

class CpuSampler final : public DeviceSampler {
 public:
  // As Device::make_sampler(). Threads of the team, which outlives the object, draw rows.
  CpuSampler(std::span<const uint32_t> allowed, int n_tokens, Team& team);
  void draw(TensorView logits, std::span<const Draw> how, std::span<int32_t> tokens) override;

 private:
  std::vector<int32_t> excluded_;  // tokens without a bit
  const int n_tokens_;
  Team& team_;
  std::vector<TokenDraw> draws_;  // [threads]
};

}  // namespace tandem
