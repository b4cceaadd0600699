// The backbone on a CPU: a team of threads over the kernels of one instruction set; activations are
// float, the cache is BF16, or float with the reference kernels. Each output is computed by one
// thread in an order that does not depend on the batch.
#pragma once
#include "core/memory.h"
#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "ops/ops.h"

namespace tandem {

class CpuOps final : public Ops {
 public:
  // Scratch for steps of up to max_tokens tokens. All references outlive the object.
  CpuOps(const cpu::KernelTable& kernels, const ModelConfig& config, int max_tokens, Team& team);

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
  void absorbed_rows(const MlaArgs& args, const Sequence& s, int first_row, int n_rows, int thread);
  void restore_page(const MlaArgs& args, const QuantView& kv_b, TensorView page);
  void naive_rows(const MlaArgs& args, const Sequence& s, TensorView page, int first_key, int head);
  TensorView read_page(const MlaArgs& args, const Sequence& s, int page, TensorView room) const;
  void product(const cpu::Activations& x, int64_t n_rows, const QuantView& w, TensorView out);
  cpu::Activations encoded(TensorView x, const QuantView& w);
  template <class Work>
  void for_each(int64_t n_items, int64_t n_ops, Work work);

  const cpu::KernelTable& kernels_;
  Team& team_;
  Arena arena_;
  TensorView encoded_;          // [max_tokens, columns] x of a product as the kernels want it
  TensorView page_of_thread_;   // [threads * page_size, cache_dim] a page of the cache in float
  TensorView shared_page_;      // [page_size, cache_dim] the same, for all threads
  TensorView restored_;         // [page_size, heads * (nope_dim + v_dim)] its keys and values
  TensorView max_, sum_;        // [1, max_tokens * heads] running softmax
  TensorView route_of_thread_;  // [threads, 2 * n_experts + n_groups]
};

}  // namespace tandem
