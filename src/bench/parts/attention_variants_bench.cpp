// `tandem bench attention --variants`: a row per way to compute one token's attention, on the CPU
// and on a GPU.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "bench/parts/attention_variants.h"
#include "bench/random_inputs.h"
#include "core/rounding.h"
#include "model/cost.h"

namespace tandem {
namespace {

// A matrix that repeats the rows of a panel of random BF16 numbers.
struct RepeatedPanel {
  RepeatedPanel(int64_t rows, int64_t cols) : n_rows(rows), numbers(kPackRows * cols) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(cols)));
    for (cpu::bf16& number : numbers)
      number = static_cast<cpu::bf16>(std::bit_cast<uint32_t>(normal(rng)) >> 16);
    panel = {numbers.data(), kPackRows, cols, cols, DType::kBF16};
  }
  QuantView whole() const {
    return {.q = {nullptr, n_rows, panel.cols, panel.cols, DType::kBF16}, .scale = {}};
  }

  int64_t n_rows;
  std::vector<cpu::bf16> numbers;
  TensorView panel;
};

using Panels = std::array<RepeatedPanel, 3>;  // of q_latent, q_rope, o

Panels random_panels(const ModelConfig& c) {
  const int64_t latents = int64_t{c.mla.n_heads} * c.mla.kv_rank;
  const int64_t rope = int64_t{c.mla.n_heads} * c.mla.rope_dim;
  return {RepeatedPanel(latents, c.mla.q_rank), RepeatedPanel(rope, c.mla.q_rank),
          RepeatedPanel(c.dim, latents)};
}

Materialized pack(const Panels& panels, CpuWeights& home, Team& team) {
  int64_t bytes = 0;
  for (const RepeatedPanel& p : panels) bytes += home.packed_bytes(p.whole());
  home.allocate(bytes);
  const auto packed = [&](const RepeatedPanel& p) {
    const QuantView matrix = home.reserve(p.whole());
    team.run(ceil_div(p.n_rows, kPackRows), [&](int64_t i, int) {
      home.pack(p.numbers.data(), matrix, i * kPackRows,
                std::min(kPackRows, p.n_rows - i * kPackRows));
    });
    return matrix;
  };
  return {packed(panels[0]), packed(panels[1]), packed(panels[2])};
}

bool is_needed(const WeightSpec& spec) {
  return spec.use == WeightUse::kAttention || spec.name.ends_with("a_layernorm.weight");
}

// The latents of one layer, and the pages of its single sequence.
struct Latents {
  Latents(const ModelConfig& config, int longest, DType type)
      : cache(config, longest, type), pages(first_pages(pages_for(longest))) {
    fill_with_random(cache, config);
  }
  std::span<const int32_t> pages_of(int context) const {
    return std::span(pages).first(pages_for(context));
  }
  TensorView rows() const { return cache.layer(0); }

  KvCache cache;
  std::vector<int32_t> pages;
};

class VariantsOnGpu {
 public:
  VariantsOnGpu(const BenchInput& bench, const ModelConfig& config, WeightFormats formats,
                int longest, const Panels& panels)
      : config_(config), seconds_(bench.options.seconds) {
    if (!bench.gpus) return;
    bench_model_ = bench.gpus({.config = config,
                               .formats = formats,
                               .wanted = is_needed,
                               .max_tokens = AttentionVariants::max_tokens(config.mla),
                               .context = longest});
    if (!bench_model_) return;
    const auto matrix = [&](const RepeatedPanel& p) {
      return bench_model_->repeated(p.panel, p.n_rows);
    };
    materialized_ = {matrix(panels[0]), matrix(panels[1]), matrix(panels[2])};
    latents_ = std::make_unique<Latents>(config, longest, DType::kBF16);
  }

  // Seconds of each variant; empty without a GPU, or if its memory is too small.
  std::array<GpuSeconds, kNumAttentionVariants> seconds(int context,
                                                        const cpu::KernelTable& kernels,
                                                        const QuantView& kv_b, TensorView h,
                                                        Team& team) const {
    std::array<GpuSeconds, kNumAttentionVariants> seconds;
    if (!bench_model_) return seconds;
    try {
      const auto pages = latents_->pages_of(context);
      std::vector<Buffer> memory;
      const auto there = [&](const TensorView& here) {
        return on_gpu(*bench_model_, here, memory);
      };
      const TensorView heads = there(
          cache_of_heads(kernels, config_, kv_b, latents_->rows(), pages, context, team).layer(0));
      const TensorView h_there = there(h), y_there = there(h);
      AttentionVariants variants(config_, bench_model_->weights().layers[0].attn, materialized_,
                                 there(latents_->rows()), pages, heads, context,
                                 bench_model_->ops(), bench_model_->device());
      for (int v = 0; v < kNumAttentionVariants; ++v)
        seconds[v].on_gpu = seconds_on_gpu(
            *bench_model_,
            [&](int64_t) { variants.run(static_cast<AttentionVariant>(v), h_there, y_there); },
            seconds_);
    } catch (const Error&) {  // too little GPU memory
    }
    return seconds;
  }

 private:
  const ModelConfig& config_;
  const double seconds_;
  std::unique_ptr<GpuBenchModel> bench_model_;
  Materialized materialized_;
  std::unique_ptr<Latents> latents_;
};

}  // namespace

void check_variants_input(const BenchInput& bench) {
  const MlaConfig& m = bench.config.mla;
  require(m.q_rank > 0, "--variants: {} has no q_lora_rank; choose r1, v3, v2, or k2",
          bench.options.config);
  require(m.nope_dim + m.v_dim <= m.kv_rank,
          "--variants: {} has qk_nope_head_dim {} and v_head_dim {}, together more than its "
          "kv_lora_rank {}; choose r1, v3, v2, or k2",
          bench.options.config, m.nope_dim, m.v_dim, m.kv_rank);
}

void bench_attention_variants(const BenchInput& bench, const cpu::KernelTable& kernels,
                              MachineSpeed& speed, const OnRow& on_row) {
  ModelConfig config = bench.config;
  const MlaConfig& m = config.mla;
  config.n_layers = config.n_dense_layers = 1;
  const WeightFormats formats = {stored_format(config), {DType::kBF16}};
  const DType cache_type = cache_type_for(kernels);
  const int longest = most_of(bench.options.contexts);
  const int64_t most_bytes = bytes_of_cache_of_heads(config, longest, cache_type);
  require(
      most_bytes <= bench.memory_bytes,
      "--ctx {}: keys and values of every head need {:.2f} GB and {:.2f} GB may be used; choose "
      "a shorter context or raise --memory",
      longest, gigabytes(most_bytes), gigabytes(bench.memory_bytes));

  Team& team = speed.team();
  CpuWeights home(kernels), products_home(kernels);
  const ModelWeights weights = random_weights(config, formats, is_needed, home, team);
  const AttentionWeights& attention = weights.layers[0].attn;
  const Panels panels = random_panels(config);
  const Materialized products = pack(panels, products_home, team);
  const Latents latents(config, longest, cache_type);
  CpuOps ops(kernels, config, AttentionVariants::max_tokens(m), team);
  TensorView h, y;
  const Arena arena = Arena::holding([&](auto visit) {
    visit(h, 1, config.dim, DType::kF32);
    visit(y, 1, config.dim, DType::kF32);
  });
  fill_with_normal(h);
  const VariantsOnGpu gpu_model(bench, config, formats, longest, panels);

  const cpu::PeakLoop peak = peak_of_attention(speed, kernels);
  for (const int context : bench.options.contexts) {
    const auto on_gpu = gpu_model.seconds(context, kernels, attention.kv_b, h, team);
    const auto pages = latents.pages_of(context);
    const KvCache heads =
        cache_of_heads(kernels, config, attention.kv_b, latents.rows(), pages, context, team);
    CpuDevice device(team);
    AttentionVariants variants(config, attention, products, latents.rows(), pages, heads.layer(0),
                               context, ops, device);
    for (int v = 0; v < kNumAttentionVariants; ++v) {
      const auto variant = static_cast<AttentionVariant>(v);
      const Work work = {
          cost_of_variant(variant, config, formats.backbone, context, size_of(cache_type)),
          [&](int64_t) { variants.run(variant, h, y); }};
      nlohmann::ordered_json row =
          new_row("attention", bench, format_name(formats.backbone), kernels, speed);
      row["what"] = name_of(variant);
      row["tokens"] = 1;
      row["context"] = context;
      add_fields(row, measure(speed, peak, {&work, 1}, bench.options.seconds)[0], peak, on_gpu[v]);
      on_row(row);
    }
  }
}

}  // namespace tandem
