// Rows of tokens as GPUs exchange them: a token's row, the ids of its experts and their weights
// side by side, so that one transfer takes all; and which of several replicas computes them.
#pragma once
#include "core/row_format.h"
#include "gpu_kernels/exchange/nearest_replica.h"
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

// A parcel: a row, the ids of its experts and their weights.
struct ParcelShape {
  int dim, n_active;
  RowFormat format;  // of rows
  constexpr int64_t row_bytes() const { return encoded_bytes(format, dim); }
  // A multiple of 16. For R1 28,736 as floats, 14,400 as BF16 and 7,456 as FP8.
  constexpr int64_t bytes() const { return round_up(row_bytes() + 8 * n_active, int64_t{16}); }
};

// out[t] = x[t], ids[t], weights[t] for t below `tokens`. Rows from there to `rows` get ids of -1.
struct PackRowsArgs {
  Matrix x;            // [tokens, dim]
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  Matrix weights;  // [tokens, n_active]
  ParcelShape shape;
  std::byte* out;  // [rows] parcels
  int tokens, rows;
};
void pack_rows(const Stream& stream, const PackRowsArgs& args);

// out[t, i] = ids[t, i], or -1 where the replica of another rank computes it (nearest_replica.h).
// Ids without owners, and negative ones, stay as they are.
struct OwnIdsArgs {
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  // [experts, max_owners] the ranks that have an expert, ascending, then -1.
  const int32_t* owners;
  int max_owners;
  int32_t* out;  // [tokens, n_active]
  int tokens, n_active;
  int rank;              // this one
  int tokens_of_source;  // consecutive rows are of rank 0, 1, ..; 0: all ranks have all rows
  RankHosts hosts;
};
void own_ids(const Stream& stream, const OwnIdsArgs& args);

}  // namespace tandem::gpu
