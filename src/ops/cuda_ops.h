// The operations of the backbone on a GPU: each enqueues kernels on one stream and returns.
// Activations are float; the cache is BF16 or FP8. The code is the same for a real and an emulated
// GPU: linking decides which one is used.
#pragma once
#include <memory>
#include <vector>

#include "gpu_kernels/exchange/collectives.h"
#include "gpu_kernels/router.h"
#include "ops/cuda_attention.h"
#include "ops/cuda_batch.h"
#include "ops/cuda_products.h"
#include "ops/cuda_rank_calls.h"
#include "ops/ops.h"

namespace tandem {

// The router arguments that depend on the model; tokens and their number are left open.
gpu::RouterArgs router_form(const RouterConfig& router);

class CudaOps final : public Ops {
 public:
  // The stream outlives the object. Throws Error when too little GPU memory is left, or the model's
  // dimensions are too large for the kernels.
  CudaOps(const ModelConfig& config, CudaLimits limits, gpu::Stream& stream);
  ~CudaOps() override;

  // Throws Error for a model that the kernels do not support.
  static void require_takes(const ModelConfig& config);
  // Bytes of scratch, beside the memory of Device::allocate().
  static int64_t bytes_for(const ModelConfig& config, CudaLimits limits);

  // The GPUs of these ranks divide the backbone. The object must outlive the operations.
  void use(gpu::Collectives& ranks) { ranks_ = &ranks; }
  // GPUs of the like ranks of all replicas.
  void use_replicas(gpu::Collectives& like_ranks) { like_ranks_ = &like_ranks; }
  // The same where some of the ranks that compute the backbone have no GPU, with matrices of up to
  // max_bytes. Steps cannot be recorded then. Throws Error when too little memory is left.
  void use(const RankGroups& ranks, int64_t max_bytes) {
    calls_ = std::make_unique<CudaRankCalls>(ranks, max_bytes, stream_);
  }
  // Is told that a step begins, which may wait for other ranks.
  void watch(gpu::Collectives& watched) { watched_ = &watched; }
  // GPUs of two ranks: this one and that of the pipeline stage before, or after; null: there is
  // none.
  void use_stages(gpu::Collectives* before, gpu::Collectives* after) {
    stage_before_ = before;
    stage_after_ = after;
  }

  void begin(const Batch& batch) override {
    if (watched_) watched_->begin_work();
    batch_.upload(batch, stream_);
  }
  void embed(std::span<const int32_t> tokens, const QuantView& table, TensorView out) override;
  void rms_norm(TensorView x, const QuantView& gain, float eps, TensorView out) override;
  void add(TensorView x, TensorView delta) override;
  void clear(TensorView x) override;
  void linear(TensorView x, const QuantView& w, TensorView out) override;
  void linear_per_head(const LinearPerHead& args) override;
  void rope(TensorView x, std::span<const int32_t> positions, const RopeTable& table) override;
  void append_kv(const Batch& batch, TensorView kv, TensorView cache) override;
  void mla_absorbed(const MlaArgs& args) override;
  void mla_naive(const MlaArgs& args, const QuantView& kv_b) override;
  void silu_mul(TensorView gate, TensorView up) override;
  void route(const RouteArgs& args) override;
  void gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) override;
  void all_reduce(TensorView x) override;
  void all_gather_cols(TensorView x, std::span<const Slice> slices) override;
  void gather_replicas(TensorView mine, std::span<const int64_t> n_rows, TensorView all) override;
  void scatter_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine) override;
  void exchange_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine,
                         std::span<const Slice> slices, TensorView scratch) override;
  void send(TensorView x) override;
  void receive(TensorView x) override;
  void add_rms_norm(TensorView x, TensorView delta, const QuantView& gain, float eps,
                    TensorView out) override;
  void norm_linear(TensorView x, const QuantView& gain, float eps, const QuantView& w,
                   TensorView out) override;
  void linear_pair(TensorView x, const QuantView& w_0, TensorView out_0, const QuantView& w_1,
                   TensorView out_1) override;
  void gated_linear(TensorView x, const QuantView& gate, const QuantView& up, TensorView out,
                    TensorView scratch) override;
  void attend_and_restore(const MlaArgs& attend, const LinearPerHead& restore) override;
  void rotate_and_append(const AppendArgs& args) override;

 private:
  gpu::Stream& stream_;
  const int kv_rank_;
  CudaBatch batch_;
  CudaProducts products_;
  CudaAttention attention_;
  gpu::Buffer frequencies_;            // [rope_dim / 2]
  gpu::Collectives* ranks_ = nullptr;  // null: no other ranks
  gpu::Collectives *stage_before_ = nullptr, *stage_after_ = nullptr;
  gpu::Collectives* like_ranks_ = nullptr;    // null: one replica, or nothing is divided among them
  std::vector<int64_t> n_sent_, n_received_;  // [replicas] of exchange_replicas()
  gpu::Collectives* watched_ = nullptr;       // null: no other ranks
  std::unique_ptr<CudaRankCalls> calls_;      // null: all ranks have GPUs
};

}  // namespace tandem
