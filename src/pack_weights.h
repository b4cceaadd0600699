// From weights as the checkpoint stores them to weights as the kernels want them, in pieces that
// any thread may do; and where they lie, for the packed cache.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/load_jobs.h"
#include "model/weights.h"
#include "ops/cpu_weights.h"
#include "ops/experts_layout.h"

namespace tandem {

// A matrix of the checkpoint and what becomes of it: one matrix, or one a slice.
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
  ModelWeights weights;  // valid once all load_jobs() have run
  std::vector<PackedMatrix> matrices;
};

// Some rows of a matrix each, or all scales of one; the latter throw Error when a scale is NaN,
// infinite or negative. `model` and `home` must outlive them.
struct PackJobs {
  std::vector<LoadJob> first;  // all of these before any of `rest`: scales that packed INT4 needs
  std::vector<LoadJob> rest;
};
PackJobs load_jobs(const PackedModel& model, const CpuWeights& home);

// Reserves room in `home` for all of `stored` that the layout keeps there, widens its vectors at
// once, and leaves the matrices to load_jobs(). Routed experts are cut to a slice for each node of
// the home's topology, and converted where the layout names a format.
PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home,
                           const ExpertsLayout& experts = {});
// How it cuts them; that is decided by all of a layer's experts, wherever they are kept.
std::vector<Slice> expert_slices(const ModelWeights& stored, const ModelConfig& config,
                                 const CpuWeights& home, const ExpertsLayout& experts);

// Bytes that reserve_packed() will take, but for what cutting fills up.
int64_t packed_bytes(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                     const ExpertsLayout& experts);

// Where each weight lies in which region of `home`, as bytes for a packed cache; and back: first
// memory for data of so many bytes, then its views. Both throw PackedError when the manifest does
// not fit the configuration, the slices or the memory.
std::string manifest_of(const ModelWeights& packed, const ModelConfig& config,
                        const CpuWeights& home, const ExpertsLayout& experts = {});
void allocate_for(std::string_view manifest, int64_t data_bytes, CpuWeights& home);
ModelWeights weights_of(std::string_view manifest, const ModelConfig& config,
                        std::vector<Slice> slices, const CpuWeights& home, cpu::Layout layout,
                        const ExpertsLayout& experts = {});

}  // namespace tandem
