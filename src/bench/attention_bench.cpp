#include "bench/attention_bench.h"

#include <algorithm>

#include "bench/model_on_gpu.h"
#include "bench/random_cache.h"
#include "bench/roofline.h"
#include "core/machine_info.h"
#include "engine/kv_cache.h"
#include "model/attention_form.h"
#include "model/cost.h"
#include "model/rope.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

constexpr int kMaxCaches = 8;  // layers in rotation, so that the cache is read from memory

}  // namespace

AttentionCost cost_of_absorbed(const MlaConfig& m, int64_t context, int64_t element_bytes) {
  return {context * m.cache_dim() * element_bytes,
          2 * context * m.n_heads * (m.cache_dim() + m.kv_rank)};
}

AttentionCost cost_of_naive(const MlaConfig& m, int64_t context, int64_t n, int64_t element_bytes,
                            int64_t kv_b_bytes) {
  const AttentionOps ops = attention_ops(m, static_cast<double>(n), static_cast<double>(context));
  return {context * m.cache_dim() * element_bytes + kv_b_bytes, static_cast<int64_t>(ops.naive)};
}

namespace {

bool is_kv_b(const WeightSpec& spec) { return spec.name.ends_with(".kv_b_proj.weight"); }

}  // namespace

void bench_attention(const AttentionBench& bench, const cpu::KernelTable& kernels,
                     MachineSpeed& speed, const OnRow& on_row) {
  ModelConfig config = bench.config;
  const MlaConfig& m = config.mla;
  const int longest = *std::max_element(bench.contexts.begin(), bench.contexts.end());
  const DType cache_type = cache_type_for(kernels);
  config.n_layers = 1;
  const int most_sequences = *std::max_element(bench.batches.begin(), bench.batches.end());
  const int64_t cache_tokens = int64_t{most_sequences} * pages_for(longest) * kPageSize;
  const int64_t layer_bytes = KvCache::bytes_for(config, cache_tokens, cache_type);
  require(layer_bytes <= bench.memory_bytes,
          "--ctx {} --batch {}: the cache of one layer needs {:.2f} GB and {:.2f} GB may be used; "
          "choose a shorter context, fewer sequences or raise --memory",
          longest, most_sequences, static_cast<double>(layer_bytes) * 1e-9,
          static_cast<double>(bench.memory_bytes) * 1e-9);
  config.n_layers =
      static_cast<int>(std::clamp<int64_t>(bench.memory_bytes / layer_bytes, 1, kMaxCaches));
  config.n_dense_layers = config.n_layers;
  KvCache cache(config, cache_tokens, cache_type);
  fill_with_random(cache, config);
  const std::vector<int32_t> pages = first_pages(most_sequences * pages_for(longest));

  const WeightFormat format = backbone_format("auto", config);
  const int64_t kv_b_bytes =
      matrix_bytes(config, int64_t{m.n_heads} * (m.nope_dim + m.v_dim), m.kv_rank, format);
  CpuWeights home(kernels);
  const ModelWeights weights =
      random_weights(config, {format, {DType::kBF16}}, is_kv_b, home, speed.team());

  int most = most_sequences;
  for (const int n : bench.prompt_tokens) most = std::max(most, std::min(n, longest));
  CpuOps ops(kernels, config, most, speed.team());
  const int64_t rows = int64_t{most} * m.n_heads;
  const int widest = std::max({m.kv_rank, m.nope_dim, m.v_dim});
  struct Matrices {
    TensorView q, out, q_rope;
  } here, there;
  const auto views_of = [&](Matrices& a) {
    return [&a, &m, rows, widest](auto visit) {
      visit(a.q, rows, widest, DType::kF32);
      visit(a.out, rows, widest, DType::kF32);
      visit(a.q_rope, rows, m.rope_dim, DType::kF32);
    };
  };
  const Arena arena = Arena::holding(views_of(here));
  const ModelOnGpu on_gpu(bench.gpus,
                          {.config = config,
                           .formats = {format, {DType::kBF16}},
                           .wanted = is_kv_b,
                           .max_tokens = most,
                           .context = longest},
                          {most, 1}, cache_tokens);
  Arena arena_there;
  if (on_gpu.model())
    arena_there = Arena::holding(views_of(there), [&](int64_t bytes) {
      return on_gpu.bench_model()->device().allocate(bytes);
    });
  fill_with_normal(here.q);
  fill_with_normal(here.q_rope);
  if (on_gpu.model()) {
    on_gpu.bench_model()->to_gpu(here.q, there.q);
    on_gpu.bench_model()->to_gpu(here.q_rope, there.q_rope);
  }

  const cpu::PeakLoop peak = peak_of_attention(speed, kernels);
  const int64_t element = size_of(cache_type);
  // Measures the last n tokens of each of n_sequences sequences.
  const auto measure_one = [&](int context, int n, int n_sequences, bool naive) {
    const LastTokens last(context, n, pages, n_sequences);
    const Batch batch = last.batch();
    const int64_t heads = int64_t{n_sequences} * n * m.n_heads;
    const auto attend = [&](Ops& of, const ModelWeights& w, const KvCache& kv, const Matrices& a,
                            int64_t i) {
      const int layer = static_cast<int>(i % config.n_layers);
      const MlaArgs args{batch.sequences,
                         a.q.rows_from(0, heads).cols_from(0, naive ? m.nope_dim : m.kv_rank),
                         a.q_rope.rows_from(0, heads),
                         kv.layer(layer),
                         m,
                         softmax_scale(config),
                         a.out.rows_from(0, heads).cols_from(0, naive ? m.v_dim : m.kv_rank)};
      naive ? of.mla_naive(args, w.layers[layer].attn.kv_b) : of.mla_absorbed(args);
    };
    const auto run = [&](int64_t i) { attend(ops, weights, cache, here, i); };
    const AttentionCost cost = naive ? cost_of_naive(m, context, n, element, kv_b_bytes)
                                     : cost_of_absorbed(m, context, element);
    const Work work{{n_sequences * cost.bytes, n_sequences * cost.ops}, run};
    const Measured measured = measure(speed, peak, {&work, 1}, bench.seconds)[0];
    nlohmann::ordered_json row = {{"bench", "attention"},
                                  {"config", bench.config_name},
                                  {"format", name_of(cache_type)},
                                  {"isa", kernels.name},
                                  {"threads", speed.team().size()},
                                  {"what", naive ? "prefill, restored" : "decode, absorbed"},
                                  {"tokens", n_sequences * n},
                                  {"context", context}};
    GpuSeconds gpu;
    if (on_gpu.model()) {
      GpuBenchModel& bench_model = *on_gpu.bench_model();
      bench_model.ops().begin(batch);
      gpu.on_gpu = seconds_on_gpu(
          bench_model,
          [&](int64_t i) {
            attend(bench_model.ops(), bench_model.weights(), *on_gpu.cache(), there, i);
          },
          bench.seconds);
    }
    add_fields(row, measured, peak, gpu);
    on_row(row);
  };
  for (const int context : bench.contexts) {
    for (const int n_sequences : bench.batches) measure_one(context, 1, n_sequences, false);
    for (const int n : bench.prompt_tokens)
      if (n <= context) measure_one(context, n, 1, true);
  }
}

}  // namespace tandem
