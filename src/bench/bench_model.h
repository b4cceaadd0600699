// Models that exist only to be measured: the shapes of a released one, cut to what fits the memory,
// with random weights.
#pragma once
#include <functional>
#include <string>

#include "core/team.h"
#include "model/weights.h"
#include "ops/cpu_weights.h"

namespace tandem {

// The configuration called `name` (r1, v3, v2-lite, k2, ..), which the program brings along, or
// that of a file or model directory. Throws Error for an unknown name, listing those known.
ModelConfig bench_config(const std::string& name);

constexpr int kDefaultScaleBlock = 128;  // of FP8 where the configuration has none

struct WeightFormats {
  DType backbone;  // attention, dense layers, shared experts; embedding, head and router are BF16
  DType experts;
};
// "auto" is the checkpoint's own format. Throws Error for an unknown name.
DType weight_format(const std::string& name, const ModelConfig& config);
const char* format_name(DType format);

// Bytes of a matrix's numbers and scales, as a product must read them.
int64_t weight_bytes(const QuantView& w);
int64_t weight_bytes(int64_t rows, int64_t cols, DType format, int scale_block);
int64_t expert_bytes(const ModelConfig& config, DType format);

// How much of a model's experts is kept.
struct Resident {
  int layers;   // that have experts
  int experts;  // of each
};
// As many experts as `budget` bytes hold, of one layer, or of as many layers as make `cold` bytes,
// so that weights come from memory and not from a cache. The number of experts is a multiple of the
// router's groups. Throws Error when not even twice the experts that a token needs fit.
Resident resident_experts(const ModelConfig& config, DType format, int64_t budget, int64_t cold);
int64_t cold_bytes();  // 2 GB, or four times the last-level caches

// The configuration with fewer experts.
ModelConfig with_experts(ModelConfig config, int n_experts);

// Fills `home` with the tensors for which `wanted` says so, all finite and of the size that trained
// ones have; the others stay empty. Throws Error when the memory does not hold them.
ModelWeights random_weights(const ModelConfig& config, WeightFormats formats,
                            const std::function<bool(const WeightSpec&)>& wanted, CpuWeights& home,
                            Team& team);

}  // namespace tandem
