// The backbone on a GPU: every verb enqueues kernels on one stream and returns. Activations are
// float, the cache is BF16 or FP8. Runs on the emulated GPU just the same; which it is, the link
// decides.
#pragma once
#include <map>

#include "gpu_kernels/kernels.h"
#include "ops/cuda_attention.h"
#include "ops/cuda_batch.h"
#include "ops/cuda_products.h"
#include "ops/ops.h"

namespace tandem {

// How a model's router chooses; what and how many tokens is left open.
gpu::RouterArgs router_form(const RouterConfig& router);

class CudaOps final : public Ops {
 public:
  // The stream outlives the object. Throws Error when the card's memory is too little, or the
  // model's dimensions too large for its kernels.
  CudaOps(const ModelConfig& config, CudaLimits limits, gpu::Stream& stream);
  ~CudaOps() override;

  // Throws Error for a model that the kernels do not take.
  static void require_takes(const ModelConfig& config);
  // Of scratch, beside what allocate() is asked for.
  static int64_t bytes_for(const ModelConfig& config, CudaLimits limits);

  Buffer allocate(int64_t bytes) override;
  void begin(const Batch& batch) override { batch_.upload(batch, stream_); }
  bool run_decode(const StepForm& form, const std::function<void()>& verbs) override;
  int n_recorded() const { return static_cast<int>(recorded_.size()); }
  // Of the graph that was the last step; 0: it was none.
  int n_nodes_of_last_step() const { return n_nodes_of_last_step_; }
  Buffer allocate_on_host(int64_t bytes) override;
  void copy(const void* from, int64_t bytes, void* to) override { stream_.copy(from, bytes, to); }
  void wait() override { stream_.wait(); }
  void to_host(TensorView x, TensorView out) override;
  bool prepare_draws(std::span<const uint32_t> allowed, int n_tokens, int max_rows) override;
  void draw(TensorView logits, std::span<const Draw> how, std::span<int32_t> tokens) override;
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

 private:
  // Kernels of larger steps take longer than their launches.
  static constexpr int kMaxRecordedTokens = 32;
  struct Step {
    StepForm form;
    int n_tokens, n_logits;
    // clang 14 compares with a zero of its own.
    auto operator<=>(const Step&) const = default;  // NOLINT(modernize-use-nullptr)
  };

  gpu::Stream& stream_;
  const bool records_;
  const int kv_rank_;
  std::map<Step, gpu::Graph> recorded_;
  int n_nodes_of_last_step_ = 0;
  CudaBatch batch_;
  CudaProducts products_;
  CudaAttention attention_;
  gpu::Buffer frequencies_;  // [rope_dim / 2]
  int n_drawable_ = 0;       // tokens of a row of logits
  gpu::Buffer allowed_;      // a bit for each
  gpu::Buffer draws_;        // mapped: what is asked of each row,
  gpu::Buffer drawn_;        // and its token
};

}  // namespace tandem
