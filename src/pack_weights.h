// From weights as the checkpoint stores them to weights as the kernels want them, in pieces that
// any thread may do.
#pragma once
#include <cstring>
#include <vector>

#include "model/weights.h"
#include "ops/cpu_weights.h"

namespace tandem {

// Some rows of one matrix.
struct PackJob {
  QuantView packed;
  int64_t first_row, n_rows;
  const std::byte* source;  // those rows as the checkpoint stores them
  int64_t source_bytes;
  bool is_table;  // of rows that are looked up
  // `rows`: a copy of the source, or the source itself.
  void run(const CpuWeights& home, const std::byte* rows) const {
    if (is_table) {
      std::memcpy(packed.q.row_data(first_row), rows, source_bytes);
    } else {
      home.pack(rows, packed, first_row, n_rows);
    }
  }
};

struct PackedModel {
  ModelWeights weights;  // valid once every job has run
  std::vector<PackJob> jobs;
};

// Reserves room in `home` for all of `stored`, widens its vectors at once, and lists the jobs that
// fill the matrices.
PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home);

}  // namespace tandem
