// The router of a MoE layer on the GPU.
#pragma once
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/products/products.h"

namespace tandem::gpu {

// Multiplies x by the rows of w in float, without rounding, and chooses n_active experts per token
// by these logits, as class Gate of DeepSeek-V3's inference/model.py does; route_token() is the CPU
// reference. Of equal scores the lower index wins. One kernel does both.
enum class RouterScoring : uint8_t { kSoftmax, kSigmoid };
enum class GroupScore : uint8_t { kNone, kBest, kSumOfBestTwo };  // kNone: groups have no effect
// Replaces the chosen experts: token i gets row simulated_row() of `ids`, as token number
// first_token
// + i * token_stride of its step.
struct SimulatedRouterRows {
  const int32_t* ids = nullptr;  // [n_rows, n_active]; null: the router chooses
  int64_t n_rows = 0;
  bool varies = false;
  const int32_t* positions = nullptr;  // [tokens]
  int64_t first_token = 0, token_stride = 1;
};
struct RouterArgs {
  const float* x = nullptr;  // [tokens, w.cols]; null: the logits are given
  int64_t x_stride = 0;
  Weight w = {};             // [n_experts, ..], any type and scale blocks
  Workspace workspace = {};  // route_partials() floats
  int n_multiprocessors = 1;
  Matrix logits;      // [tokens, n_experts], out if x is given
  const float* bias;  // [n_experts] added for selection only; null: none
  Matrix weights;     // [tokens, n_active], out
  int32_t* ids;       // [tokens, n_active], rows ids_stride apart, out; best first
  int64_t ids_stride;
  int tokens, n_experts, n_active;
  int n_groups, n_active_groups;
  RouterScoring scoring;
  GroupScore group_score;
  // Normalizes each token's weights to sum 1 before scaling.
  bool normalize;
  float scale;  // factor of the weights
  SimulatedRouterRows simulated = {};
  // [n_experts], to which the number of tokens that choose each expert is added, modulo 2^32;
  // null: they are not counted.
  uint32_t* uses = nullptr;
};
void route(const Stream& stream, const RouterArgs& args);
// Floats of Workspace::partial; reads tokens, n_experts, w.cols and n_multiprocessors.
int64_t route_partials(const RouterArgs& args);

}  // namespace tandem::gpu
