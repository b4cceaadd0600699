// Converts weights from the checkpoint's layout to the kernels' layout, in jobs that any thread may
// run; and records their location for the packed cache.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "io/load_jobs.h"
#include "model/experts_layout.h"
#include "model/weights.h"
#include "ops/cpu_weights.h"

namespace tandem {

// A matrix of the checkpoint and its packed form: one matrix, or one per slice.
struct PackedMatrix {
  enum class Way { kTable, kPack, kPackWords, kConvert } way;
  std::string name;
  QuantView stored;
  struct Part {
    int64_t first_row;
    QuantView stored, packed;  // these rows and columns
  };
  std::vector<Part> parts;
};

struct PackedModel {
  ModelWeights weights;  // valid after all load_jobs() have run
  std::vector<PackedMatrix> matrices;
};

// Each job packs some rows of a matrix, or all scales of one; the latter throws Error when a scale
// is NaN, infinite or negative. `model` and `home` must outlive the jobs.
struct PackJobs {
  std::vector<LoadJob> first;  // to run before any of `rest`: scales that INT4 packing needs
  std::vector<LoadJob> rest;
};
PackJobs load_jobs(const PackedModel& model, const CpuWeights& home);

// Reserves memory in `home` for all of `stored` that the layout keeps there, widens vectors at
// once, and leaves matrices to load_jobs(). Routed experts are divided into a slice per node of the
// home's topology, and converted if the layout names a format.
PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home,
                           const ExpertsLayout& experts = {});
// The slices that reserve_packed() uses; they depend on all experts, wherever they are kept.
std::vector<Slice> expert_slices(const ModelWeights& stored, const ModelConfig& config,
                                 const CpuWeights& home, const ExpertsLayout& experts);

// How an expert of a layer is stored and kept: experts of layers with equal shapes can take each
// other's memory.
struct ExpertShape {
  std::vector<int64_t> region_bytes;           // [regions] of one expert
  std::vector<std::vector<int64_t>> matrices;  // sizes and types of each
  bool operator==(const ExpertShape&) const = default;
};
// [layers]; empty for a dense layer.
std::vector<ExpertShape> expert_shapes(ModelWeights& stored, const ModelConfig& config,
                                       const CpuWeights& home, const ExpertsLayout& experts,
                                       const std::vector<Slice>& slices);
// An expert of a layer, and how it is packed.
struct PackedExpert {
  const ExpertsLayout& experts;
  const std::vector<Slice>& slices;
  int layer;
};
// Reserves memory for n experts of a layer, any of them: [n][slices].
std::vector<std::vector<FfnWeights>> reserve_experts(ModelWeights& stored,
                                                     const ModelConfig& config, CpuWeights& home,
                                                     const PackedExpert& of, int n);
// The matrices of the experts that have a place in `places`, for load_jobs().
PackedModel packed_experts(ModelWeights& stored, const ModelConfig& config,
                           const ExpertsLayout& experts, ModelWeights places);

// Bytes that reserve_packed() will take, without the padding of slices.
int64_t packed_bytes(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                     const ExpertsLayout& experts);

// The location of each weight in the regions of `home`, serialized for a packed cache; and the
// inverse: allocate_for() allocates memory for data_bytes bytes, weights_of() returns the views.
// Both throw PackedError when the manifest does not match the configuration, the slices or the
// memory.
std::string manifest_of(const ModelWeights& packed, const ModelConfig& config,
                        const CpuWeights& home, const ExpertsLayout& experts = {});
void allocate_for(std::string_view manifest, int64_t data_bytes, CpuWeights& home);
ModelWeights weights_of(std::string_view manifest, const ModelConfig& config,
                        std::vector<Slice> slices, const CpuWeights& home, cpu::Layout layout,
                        const ExpertsLayout& experts = {});

}  // namespace tandem
