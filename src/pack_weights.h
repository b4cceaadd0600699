// From weights as the checkpoint stores them to weights as the kernels want them, in pieces that
// any thread may do.
#pragma once
#include <cstring>
#include <optional>
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

}  // namespace tandem
