// Models for measurements only: the shapes of a released model, reduced to fit the memory, with
// random weights.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/team.h"
#include "model/weights.h"
#include "ops/cpu_weights.h"

namespace tandem {

// The configuration called `name` (r1, v3, v2-lite, k2, ..) that comes with the program, or that of
// a file or model directory. Throws Error for an unknown name, listing the known ones; `option` is
// where it was given.
ModelConfig bench_config(const std::string& name, const char* option = "--config");

struct WeightFormats {
  WeightFormat backbone;  // attention, dense layers, shared experts; other tensors are BF16
  WeightFormat experts;
};

// The number of experts that are kept.
struct Resident {
  int layers;   // MoE layers
  int experts;  // per layer
};
// The experts of one layer that fit in `budget` bytes, in as many layers as reach `cold` bytes, so
// that weights come from memory and not from a cache. The number of experts is a multiple of the
// router's groups. Throws Error when fewer fit than twice the experts that a token needs.
Resident resident_experts(const ModelConfig& config, WeightFormat format, int64_t budget,
                          int64_t cold);
int64_t cold_bytes();  // 2 GB, or four times the last-level caches

int most_of(const std::vector<int>& values);  // the largest value; 0 if empty

void check_layers(int n_layers);  // throws Error unless 1 to 1000
// The configuration with fewer experts.
ModelConfig with_experts(ModelConfig config, int n_experts);
// The configuration with fewer layers, the first of them dense if the model has dense layers.
ModelConfig with_layers(ModelConfig config, int n_layers);
// The configuration with as many experts per layer as fit in `budget` bytes for all layers.
ModelConfig with_resident_experts(const ModelConfig& config, WeightFormat format, int64_t budget);

// Adds the fields that describe a reduced model and what runs it.
void add_cut_model(nlohmann::ordered_json& report, const char* isa, int n_threads,
                   const ModelConfig& config, WeightFormats formats);

// Generates one tensor at a time as a checkpoint would store it.
class RandomTensor {
 public:
  RandomTensor(WeightFormats formats, const ModelConfig& config)
      : formats_(formats), config_(config) {}
  // The result is valid until the next call. A matrix has scales but no data, a vector has its
  // data.
  QuantView stored(const WeightSpec& spec);
  static void write_rows(const QuantView& stored, WeightUse use, int64_t first, int64_t n,
                         std::byte* to);

 private:
  const WeightFormats formats_;
  const ModelConfig& config_;
  std::vector<float> numbers_;
};

// Fills x, whose rows are contiguous, with normal numbers of deviation 1, like normalised
// activations.
void fill_with_normal(TensorView x);

// Fills `home` with finite random tensors of realistic magnitude where `wanted` returns true; the
// others stay empty. Matrices of one shape and format are equal. Random tokens choose their experts
// independently of each other. Throws Error when memory is insufficient.
ModelWeights random_weights(const ModelConfig& config, WeightFormats formats,
                            const std::function<bool(const WeightSpec&)>& wanted, CpuWeights& home,
                            Team& team);

}  // namespace tandem
