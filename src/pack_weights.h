// From weights as the checkpoint stores them to weights as the kernels want them, in pieces that
// any thread may do; and where they lie, for the packed cache.
#pragma once
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/weights.h"
#include "ops/cpu_weights.h"

namespace tandem {

// Some rows of one matrix.
struct PackJob {
  enum class Way { kTable, kPack, kConvert } way;
  QuantView stored, packed;
  int64_t first_row, n_rows;
  const std::byte* source;  // those rows as the checkpoint stores them
  int64_t source_bytes;
  // `rows`: a copy of the source, or the source itself.
  void run(const CpuWeights& home, const std::byte* rows) const {
    switch (way) {
      case Way::kTable:
        std::memcpy(packed.q.row_data(first_row), rows, source_bytes);
        break;
      case Way::kPack:
        home.pack(rows, packed, first_row, n_rows);
        break;
      case Way::kConvert:
        home.convert(rows, stored, packed, first_row, n_rows);
        break;
    }
  }
};

struct PackedModel {
  ModelWeights weights;  // valid once every job has run
  std::vector<PackJob> jobs;
};

// Reserves room in `home` for all of `stored`, widens its vectors at once, and lists the jobs that
// fill the matrices. Routed experts are converted where a format for them is given.
PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home,
                           std::optional<WeightFormat> experts = {});

// Bytes that reserve_packed() will take.
int64_t packed_bytes(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                     std::optional<WeightFormat> experts);

// Where each weight lies in `home`, as bytes for a packed cache; and back, for memory at another
// address. weights_of() throws PackedError when the manifest does not fit the configuration or
// leaves `home`.
std::string manifest_of(const ModelWeights& packed, const ModelConfig& config,
                        std::span<const std::byte> home);
ModelWeights weights_of(std::string_view manifest, const ModelConfig& config,
                        std::span<std::byte> home, cpu::Layout layout);

}  // namespace tandem
