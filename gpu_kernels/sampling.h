// Tokens drawn from rows of logits on the card by the rules of engine/sampler, the host's twin: the
// same filters, the same order of tokens, the same uniform number.
#pragma once
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

struct DrawRow {
  int32_t row;         // of the logits; another one for each
  float temperature;   // 0: the likeliest token
  float top_p, min_p;  // of the sum and of the likeliest; 1 and 0: all
  int32_t top_k;       // 0: all
  double uniform;      // in [0, 1)
};

// Sums are of whole numbers, weights times 2^45: they do not depend on the order of threads. The
// host's are of doubles; so draws within about 10^-9 of a boundary may differ, and, since the
// card's exponential may have other last bits than the host's, within about 10^-6.
struct DrawArgs {
  Matrix logits;            // [.., vocab]; rows that are drawn from are consumed
  const DrawRow* how;       // [n], may be mapped
  const uint32_t* allowed;  // [(vocab + 31) / 32], a bit a token
  int32_t* tokens;          // [n], may be mapped, out; kNotFinite where a logit is not
  int n, vocab;             // vocab at most kMaxDrawTokens
};
constexpr int32_t kNotFinite = -1;
constexpr int kMaxDrawTokens = 1 << 18;  // whose weights' sum fits 64 bits
void draw(const Stream& stream, const DrawArgs& args);

}  // namespace tandem::gpu
