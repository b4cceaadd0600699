// Weights in host memory, in the layout of one kernel table: one region for each NUMA node's expert
// slices and one for everything else. All weights are reserved first, then packed by many threads.
#pragma once
#include <span>
#include <vector>

#include "core/memory.h"
#include "core/tensor.h"
#include "core/topology.h"
#include "cpu_kernels/kernels.h"
#include "model/weight_format.h"
#include "model/weights.h"

namespace tandem {

class CpuWeights {
 public:
  explicit CpuWeights(const cpu::KernelTable& kernels, Topology topology = {})
      : kernels_(kernels), topology_(std::move(topology)) {}

  const Topology& topology() const { return topology_; }
  // The slices of experts with this inner dimension in this format, stored or converted: multiples
  // of scale blocks, groups and tiles.
  std::vector<Slice> expert_slices(int64_t expert_dim, DType dtype) const;
  static int64_t slice_multiple(DType dtype);
  static constexpr int kSharedRegion = 0;
  // Region of a weight: an expert's slice belongs to its node.
  static int region_of(const WeightSpec& spec) {
    return spec.use == WeightUse::kExpert ? 1 + spec.slice : kSharedRegion;
  }
  int n_regions() const { return 1 + topology_.n_nodes(); }

  // Bytes that reserve() needs for a weight as the checkpoint stores it.
  int64_t packed_bytes(const QuantView& stored) const;

  // Allocates the regions, which begin at pages. With several nodes each is bound to its node, and
  // the shared one is interleaved over all.
  void allocate(const std::vector<int64_t>& region_bytes);
  void allocate(int64_t bytes) { allocate(std::vector<int64_t>{bytes}); }
  // All allocated memory, and one region of it.
  std::span<std::byte> bytes() const { return memory_.span(); }
  std::span<std::byte> region(int i) const { return regions_[i].memory(); }
  // Whether every region is bound to its node.
  bool is_bound() const { return is_bound_; }
  // Offset in bytes() of the region after one of `bytes` bytes at offset `begin`.
  static int64_t next_region(int64_t begin, int64_t bytes);
  // Reserves memory for the packed weight, to be filled by pack() and pack_scales(). Only kernels
  // read it. Throws Error when the layout cannot represent the blocks of the scales.
  QuantView reserve(const QuantView& stored, int region = kSharedRegion);
  // Packs n_rows rows from `rows`, dense and as the checkpoint stores them, to `packed` from
  // first_row on. first_row is a multiple of kPackRows, and n_rows is too except at the end.
  // Thread-safe for different rows.
  void pack(const void* rows, const QuantView& packed, int64_t first_row, int64_t n_rows) const;
  // Packs all scales of `packed` from `scales` as the checkpoint stores them.
  static void pack_scales(const void* scales, const QuantView& packed);

  // The same for kI4Words, packed as kI4: first all scales, BF16 in the checkpoint, then the rows.
  void pack_words_scales(const void* scales, const QuantView& packed) const;
  void pack_words(const void* rows, const QuantView& packed, int64_t first_row,
                  int64_t n_rows) const;

  // The same for a matrix that is converted to another format. convert() replaces pack() and reads
  // the scales of `stored`, with the row stride of `stored`. Throws Error when groups do not divide
  // the columns.
  int64_t converted_bytes(const QuantView& stored, WeightFormat format) const;
  QuantView reserve_converted(const QuantView& stored, WeightFormat format,
                              int region = kSharedRegion);
  void convert(const void* rows, const QuantView& stored, const QuantView& packed,
               int64_t first_row, int64_t n_rows) const;

  // A matrix for row look-ups, stored row by row as in the checkpoint.
  static int64_t table_bytes(const QuantView& stored);
  QuantView reserve_table(const QuantView& stored);

  // A vector of gains or biases, widened to float [1, n].
  static int64_t vector_bytes(const QuantView& stored);
  QuantView keep_vector(const QuantView& stored);

 private:
  TensorView reserve_codes(int64_t rows, int64_t cols, DType dtype, int region);
  void decode_row(const std::byte* codes, const QuantView& stored, int64_t at,
                  std::vector<float>& row) const;
  void quantize(const std::vector<float>& row, std::byte* codes, const QuantView& packed,
                int64_t at) const;
  class RowScales;
  RowScales row_scales(const QuantView& packed, int64_t at) const;

  const cpu::KernelTable& kernels_;
  const Topology topology_;
  Buffer memory_;
  std::vector<Arena> regions_;
  bool is_bound_ = true;
};

constexpr int64_t kPackRows = cpu::kPanelRows;

cpu::WeightType kernel_type(DType dtype);
// The fastest type of activations for weights of a type.
cpu::ActivationType activation_for(const cpu::KernelTable& kernels, DType weights);
cpu::Weight kernel_weight(const QuantView& packed);

}  // namespace tandem
