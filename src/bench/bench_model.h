// Models that exist only to be measured: the shapes of a released one, cut to what fits the memory,
// with random weights.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/team.h"
#include "model/weights.h"
#include "ops/cpu_weights.h"

namespace tandem {

// The configuration called `name` (r1, v3, v2-lite, k2, ..), which the program brings along, or
// that of a file or model directory. Throws Error for an unknown name, listing those known.
ModelConfig bench_config(const std::string& name);

struct WeightFormats {
  WeightFormat backbone;  // attention, dense layers, shared experts; the rest is BF16
  WeightFormat experts;
};
// "auto" is the checkpoint's own format; INT8 and INT4 are for experts alone. Throw Error for an
// unknown name.
WeightFormat backbone_format(const std::string& name, const ModelConfig& config);
WeightFormat expert_format(const std::string& name, const ModelConfig& config);

// How much of a model's experts is kept.
struct Resident {
  int layers;   // that have experts
  int experts;  // of each
};
// As many experts as `budget` bytes hold, of one layer, or of as many layers as make `cold` bytes,
// so that weights come from memory and not from a cache. The number of experts is a multiple of the
// router's groups. Throws Error when not even twice the experts that a token needs fit.
Resident resident_experts(const ModelConfig& config, WeightFormat format, int64_t budget,
                          int64_t cold);
int64_t cold_bytes();  // 2 GB, or four times the last-level caches

int most_of(const std::vector<int>& values);  // 0: there are none

void check_layers(int n_layers);  // 1 to 1000, else throws Error
// The configuration with fewer experts.
ModelConfig with_experts(ModelConfig config, int n_experts);
// With fewer layers, the first of them dense if the model has such.
ModelConfig with_layers(ModelConfig config, int n_layers);
// With as many experts in each layer as `budget` bytes hold, in all layers together.
ModelConfig with_resident_experts(const ModelConfig& config, WeightFormat format, int64_t budget);

// What a report says of a cut model and of what runs it.
void add_cut_model(nlohmann::ordered_json& report, const char* isa, int n_threads,
                   const ModelConfig& config, WeightFormats formats);

// One tensor at a time as a checkpoint would hold it.
class RandomTensor {
 public:
  RandomTensor(WeightFormats formats, const ModelConfig& config)
      : formats_(formats), config_(config) {}
  // A matrix has no data, its scales have, a vector is all there; until the next call.
  QuantView stored(const WeightSpec& spec);
  static void write_rows(const QuantView& stored, WeightUse use, int64_t first, int64_t n,
                         std::byte* to);

 private:
  const WeightFormats formats_;
  const ModelConfig& config_;
  std::vector<float> numbers_;
};

// Numbers of deviation 1, as normalised activations are; x has no gaps between its rows.
void fill_with_normal(TensorView x);

// Fills `home` with the tensors for which `wanted` says so, all finite and of the size that trained
// ones have; the others stay empty. Matrices of one shape and format are equal. Random tokens
// choose their experts independently of each other. Throws Error when the memory does not hold
// them.
ModelWeights random_weights(const ModelConfig& config, WeightFormats formats,
                            const std::function<bool(const WeightSpec&)>& wanted, CpuWeights& home,
                            Team& team);

}  // namespace tandem
