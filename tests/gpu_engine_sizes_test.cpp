// Scratch on a GPU and the limits of attention's kernels, counted by hand: for R1 in steps of
// 65,536 tokens, where most sizes are beyond 2^31 bytes.
#include <gtest/gtest.h>

#include "loader/gpu_model.h"
#include "model/checkpoint.h"
#include "offload/gpu/cuda_expert_rows.h"
#include "offload/gpu/cuda_streaming.h"
#include "offload/gpu/hand_off.h"
#include "offload/gpu/hybrid_experts.h"
#include "ops/cpu_ops.h"
#include "ops/cuda_ops.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"
#include "tests/setting.h"

namespace tandem {
namespace {

constexpr int kTokens = 65536;
constexpr CudaLimits kLimits = {
    .max_tokens = kTokens, .context = 1 << 18, .n_multiprocessors = 132};

ModelConfig r1() {
  ModelConfig c;
  c.scale_block = 128;
  return c;
}

TEST(GpuSizes, Attention) {
  constexpr int64_t kRows = int64_t{kTokens} * 128;   // tokens and heads
  constexpr int64_t kPartial = kRows * 513 * 4;       // outputs and their sums
  constexpr int64_t kLatents = (1 << 18) * 512 * 2;   // restored to BF16
  constexpr int64_t kPlain = 2 * 32 * 128 * 512 * 4;  // queries and outputs as latents
  constexpr int64_t kRestored = 256 << 20;            // keys and values
  const MlaConfig m;
  EXPECT_EQ(CudaAttention::bytes_for(m, kLimits), kPartial + kLatents + kPlain + kRestored);
  // A longer context has more pieces, and a short one is restored whole.
  CudaLimits other = kLimits;
  other.context = 1 << 21;
  EXPECT_EQ(CudaAttention::bytes_for(m, other), kPartial + 8 * kLatents + kPlain + kRestored);
  other.context = 64;
  EXPECT_EQ(CudaAttention::bytes_for(m, other), kPartial + 64 * 512 * 2 + kPlain + 128 * 64 * 512);
  // One token still has 64 parts for each multiprocessor.
  other.max_tokens = 1;
  EXPECT_EQ(CudaAttention::bytes_for(m, other),
            132 * 64 * 513 * 4 + 64 * 512 * 2 + kPlain + 128 * 64 * 512);
}

TEST(GpuSizes, BatchesAndProducts) {
  EXPECT_EQ(CudaBatch::bytes_for(kTokens, 32768), 65536LL * (32768 + 11) * 4);
  // One more token is one more row in BF16 of the widest matrix, a dense layer's down projection.
  CudaLimits less = kLimits;
  --less.max_tokens;
  const int64_t products = CudaProducts::bytes_for(r1(), kLimits);
  EXPECT_EQ(products - CudaProducts::bytes_for(r1(), less), 18432 * 2);
  EXPECT_GT(products, 65536LL * 18432 * 2);
  EXPECT_EQ(CudaOps::bytes_for(r1(), kLimits),
            CudaBatch::bytes_for(kTokens, 4096) + products + CudaAttention::bytes_for({}, kLimits));
}

TEST(GpuSizes, Experts) {
  ModelConfig c = r1();
  constexpr int64_t kPairs = int64_t{kTokens} * 8;
  EXPECT_EQ(CudaExpertRows::bytes_for(c, kTokens), ExpertPool::kMaxTickets * 257 * 4 +
                                                       2 * kPairs * 4 + 65536LL * 7168 * 2 +
                                                       kPairs * 2048 * 4 + kPairs * 7168 * 4);
  EXPECT_EQ(HandOff::bytes_for(c, kTokens), (61 * 256 + kPairs) * 4);
  // Six experts in panels of padded slices, and every scale of blocks of 64 x 64.
  constexpr int64_t kExpert = 3LL * (7168 + 64 + 16) * (2048 + 8 * (16 + 64));
  constexpr int64_t kScales = 61LL * 256 * 3 * (7168 * 2048 / 4096 + 7168) * 4;
  EXPECT_EQ(ExpertUpload::bytes_for(c), 6 * kExpert + kScales);
  EXPECT_EQ(CudaStreaming::bytes_for(c, kTokens), 6 * kExpert + kScales + kPairs * 4);
  c.scale_block = 0;
  EXPECT_EQ(ExpertUpload::bytes_for(c), 6 * 2 * kExpert) << "BF16";
  c.router.n_experts = 0;
  EXPECT_EQ(CudaExpertRows::bytes_for(c, kTokens), 0);
}

// A dense layer and one with experts.
ModelConfig two_layers() {
  ModelConfig c = r1();
  c.dim = 128;
  c.vocab = 257;
  c.n_layers = 2;
  c.n_dense_layers = 1;
  c.dense_dim = 256;
  c.expert_dim = 128;
  c.n_mtp_layers = 0;
  c.mla = {.n_heads = 2, .q_rank = 64, .kv_rank = 128, .nope_dim = 32, .rope_dim = 16, .v_dim = 32};
  c.router.n_experts = c.router.n_groups = 8;
  c.router.n_active = 2;
  return c;
}

// What a model takes of a GPU with all, some or none of its experts.
TEST(GpuSizes, OfAModel) {
  const TempDirectory dir;
  ModelConfig c = two_layers();
  write_checkpoint(dir.path(), tensors_of(c), 1);
  const WeightStore store(dir.path());
  ModelWeights stored = stored_weights(store, c);
  const GpuModelOptions options = {.max_tokens = 12, .max_logits = 5, .cache_type = DType::kF8E4M3};
  const GpuMemory memory = gpu_memory(stored, c, options);
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  EXPECT_EQ(memory.name, gpu_info.name);
  EXPECT_EQ(memory.streams, !gpu_info.emulated);

  constexpr int64_t kContext = 300, kKvTokens = 1000;
  const CudaLimits limits = {.max_tokens = 12,
                             .context = kContext,
                             .n_multiprocessors = gpu_info.n_multiprocessors,
                             .bytes_per_second = gpu_info.bytes_per_second};
  const int64_t always =
      CudaOps::bytes_for(c, limits) + DeepSeek::bytes_for(c, {12, 5}, whole_backbone(c)) +
      KvCache::bytes_for(c, kKvTokens, DType::kF8E4M3) + (gpu_info.emulated ? 0 : 300 << 20);
  const int64_t rows = CudaExpertRows::bytes_for(c, 12), hand_off = HybridExperts::bytes_for(c, 12);
  const auto other = [&](const GpuParts& parts) {
    return memory.other_bytes(parts, kContext, kKvTokens);
  };
  const std::vector<bool> all(8, true), none(8),
      some = {true, false, false, true, false, false, false, false};
  EXPECT_EQ(other({.experts = {{}, all}}), always + rows);
  EXPECT_EQ(other({.experts = {{}, some}}), always + rows + hand_off);
  EXPECT_EQ(other({.experts = {{}, none}}), always + CudaExpertRows::bytes_for(c, 0) + hand_off);
  EXPECT_EQ(other({.stream_from_tokens = 4, .experts = {{}, none}}),
            always + rows + hand_off + CudaStreaming::bytes_for(c, 12));
  EXPECT_EQ(other({.stream_from_tokens = kMeasuredCrossover, .experts = {{}, some}}),
            always + rows + hand_off + CudaStreaming::bytes_for(c, 12));

  // Weights, in units of 64 bytes. Of the matrices in FP8 each block of 128 x 128 has a scale, and
  // norms, biases and their like are floats.
  int64_t backbone = 0, embedding = 0, expert = 0;
  const auto whole = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  for_each_weight(stored, c, [&](const WeightSpec& spec, const QuantView& w) {
    const int64_t numbers = spec.rows * spec.cols;
    const bool fp8 = w.q.dtype == DType::kF8E4M3;
    const int64_t bytes =
        is_vector(spec.use) ? whole(numbers * 4)
        : fp8 ? whole(numbers) + whole((spec.rows + 127) / 128 * ((spec.cols + 127) / 128) * 4)
              : whole(numbers * 2);
    if (spec.use == WeightUse::kEmbedding)
      embedding += bytes;
    else if (spec.use != WeightUse::kExpert)
      backbone += bytes;
    else if (spec.expert == 0)
      expert += bytes;
  });
  EXPECT_EQ(expert, 3 * (128 * 128 + 64));
  EXPECT_EQ(memory.expert_bytes, expert);
  EXPECT_EQ(memory.weight_bytes({.experts = {{}, none}}), backbone + embedding);
  EXPECT_EQ(memory.weight_bytes({.experts = {{}, some}}), backbone + embedding + 2 * expert);
  EXPECT_EQ(memory.weight_bytes({.embedding_on_cpu = true, .experts = {{}, all}}),
            backbone + 8 * expert);
  c.tied_head = true;
  const int64_t head = 257 * 128 * 2;
  EXPECT_EQ(memory.weight_bytes({.experts = {{}, none}}), backbone + embedding - head);
  EXPECT_EQ(memory.weight_bytes({.embedding_on_cpu = true, .experts = {{}, none}}), backbone)
      << "the head has memory of its own";
}

TEST(GpuLimits, OfModels) {
  const auto refusal = [](int scale_block, int n_experts) {
    return error_of([&] {
      ModelConfig c = r1();
      c.scale_block = scale_block;
      c.router.n_experts = n_experts;
      CudaOps::require_takes(c);
    });
  };
  EXPECT_EQ(refusal(4, 1024), "no error");
  EXPECT_EQ(refusal(0, 0), "no error");
  EXPECT_EQ(refusal(6, 1025),
            "weight_block_size 6: the GPU kernels need a multiple of 4; use --device cpu");
  EXPECT_EQ(refusal(4, 1025),
            "1025 experts: the router on a GPU supports at most 1024; use --device cpu");
  ModelConfig wide = r1();
  wide.mla.kv_rank = 2049;
  EXPECT_TRUE(says(error_of([&] { CudaOps::require_takes(wide); }), "kv_lora_rank 2049"));
  gpu::Stream stream;
  const CudaLimits limits = {.max_tokens = 1, .context = 64, .n_multiprocessors = 1};
  ModelConfig blocks = two_layers();
  blocks.scale_block = 6;
  EXPECT_TRUE(says(error_of([&] { CudaOps(blocks, limits, stream); }), "weight_block_size 6"));
}

// Where launches wait for their kernels, the GPU cannot share a step with the CPU.
TEST(GpuLimits, OfHandOffs) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "CUDA reads CUDA_LAUNCH_BLOCKING once";
  const GpuParts whole = {.experts = {{}, {true, true}}}, shared = {.experts = {{}, {true, false}}};
  const auto refusal = [](const GpuParts& parts) {
    return error_of([&] { require_hand_off(parts); });
  };
  EXPECT_EQ(refusal(shared), "no error");
  const test::Setting blocking("CUDA_LAUNCH_BLOCKING", "1");
  EXPECT_EQ(refusal(whole), "no error");
  EXPECT_TRUE(says(refusal(shared), "kernel launches block until the kernel has ended"));
  const test::Setting display("TANDEM_GPU_WATCHDOG", "1");
  EXPECT_EQ(require_hand_off(whole), "");
  EXPECT_TRUE(says(require_hand_off(shared), "emulated GPU has a display"));
}

// FP8 activations need a GPU with tensor cores for them, and some weights in their blocks.
TEST(GpuLimits, OfFp8Activations) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "a GPU is what it is";
  const auto refusal_by = [](const char* capability) {
    setenv("TANDEM_GPU_CAPABILITY", capability, 1);
    const std::string error = error_of([] { require_fp8_gpu(); });
    unsetenv("TANDEM_GPU_CAPABILITY");
    return error;
  };
  EXPECT_EQ(refusal_by("89"), "no error");
  EXPECT_EQ(refusal_by("90"), "no error");
  EXPECT_EQ(refusal_by("86"),
            "--activations fp8: emulated GPU has compute capability 8.6, and FP8 on tensor cores "
            "needs 8.9 or newer and a program built for that: leave it out");
  const auto refusal_of = [](int scale_block) {
    const TempDirectory dir;
    ModelConfig c = two_layers();
    c.scale_block = scale_block;
    write_checkpoint(dir.path(), tensors_of(c), 1);
    const WeightStore store(dir.path());
    ModelWeights stored = stored_weights(store, c);
    return error_of([&] { gpu_memory(stored, c, {.fp8_activations = true}); });
  };
  EXPECT_EQ(refusal_of(128), "no error");
  for (const int scale_block : {0, 64})
    EXPECT_EQ(refusal_of(scale_block),
              "--activations fp8: the model has no FP8 weights in blocks of 128 columns: leave it "
              "out");
}

TEST(AttentionLimits, OfAGpu) {
  const auto refusal = [](int kv_rank, int rope_dim) {
    return error_of(
        [&] { CudaAttention::require_takes({.kv_rank = kv_rank, .rope_dim = rope_dim}); });
  };
  EXPECT_EQ(refusal(2048, 256), "no error");
  EXPECT_EQ(
      refusal(2049, 64),
      "kv_lora_rank 2049 and qk_rope_head_dim 64: attention on a GPU supports at most 2048 and "
      "a sum of at most 2304; use --device cpu");
  EXPECT_TRUE(says(refusal(2048, 257), "kv_lora_rank 2048 and qk_rope_head_dim 257"));
}

TEST(AttentionLimits, OfAnFp8Cache) {
  QuantView kv_b;
  kv_b.q.dtype = DType::kBF16;
  const auto takes = [&](const MlaConfig& m) {
    return error_of([&] { CudaAttention::require_fp8_cache(m, kv_b); }) == "no error";
  };
  EXPECT_TRUE(takes({}));
  EXPECT_TRUE(takes({.kv_rank = 510, .nope_dim = 126, .v_dim = 126}));
  EXPECT_FALSE(takes({.kv_rank = 514}));
  EXPECT_FALSE(takes({.kv_rank = 511}));
  EXPECT_FALSE(takes({.rope_dim = 63}));
  EXPECT_FALSE(takes({.kv_rank = 510, .nope_dim = 120, .rope_dim = 66}));
  EXPECT_FALSE(takes({.nope_dim = 127}));
  EXPECT_FALSE(takes({.nope_dim = 130}));
  EXPECT_FALSE(takes({.v_dim = 127}));
  EXPECT_FALSE(takes({.v_dim = 130}));
  kv_b.q.dtype = DType::kF32;
  EXPECT_EQ(error_of([&] { CudaAttention::require_fp8_cache({}, kv_b); }),
            "--kv fp8: attention of this model (kv_lora_rank 512, qk_nope_head_dim 128, "
            "qk_rope_head_dim 64, v_head_dim 128) needs the dimensions of DeepSeek and weights in "
            "BF16 or FP8; use --kv bf16");
}

TEST(AttentionLimits, OfTheCpu) {
  Team team(1);
  const auto refusal = [&](const MlaConfig& m) {
    return error_of([&] {
      ModelConfig c;
      c.mla = m;
      const CpuOps ops(cpu::kernels_for(cpu::Isa::kReference), c, 1, team);
    });
  };
  EXPECT_EQ(refusal({}), "no error");
  EXPECT_EQ(refusal({.nope_dim = 512, .v_dim = 512}), "no error");
  EXPECT_EQ(
      refusal({.rope_dim = 65}),
      "kv_lora_rank 512, qk_nope_head_dim 128, qk_rope_head_dim 65, v_head_dim 128: attention "
      "on the CPU supports keys of at most 576 and values of at most 512 numbers");
  EXPECT_TRUE(says(refusal({.nope_dim = 513}), "qk_nope_head_dim 513"));
  EXPECT_TRUE(says(refusal({.v_dim = 513}), "v_head_dim 513"));
  EXPECT_TRUE(says(refusal({.kv_rank = 513, .rope_dim = 63}), "kv_lora_rank 513"));
}

}  // namespace
}  // namespace tandem
