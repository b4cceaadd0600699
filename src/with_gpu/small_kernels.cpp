#include <algorithm>
#include <numeric>
#include <random>

#include "bench/gpu/gpu_benches.h"
#include "bench/gpu_bench_model.h"
#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/kernels.h"
#include "loader/gpu_model.h"
#include "model/rope.h"
#include "ops/cuda_ops.h"
#include "ops/router.h"
#include "with_gpu/random_on_gpu.h"

namespace tandem {
namespace {

constexpr int kLaunches = 32;          // per recorded graph
constexpr int64_t kTableRows = 16384;  // rows of the embedding: too many for any cache

// Floats that one launch uses.
struct Floats {
  int64_t x = 0, other = 0, out = 0;
  int64_t sum() const { return x + other + out; }
};

class SmallKernelsOnGpu {
 public:
  SmallKernelsOnGpu(const ModelConfig& config, int max_tokens, int64_t cold_bytes);
  std::optional<double> seconds(SmallKernel kernel, int n, double for_seconds);

 private:
  Floats floats_of(SmallKernel kernel, int64_t n) const;
  // The kernel's indices; for the embedding those of all launches.
  std::vector<int32_t> indices_of(SmallKernel kernel, int n) const;
  struct Operands {
    float *x, *other, *out;
    const int32_t* indices;
  };
  void launch(SmallKernel kernel, int n, const Operands& at);
  gpu::RouterArgs router_of(int n) const;

  const ModelConfig c_;
  const int64_t table_rows_;
  int n_multiprocessors_ = 1;
  gpu::Stream stream_;
  gpu::Buffer pool_, table_, frequencies_, indices_;
  gpu::Buffer partial_, counters_;  // of the router
};

constexpr int64_t padded(int64_t floats) { return (floats + 63) / 64 * 64; }

SmallKernelsOnGpu::SmallKernelsOnGpu(const ModelConfig& config, int max_tokens, int64_t cold_bytes)
    : c_(config), table_rows_(std::min<int64_t>(config.vocab, kTableRows)) {
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  int64_t largest = 0;
  for (int k = 0; k < static_cast<int>(SmallKernel::kKernels); ++k)
    if (has(c_, static_cast<SmallKernel>(k)))
      largest = std::max(largest, floats_of(static_cast<SmallKernel>(k), max_tokens).sum());
  pool_ =
      gpu::Buffer(std::min(gpu_info.free_bytes / 2, cold_bytes + largest * 4), gpu::Site::kDevice);
  table_ = gpu::Buffer(table_rows_ * c_.dim * int64_t{sizeof(bf16)}, gpu::Site::kDevice);
  fill_with_random(stream_, Number::kF32, pool_);
  fill_with_random(stream_, Number::kBF16, table_);
  const std::vector<float> frequencies = rope_frequencies(c_.rope, c_.mla.rope_dim);
  frequencies_ = gpu::Buffer(std::ssize(frequencies) * 4, gpu::Site::kDevice);
  stream_.copy(frequencies.data(), frequencies_.bytes(), frequencies_.as<float>());
  const int64_t pairs = int64_t{max_tokens} * std::max(c_.router.n_active, kLaunches);
  indices_ = gpu::Buffer(pairs * 4, gpu::Site::kDevice);
  n_multiprocessors_ = gpu_info.n_multiprocessors;
  int64_t partials = 0;
  for (int n = 1; n <= max_tokens; ++n)
    partials = std::max(partials, gpu::route_partials(router_of(n)));
  partial_ = gpu::Buffer(partials * 4, gpu::Site::kDevice);
  const std::vector<uint32_t> zeros(gpu::kCounters);
  counters_ = gpu::Buffer(std::ssize(zeros) * 4, gpu::Site::kDevice);
  stream_.copy(zeros.data(), counters_.bytes(), counters_.as<uint32_t>());
  stream_.wait();
}

// The arguments that do not depend on where matrices are.
gpu::RouterArgs SmallKernelsOnGpu::router_of(int n) const {
  gpu::RouterArgs args = router_form(c_.router);
  args.tokens = n;
  args.w = {.data = nullptr,
            .stride = c_.dim,
            .type = Number::kF32,
            .rows = c_.router.n_experts,
            .cols = c_.dim};
  args.workspace = {partial_.as<float>(), counters_.as<uint32_t>()};
  args.n_multiprocessors = n_multiprocessors_;
  return args;
}

std::optional<double> SmallKernelsOnGpu::seconds(SmallKernel kernel, int n, double for_seconds) {
  const Floats of = floats_of(kernel, n);
  const int64_t n_sets = std::min<int64_t>(pool_.bytes() / 4 / of.sum(), kLaunches);
  if (n_sets == 0) return {};
  const std::vector<int32_t> indices = indices_of(kernel, n);
  stream_.copy(indices.data(), std::ssize(indices) * 4, indices_.as<int32_t>());
  const int64_t next_indices = kernel == SmallKernel::kEmbed ? n : 0;
  const auto nth = [&](int i) {
    float* const x = pool_.as<float>() + i % n_sets * of.sum();
    launch(kernel, n,
           {x, x + of.x, x + of.x + of.other, indices_.as<int32_t>() + i * next_indices});
  };
  const gpu::Graph graph = stream_.capture([&] {
    for (int i = 0; i < kLaunches; ++i) nth(i);
  });
  return seconds_of_runs([&](int64_t) { stream_.replay(graph); }, [&] { stream_.wait(); },
                         for_seconds) /
         kLaunches;
}

Floats SmallKernelsOnGpu::floats_of(SmallKernel kernel, int64_t n) const {
  const int64_t dim = padded(n * c_.dim), kv = padded(n * c_.mla.cache_dim());
  const int64_t queries = padded(n * c_.mla.n_heads * c_.mla.qk_dim());
  const int64_t pairs = n * c_.router.n_active, experts = c_.router.n_experts;
  switch (kernel) {
    case SmallKernel::kEmbed:
      return {.out = dim};
    case SmallKernel::kNorm:
      return {.x = 2 * dim, .other = padded(c_.dim), .out = dim};
    case SmallKernel::kAppend:
      return {.x = queries + kv, .other = padded(c_.mla.kv_rank), .out = kv};
    case SmallKernel::kAppendFp8:
      return {.x = queries + kv,
              .other = padded(c_.mla.kv_rank),
              .out = padded(n * gpu::kFp8TokenBytes / 4)};
    case SmallKernel::kRoute:
      return {.x = dim,
              .other = padded(experts * c_.dim) + padded(experts),
              .out = 2 * padded(pairs) + padded(n * experts)};
    case SmallKernel::kSortPairs:
      return {.out = padded(experts + 1) + 2 * padded(pairs)};
    case SmallKernel::kGather:
      return {.x = dim, .out = dim};
    case SmallKernel::kRound:
      return {.x = dim, .out = padded(n * gpu::product_stride(c_.dim) / 2)};
    case SmallKernel::kCombine:
      return {.x = padded(pairs * c_.dim), .other = padded(pairs), .out = dim};
    case SmallKernel::kSiluMul:
      return {.x = padded(n * c_.dense_dim), .other = padded(n * c_.dense_dim)};
    case SmallKernel::kAdd:
      return {.x = dim, .other = dim};
    case SmallKernel::kKernels:
      break;
  }
  return {};
}

std::vector<int32_t> SmallKernelsOnGpu::indices_of(SmallKernel kernel, int n) const {
  std::mt19937 rng(n);
  std::vector<int32_t> all(n);
  std::iota(all.begin(), all.end(), 0);  // positions, or rows of a cache
  if (kernel == SmallKernel::kGather) std::shuffle(all.begin(), all.end(), rng);
  if (kernel == SmallKernel::kEmbed) {
    all.resize(int64_t{kLaunches} * n);
    for (int32_t& token : all) token = static_cast<int32_t>(rng() % table_rows_);
  }
  if (kernel == SmallKernel::kCombine) {
    all.resize(int64_t{n} * c_.router.n_active);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), rng);
  }
  if (kernel == SmallKernel::kSortPairs) return random_experts(c_.router, n, rng);
  return all;
}

void SmallKernelsOnGpu::launch(SmallKernel kernel, int n, const Operands& at) {
  const int dim = c_.dim, n_active = c_.router.n_active;
  const int kv = c_.mla.cache_dim(), head = c_.mla.qk_dim();
  const auto ids = reinterpret_cast<int32_t*>(at.out);
  const int64_t pairs = padded(int64_t{n} * n_active);
  switch (kernel) {
    case SmallKernel::kEmbed:
      return gpu::embed(stream_, {.tokens = at.indices,
                                  .table = table_.as<void>(),
                                  .table_stride = dim,
                                  .type = Number::kBF16,
                                  .out = {at.out, dim},
                                  .rows = n,
                                  .cols = dim});
    case SmallKernel::kNorm:
      return gpu::rms_norm(stream_, {.x = {at.x, dim},
                                     .gain = at.other,
                                     .out = {at.out, dim},
                                     .rows = n,
                                     .dim = dim,
                                     .eps = c_.norm_eps,
                                     .delta = {at.x + padded(int64_t{n} * dim), dim}});
    case SmallKernel::kAppend:
    case SmallKernel::kAppendFp8:
      return gpu::rotate_and_append(stream_,
                                    {.q_rope = {at.x + c_.mla.nope_dim, head},
                                     .kv = {at.x + padded(int64_t{n} * c_.mla.n_heads * head), kv},
                                     .gain = at.other,
                                     .eps = c_.latent_norm_eps,
                                     .positions = at.indices,
                                     .frequencies = frequencies_.as<float>(),
                                     .rows_of_cache = at.indices,
                                     .cache = at.out,
                                     .cache_stride = kv,
                                     .fp8 = kernel == SmallKernel::kAppendFp8,
                                     .amplitude = rope_amplitude(c_.rope),
                                     .tokens = n,
                                     .n_heads = c_.mla.n_heads,
                                     .kv_rank = c_.mla.kv_rank,
                                     .rope_dim = c_.mla.rope_dim});
    case SmallKernel::kRoute: {
      gpu::RouterArgs args = router_of(n);
      args.x = at.x;
      args.x_stride = dim;
      args.w.data = at.other;
      args.logits = {at.out + 2 * pairs, c_.router.n_experts};
      args.bias =
          c_.router.has_bias() ? at.other + padded(int64_t{c_.router.n_experts} * dim) : nullptr;
      args.weights = {at.out + pairs, n_active};
      args.ids = ids;
      args.ids_stride = n_active;
      return gpu::route(stream_, args);
    }
    case SmallKernel::kSortPairs:
      return gpu::sort_pairs(stream_, {.ids = at.indices,
                                       .ids_stride = n_active,
                                       .offsets = ids + 2 * pairs,
                                       .row_of = ids,
                                       .tokens_of_rows = ids + pairs,
                                       .tokens = n,
                                       .n_active = n_active,
                                       .n_experts = c_.router.n_experts});
    case SmallKernel::kGather:
      return gpu::gather_rows(stream_, {{at.x, dim}, at.indices, {at.out, dim}, n, dim});
    case SmallKernel::kRound:
      return gpu::round_rows(stream_, {.x = at.x,
                                       .out = reinterpret_cast<bf16*>(at.out),
                                       .x_stride = dim,
                                       .out_stride = gpu::product_stride(dim),
                                       .n_rows = n,
                                       .cols = dim});
    case SmallKernel::kCombine:
      return gpu::combine_experts(stream_, {.rows = at.x,
                                            .row_of = at.indices,
                                            .weights = at.other,
                                            .y = at.out,
                                            .row_stride = dim,
                                            .y_stride = dim,
                                            .n_tokens = n,
                                            .n_active = n_active,
                                            .cols = dim,
                                            .add = true});
    case SmallKernel::kSiluMul:
      return gpu::silu_mul(stream_,
                           {{at.x, c_.dense_dim}, {at.other, c_.dense_dim}, n, c_.dense_dim});
    case SmallKernel::kAdd:
      return gpu::add(stream_, {{at.x, dim}, {at.other, dim}, n, dim});
    case SmallKernel::kKernels:
      return;
  }
}

}  // namespace

SmallKernelTimer small_kernel_timer(const ModelConfig& config, int max_tokens, int64_t cold_bytes) {
  if (!why_no_gpu().empty()) return {};
  const auto kernels = std::make_shared<SmallKernelsOnGpu>(config, max_tokens, cold_bytes);
  return [kernels](SmallKernel kernel, int n, double seconds) {
    return kernels->seconds(kernel, n, seconds);
  };
}

}  // namespace tandem
