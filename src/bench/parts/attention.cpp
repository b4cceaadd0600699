// `tandem bench attention`: one layer's attention over the paged cache, without its projections.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "bench/parts/attention_variants.h"
#include "bench/random_inputs.h"
#include "model/cost.h"
#include "model/rope.h"
#include "ops/cpu_ops.h"
#include "scheduling/kv_cache.h"

namespace tandem {
namespace {

constexpr int kMaxCaches = 8;  // layers in rotation, so that the cache is read from memory

bool is_kv_b(const WeightSpec& spec) { return spec.name.ends_with(".kv_b_proj.weight"); }

void bench_attention(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                     const OnRow& on_row) {
  ModelConfig config = bench.config;
  const MlaConfig& m = config.mla;
  const int longest = most_of(bench.options.contexts);
  const int limit = std::max(longest, bench.options.context_limit);
  const DType cache_type = cache_type_for(kernels);
  config.n_layers = 1;
  const int most_sequences = most_of(bench.options.batches);
  const int most_drafts =
      bench.options.draft_tokens.empty() ? 0 : most_of(bench.options.draft_tokens);
  const int64_t cache_tokens = int64_t{most_sequences} * pages_for(limit) * kPageSize;
  const int64_t layer_bytes = KvCache::bytes_for(config, cache_tokens, cache_type);
  require(layer_bytes <= bench.memory_bytes,
          "{} {} --batch {}: the cache of one layer needs {:.2f} GB and {:.2f} GB may be used; "
          "choose {}, fewer sequences or raise --memory",
          limit > longest ? "--context-limit" : "--ctx", limit, most_sequences,
          gigabytes(layer_bytes), gigabytes(bench.memory_bytes),
          limit > longest ? "a smaller limit" : "a shorter context");
  config.n_layers =
      static_cast<int>(std::clamp<int64_t>(bench.memory_bytes / layer_bytes, 1, kMaxCaches));
  config.n_dense_layers = config.n_layers;
  KvCache cache(config, cache_tokens, cache_type);
  fill_with_random(cache, config);
  const std::vector<int32_t> pages = first_pages(most_sequences * pages_for(limit));

  const WeightFormat format = stored_format(config);
  const int64_t kv_b_bytes =
      matrix_bytes(config, int64_t{m.n_heads} * (m.nope_dim + m.v_dim), m.kv_rank, format);
  CpuWeights home(kernels);
  const ModelWeights weights =
      random_weights(config, {format, {DType::kBF16}}, is_kv_b, home, speed.team());

  int most = most_sequences * (1 + most_drafts);
  for (const int n : bench.options.tokens) most = std::max(most, std::min(n, longest));
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
                           .context = limit},
                          {most, 1}, cache_tokens);
  require(!bench.gpus || on_gpu.model() || bench.options.context_limit == 0,
          "--context-limit {} --batch {}: the caches of {} layers do not fit the GPU; choose a "
          "smaller limit, fewer sequences or a smaller --memory",
          limit, most_sequences, config.n_layers);
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
    const Cost cost = naive ? cost_of_naive(m, context, n, element, kv_b_bytes)
                            : cost_of_absorbed(m, context, n, element);
    const Work work{{n_sequences * cost.bytes, n_sequences * cost.ops}, run};
    const Measured measured = measure(speed, peak, {&work, 1}, bench.options.seconds)[0];
    nlohmann::ordered_json row = new_row("attention", bench, name_of(cache_type), kernels, speed);
    row["what"] = naive   ? "prefill, restored"
                  : n > 1 ? fmt::format("decode, {} drafts", n - 1)
                          : "decode, absorbed";
    row["tokens"] = n_sequences * n;
    row["context"] = context;
    row["context_limit"] = limit;
    GpuSeconds gpu;
    if (on_gpu.model()) {
      GpuBenchModel& bench_model = *on_gpu.bench_model();
      bench_model.ops().begin(batch);
      gpu.on_gpu = seconds_on_gpu(
          bench_model,
          [&](int64_t i) {
            attend(bench_model.ops(), bench_model.weights(), *on_gpu.cache(), there, i);
          },
          bench.options.seconds);
    }
    add_fields(row, measured, peak, gpu);
    on_row(row);
  };
  for (const int context : bench.options.contexts) {
    for (const int n_sequences : bench.options.batches) {
      measure_one(context, 1, n_sequences, false);
      for (const int n_drafts : bench.options.draft_tokens)
        if (n_drafts > 0 && n_drafts < context)
          measure_one(context, 1 + n_drafts, n_sequences, false);
    }
    for (const int n : bench.options.tokens)
      if (n <= context) measure_one(context, n, 1, true);
  }
}

void bench_either(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                  const OnRow& on_row) {
  const auto measure = bench.options.variants ? bench_attention_variants : bench_attention;
  measure(bench, kernels, speed, on_row);
}

void check_variants(const BenchOptions& o) {
  require(!o.variants || (o.batches.empty() && o.draft_tokens.empty() && o.context_limit == 0),
          "--variants are of one sequence's token in a cache of its length: leave --batch, "
          "--draft-tokens and --context-limit out");
}

void check_attention_input(const BenchInput& bench) {
  if (bench.options.variants) check_variants_input(bench);
  const int longest = most_of(bench.options.contexts), limit = bench.options.context_limit;
  require(limit == 0 || limit >= longest,
          "--context-limit {}: a context of {} tokens is to be measured: raise it, or choose a "
          "shorter --ctx",
          limit, longest);
}

}  // namespace

Benchmark attention_benchmark() {
  using enum BenchFlag;
  return {.name = "attention",
          .help = "attention over the KV cache, for one token and for a prompt",
          .examples =
              "  tandem bench attention --ctx 1024,16384\n"
              "  tandem bench attention --ctx 4096 --context-limit 65536\n"
              "  tandem bench attention --ctx 4096 --draft-tokens 1,4\n"
              "  tandem bench attention --variants --ctx 4096\n",
          .flags = {kConfig, kIsa, kContexts, kContextLimit, kVariants, kTokens, kCsv, kPlot,
                    kBatches, kDraftTokens},
          .tokens_help = "lengths of prompts that end there, a list",
          .contexts = {512, 4096, 16384},
          .batches = {1},
          .check = check_variants,
          .check_input = check_attention_input,
          .on_cpu = bench_either};
}

}  // namespace tandem
