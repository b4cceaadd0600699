#include "tests/random_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace tandem::test {

RandomModel::RandomModel(const ModelConfig& c, DType matrices) : config(c) {
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& slot) {
    const bool fp8 = spec.use == WeightUse::kAttention || spec.use == WeightUse::kDense ||
                     spec.use == WeightUse::kShared || spec.use == WeightUse::kExpert;
    const DType dtype = matrices != DType::kF8E4M3 ? matrices : fp8 ? DType::kF8E4M3 : DType::kBF16;
    if (spec.group > 0) {
      slot = int4_words(spec.rows, spec.cols, spec.group);
    } else if (spec.use == WeightUse::kNorm) {
      slot.q = floats(1, spec.cols, 1.f, 0.2f, DType::kF32);
    } else if (spec.use == WeightUse::kRouterBias) {
      slot.q = floats(1, spec.cols, -0.2f, 0.3f, DType::kF32);
    } else {
      slot = matrix(spec.rows, spec.cols, dtype);
    }
  });
  if (config.tied_head) stored.head = stored.embed;
}

TensorView RandomModel::room(int64_t rows, int64_t cols, DType dtype) {
  storage.emplace_back(rows * cols * bits_of(dtype) / 8 + 1);
  return {storage.back().data() + 1, rows, cols, cols, dtype};  // unaligned, as in a checkpoint
}

TensorView RandomModel::floats(int64_t rows, int64_t cols, float mean, float deviation,
                               DType dtype) {
  TensorView t = room(rows, cols, dtype);
  std::normal_distribution<float> normal(mean, deviation);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float v = normal(rng);
    const uint16_t half = to_bf16(v);
    std::memcpy(t.row_data(0) + i * size_of(dtype),
                dtype == DType::kF32 ? static_cast<const void*>(&v) : &half, size_of(dtype));
  }
  return t;
}

QuantView RandomModel::int4_words(int64_t rows, int64_t cols, int group) {
  QuantView w{.q = room(rows, cols, DType::kI4Words), .scale = {}};
  for (int64_t i = 0; i < rows * cols / 2; ++i)
    w.q.row_data(0)[i] = static_cast<std::byte>(rng() & 0xff);
  // Random codes have a standard deviation of about 4.6.
  const float scale = 0.2f / std::sqrt(static_cast<float>(cols));
  w.scale = floats(rows, cols / group, scale, scale / 5, DType::kBF16);
  w.block_rows = 1;
  w.block_cols = group;
  return w;
}

QuantView RandomModel::matrix(int64_t rows, int64_t cols, DType dtype) {
  const float deviation = 1 / std::sqrt(static_cast<float>(cols));
  if (dtype != DType::kF8E4M3) return {.q = floats(rows, cols, 0, deviation, dtype), .scale = {}};
  QuantView w{.q = room(rows, cols, dtype), .scale = {}};
  for (int64_t i = 0; i < rows * cols; ++i) {
    const auto code = static_cast<uint8_t>(rng() & 0xff);
    w.q.row_data(0)[i] = static_cast<std::byte>((code & 0x7f) == 0x7f ? 0 : code);  // 0x7f is NaN
  }
  w.block_rows = w.block_cols = config.scale_block;
  w.scale = room((rows + w.block_rows - 1) / w.block_rows, (cols + w.block_cols - 1) / w.block_cols,
                 DType::kF32);
  std::uniform_real_distribution<float> spread(0.5f, 1.5f);
  for (int64_t i = 0; i < w.scale.rows * w.scale.cols; ++i) {
    const float s = spread(rng) * deviation / 100;  // random codes have a deviation of about 100
    std::memcpy(w.scale.row_data(0) + i * 4, &s, 4);
  }
  return w;
}

uint16_t to_bf16(float v) {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

void fill_with_nan(const TensorView& t) {
  for (int64_t r = 0; r < t.rows; ++r) std::memset(t.row_data(r), 0xff, t.cols * size_of(t.dtype));
}

void run_jobs(const PackedModel& packed, const CpuWeights& home) {
  const PackJobs jobs = load_jobs(packed, home);
  for (const std::vector<LoadJob>& some : {jobs.first, jobs.rest})
    for (const LoadJob& job : some) job.run(job.source);
}

TestEngine::TestEngine(RandomModel& m, cpu::Isa isa, AttentionForm form, DType cache_type,
                       int n_threads, int max_tokens)
    : TestEngine(m.config, m.stored, isa, form, cache_type,
                 with_threads(this_topology(), n_threads), max_tokens) {}

TestEngine::TestEngine(const ModelConfig& config, ModelWeights& stored, cpu::Isa isa,
                       AttentionForm form, DType cache_type, const Topology& topology,
                       int max_tokens)
    : kernels(cpu::kernels_for(isa)),
      home(kernels, topology),
      packed(reserve_packed(stored, config, home)),
      team(topology),
      device(team),
      ops(kernels, config, max_tokens, team),
      experts(kernels, config, packed.weights, max_tokens, team),
      model({config, packed.weights, device, ops, experts}, {max_tokens, max_tokens}, form),
      cache(config, 1024, cache_type) {
  run_jobs(packed, home);
  for (int l = 0; l < config.n_layers; ++l) fill_with_nan(cache.layer(l));
}

std::vector<std::vector<float>> TestEngine::run(const std::vector<int32_t>& tokens, int chunk,
                                                const std::vector<int32_t>& pages) {
  std::vector<std::vector<float>> all;
  for (int done = 0; done < static_cast<int>(tokens.size()); done += chunk) {
    const int n = std::min(chunk, static_cast<int>(tokens.size()) - done);
    for (auto& row : step({{std::span(tokens).subspan(done, n), done, pages}}))
      all.push_back(std::move(row));
  }
  return all;
}

std::vector<std::vector<float>> TestEngine::step(const std::vector<Part>& parts) {
  std::vector<int32_t> tokens, positions, rows;
  std::vector<Sequence> sequences;
  for (const Part& p : parts) {
    const auto n = static_cast<int32_t>(p.tokens.size());
    sequences.push_back({static_cast<int32_t>(tokens.size()), n, p.first_position + n, p.pages});
    for (int32_t i = 0; i < n; ++i) {
      rows.push_back(static_cast<int32_t>(tokens.size()));
      tokens.push_back(p.tokens[i]);
      positions.push_back(p.first_position + i);
    }
  }
  const int vocab = model.config().vocab;
  std::vector<float> logits(tokens.size() * vocab, std::numeric_limits<float>::quiet_NaN());
  model.forward({tokens, positions, sequences, rows}, cache,
                {logits.data(), static_cast<int64_t>(tokens.size()), vocab, vocab, DType::kF32});
  std::vector<std::vector<float>> out;
  for (size_t t = 0; t < tokens.size(); ++t)
    out.emplace_back(logits.begin() + t * vocab, logits.begin() + (t + 1) * vocab);
  return out;
}

}  // namespace tandem::test
