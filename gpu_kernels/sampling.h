// Draws tokens from rows of logits on the GPU by the rules of scheduling/sampler on the host: the
// same filters, the same order of tokens, the same uniform number.
#pragma once
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

struct DrawRow {
  int32_t row;        // row of the logits; entries must differ in it
  float temperature;  // 0: most likely token
  // top_p: kept fraction of the sum; min_p: least fraction of the largest weight. 1 and 0: no
  // limit.
  float top_p, min_p;
  int32_t top_k;   // 0: no limit
  double uniform;  // in [0, 1)
};

// Sums are integers, weights times 2^45, so they do not depend on the order of threads. The host
// sums doubles, so draws within about 10^-9 of a boundary may differ; and within about 10^-6, since
// the exponentials of GPU and host may differ in the last bits.
struct DrawArgs {
  Matrix logits;            // [.., vocab]; overwrites the rows that are drawn from
  const DrawRow* how;       // [n], may be mapped
  const uint32_t* allowed;  // [(vocab + 31) / 32], one bit per token
  int32_t* tokens;          // [n], may be mapped, out; kNotFinite if a logit is not finite
  int n, vocab;             // vocab at most kMaxDrawTokens
};
constexpr int32_t kNotFinite = -1;
constexpr int kMaxDrawTokens = 1 << 18;  // limit for the sum of weights to fit 64 bits
void draw(const Stream& stream, const DrawArgs& args);

}  // namespace tandem::gpu
