// Rows of tokens that go only to the GPUs of ranks that compute their experts. A parcel has the ids
// of those of its experts that the rank computes, -1 for the others.
//
// Each rank's parcels lie either `n_each` apart, wherever a GPU knows alone how many there are, or,
// where n_each is 0, follow those of the ranks before. Sums come back in the same places.
#pragma once
#include "gpu_kernels/exchange/exchange.h"
#include "gpu_kernels/exchange/nearest_replica.h"
#include "gpu_kernels/exchange/peer_windows.h"
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

// slots[t, r] = which of rank r's parcels token t is, in the order of tokens, or -1: rank r
// computes none of its experts. counts[r] = parcels for rank r. An expert that several ranks have
// is computed by one of them (nearest_replica.h), one that none has, and a negative id, by none.
struct ChooseRanksArgs {
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  const int32_t* owners;  // [experts, n_ranks] the ranks that have an expert, ascending, then -1
  int tokens, n_active, n_ranks;
  int rank;  // this one, whose tokens they are
  RankHosts hosts;
  int32_t* slots;   // [tokens, n_ranks]
  int32_t* counts;  // [n_ranks]
};
void choose_ranks(const Stream& stream, const ChooseRanksArgs& args);

// Writes the parcels of tokens that choose_ranks() has given slots.
struct PackParcelsArgs {
  ChooseRanksArgs chosen = {};
  Matrix x = {}, weights = {};  // [tokens, dim], [tokens, n_active]
  ParcelShape shape = {};
  std::byte* out = nullptr;  // of all ranks, n_each = 0; null: into the windows, from `offset` on
  PeerAddresses peers = {};  // [ranks]
  int64_t offset = 0;        // bytes
};
void pack_parcels(const Stream& stream, const PackParcelsArgs& args);

// Parcels that have come, as rows for the experts. A row without a parcel gets ids of -1.
struct UnpackParcelsArgs {
  const std::byte* parcels;
  const int32_t* counts = nullptr;  // [ranks] that have come from each; not read if n_each is 0
  int n_each = 0, rows = 0;
  ParcelShape shape = {};
  float* x = nullptr;        // [rows, dim]
  int32_t* ids = nullptr;    // [rows, n_active]
  float* weights = nullptr;  // [rows, n_active]
};
void unpack_parcels(const Stream& stream, const UnpackParcelsArgs& args);

// Writes the sums of rows that unpack_parcels() has read: to `out`, where they follow each other,
// or, where that is null and n_each > 0, to the windows of the ranks that sent the rows, n_each
// from byte `offset` on.
struct SendSumsArgs {
  Matrix sums = {};                    // [rows, dim]
  RowFormat format = RowFormat::kF32;  // not kFp8
  std::byte* out = nullptr;            // [rows, encoded_bytes()]
  const int32_t* counts = nullptr;     // [ranks] parcels that had come from each
  int n_each = 0, rows = 0, dim = 0;
  PeerAddresses peers = {};
  int64_t offset = 0;
};
void send_sums(const Stream& stream, const SendSumsArgs& args);

// y[t] += the sums that have come back for token t, themselves added in ascending order of ranks.
struct AddSumsArgs {
  const std::byte* sums;  // [.., encoded_bytes()]
  RowFormat format;       // of sums; not kFp8
  const int32_t* slots;   // of choose_ranks()
  const int32_t* counts;
  Matrix y;  // [tokens, dim]
  int n_each, tokens, n_ranks, dim;
};
void add_sums(const Stream& stream, const AddSumsArgs& args);

// Tells each rank that what this one has written to its window is there: raises the word at byte
// `word` of the window. Counts begin with all bits set.
struct SignalPeersArgs {
  PeerAddresses peers;
  int64_t word;
  const int32_t* counts;  // [ranks] of which each gets its own, before; null: none
  int64_t count;          // byte of the window for it
  uint32_t* n_raised;     // in GPU memory: calls so far, less one
  int n_ranks;
};
void signal_peers(const Stream& stream, const SignalPeersArgs& args);

// Waits for the next signal of each rank.
struct AwaitPeersArgs {
  const uint32_t* words;  // [ranks] of this rank's window
  uint32_t* n_awaited;    // in GPU memory: calls so far, less one
  uint32_t* passed;       // mapped: changes with each call
  int n_ranks;
};
void await_peers(const Stream& stream, const AwaitPeersArgs& args);

}  // namespace tandem::gpu
