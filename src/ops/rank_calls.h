// What ranks do together with matrices in host memory: CPUs with their own, and GPUs beside CPUs
// with copies of theirs.
#pragma once
#include <span>
#include <vector>

#include "comm/group.h"
#include "core/tensor.h"
#include "core/topology.h"
#include "model/batch.h"

namespace tandem {

// The ranks with which a rank computes the backbone, whose groups outlive their use.
struct RankGroups {
  Group* replica = nullptr;  // divides the layers; null: this rank has them whole
  // Groups of two: this rank and that of the pipeline stage before, or after; null: there is none.
  Group* before = nullptr;
  Group* after = nullptr;
  Group* like_ranks = nullptr;  // this rank's like of all replicas; null: they share nothing
  // The first rank of the replica chooses the experts for all: kernels whose last bits differ may
  // choose differently, and an expert would be computed twice or not at all.
  bool first_routes = false;
};

class RankCalls {
 public:
  RankCalls() = default;
  explicit RankCalls(const RankGroups& groups) : groups_(groups) {}

  // Whether several ranks divide the layers.
  bool divide() const { return groups_.replica != nullptr; }
  bool first_routes() const { return divide() && groups_.first_routes; }
  bool is_first() const { return !divide() || groups_.replica->rank() == 0; }

  // x = sum of x of all ranks of the replica; x is dense.
  void all_reduce(TensorView x);
  // Columns slices[r] of x come from rank r. The slices cover the columns in order.
  void all_gather_cols(TensorView x, std::span<const Slice> slices);
  void send(TensorView x);
  void receive(TensorView x);
  // As in Ops; matrices are dense but the `mine` of exchange_replicas().
  void gather_replicas(TensorView mine, std::span<const int64_t> n_rows, TensorView all);
  void scatter_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine);
  void exchange_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine,
                         std::span<const Slice> slices, TensorView scratch);
  // Where the first rank routes: its experts and weights, on all ranks.
  void take_routing_of_first(const Routing& routing);

 private:
  RankGroups groups_;
  // Grow to the largest call.
  std::vector<float> gathered_;
  std::vector<int64_t> piece_bytes_, received_bytes_;
  std::vector<std::byte> routing_;
};

// Both matrices have one type.
void copy_rows(TensorView from, TensorView to);

}  // namespace tandem
