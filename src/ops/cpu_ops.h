// The operations of the backbone on a CPU: a team of threads runs the kernels of one instruction
// set. Activations are float; the cache is BF16, or float with the reference kernels. Each output
// is computed by one thread in an order that does not depend on the batch.
#pragma once
#include <vector>

#include "core/memory.h"
#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "ops/dense_products.h"
#include "ops/device.h"
#include "ops/ops.h"
#include "ops/rank_calls.h"

namespace tandem {

// Type of the numbers in the KV cache that attention reads.
DType cache_type_for(const cpu::KernelTable& kernels);

constexpr int kPartRows = 128;      // (token, head) rows of one sequence per work item
constexpr int kRestoredPages = 16;  // pages for which a thread restores a head's keys and values
constexpr int kRestoredTokens = kRestoredPages * kPageSize;
constexpr int kRestoredRows = 256;  // restored rows per product

// The host's own memory. All work is done when a call returns.
class CpuDevice final : public Device {
 public:
  explicit CpuDevice(Team& team) : team_(team) {}  // the team outlives the object and copies data
  Buffer allocate(int64_t bytes) override { return Buffer(bytes); }
  void copy(const void* from, int64_t bytes, void* to) override;
  void to_host(TensorView x, TensorView out) override;
  std::unique_ptr<DeviceSampler> make_sampler(std::span<const uint32_t> allowed, int n_tokens,
                                              int max_rows) override;

 private:
  Team& team_;
};

class CpuOps final : public Ops {
 public:
  // Allocates scratch for steps of up to max_tokens tokens. All references outlive the object.
  // Throws Error for head dimensions that the kernels do not support.
  CpuOps(const cpu::KernelTable& kernels, const ModelConfig& config, int max_tokens, Team& team);

  // From now on `provider` computes linear() with the matrices at these addresses, which it must be
  // prepared for; null: the kernels compute all. The bits of a row may then depend on the number of
  // rows.
  void use(ProductProvider* provider, std::vector<const void*> matrices);
  // The ranks that compute the backbone with this one.
  void use(const RankGroups& ranks) { ranks_ = RankCalls(ranks); }

  void begin(const Batch&) override {}
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
  void all_reduce(TensorView x) override {
    if (ranks_.divide()) ranks_.all_reduce(x);
  }
  void all_gather_cols(TensorView x, std::span<const Slice> slices) override {
    if (ranks_.divide()) ranks_.all_gather_cols(x, slices);
  }
  void gather_replicas(TensorView mine, std::span<const int64_t> n_rows, TensorView all) override {
    ranks_.gather_replicas(mine, n_rows, all);
  }
  void scatter_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine) override {
    ranks_.scatter_replicas(all, n_rows, mine);
  }
  void exchange_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine,
                         std::span<const Slice> slices, TensorView scratch) override {
    ranks_.exchange_replicas(all, n_rows, mine, slices, scratch);
  }
  void send(TensorView x) override { ranks_.send(x); }
  void receive(TensorView x) override { ranks_.receive(x); }

 private:
  // Some (token, head) rows of a sequence with some of its keys.
  struct AbsorbedPart {
    const Sequence* sequence;
    int first_row, n_rows;
    int first_page, n_pages;
    bool is_first, is_last;  // whether these are the sequence's first and last keys
  };
  void run_parts(const MlaArgs& args);
  void attend_part(const MlaArgs& args, const AbsorbedPart& part, int64_t slot);
  void merge_row(const MlaArgs& args, const AbsorbedPart& part, int64_t slot, int i);
  cpu::Activations latents_of(const MlaArgs& args, const Sequence& s, int page,
                              const QuantView& kv_b);
  TensorView restore_head(const MlaArgs& args, const cpu::Activations& latents, int n_tokens,
                          const QuantView& kv_b, int head, int thread);
  void naive_rows(const MlaArgs& args, const Sequence& s, TensorView restored, int page, int head,
                  int token);
  static TensorView page_of(const MlaArgs& args, const Sequence& s, int page);
  // provider: null for the kernels.
  void product(const cpu::Activations& x, int64_t n_rows, const QuantView& w, TensorView out,
               ProductProvider* provider = nullptr);
  template <class Visit>
  void for_each_scratch(const ModelConfig& config, int64_t max_tokens, Visit visit);
  cpu::Activations encoded(TensorView x, const QuantView& w);
  TensorView side_by_side(TensorView x);  // a copy if rows have gaps, as a provider reads them
  // Shares the items among the team if they are worth it: below this number of operations a second
  // thread costs more than it saves.
  template <class Work>
  void for_each(int64_t n_items, int64_t n_ops, Work work) {
    constexpr int64_t kParallelOps = 1 << 16;
    if (n_ops > kParallelOps) return team_.run(n_items, work);
    for (int64_t item = 0; item < n_items; ++item) work(item, 0);
  }

  const cpu::KernelTable& kernels_;
  Team& team_;
  Arena arena_;
  RankCalls ranks_;
  ProductProvider* provider_ = nullptr;
  std::vector<const void*> provided_;  // sorted
  Buffer rows_;                        // for side_by_side(); empty without a provider
  TensorView encoded_;  // [max_tokens, columns] x of a product, encoded for the kernels
  std::vector<AbsorbedPart> parts_;
  TensorView latents_;              // [kRestoredTokens, columns] latents of some pages, encoded
  TensorView restored_;             // [threads * kRestoredRows, nope_dim + v_dim] of one head
  TensorView keys_values_;          // [threads * kRestoredTokens, ..] the same in the cache's type
  TensorView max_, sum_;            // [1, max_tokens * heads] running softmax
  TensorView part_out_;             // [slots * kPartRows, kv_rank] outputs of one round's parts
  TensorView part_max_, part_sum_;  // [1, slots * kPartRows]
  TensorView route_of_thread_;      // [threads, 2 * n_experts + n_groups]
};

}  // namespace tandem
