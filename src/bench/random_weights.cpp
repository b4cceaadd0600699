// Random weights, written at memory speed: the first matrix of a shape and format is packed, the
// others are copies of it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <tuple>

#include "bench/bench_model.h"
#include "core/machine_info.h"
#include "core/rounding.h"
#include "cpu_kernels/e4m3.h"
#include "model/cost.h"

namespace tandem {
namespace {

constexpr int64_t kCopyBytes = 1 << 20;

WeightFormat format_of(WeightUse use, const WeightFormats& formats) {
  switch (use) {
    case WeightUse::kExpert:
      return formats.experts;
    case WeightUse::kAttention:
    case WeightUse::kDense:
    case WeightUse::kShared:
      return formats.backbone;
    case WeightUse::kEmbedding:
    case WeightUse::kHead:
    case WeightUse::kMtpProjection:
    case WeightUse::kRouter:
      return {DType::kBF16};
    case WeightUse::kNorm:
    case WeightUse::kRouterBias:
      break;
  }
  return {DType::kF32};
}

bool is_integer(WeightFormat format) { return format.dtype == DType::kI8 || is_i4(format.dtype); }

// xorshift64*, Vigna 2016.
class Random {
 public:
  explicit Random(int64_t seed)
      : state_(0x9E3779B97F4A7C15ULL ^ static_cast<uint64_t>(seed) << 8) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1DULL;
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1; }  // [-1, 1)
  // Nearly normal with a deviation of 1: the sum of three uniform numbers.
  float normal() {
    constexpr uint64_t kBits = 21, kMask = (1 << kBits) - 1;
    const uint64_t bits = next();
    const uint64_t sum = (bits & kMask) + (bits >> kBits & kMask) + (bits >> 2 * kBits & kMask);
    return static_cast<float>(static_cast<int64_t>(sum)) * 0x1p-20f - 3;
  }

 private:
  uint64_t state_;
};

// Truncates; values below the smallest normal half become 0. (clang 14 has no _Float16 here.)
uint16_t half_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rebiased = magnitude < 0x38800000 ? 0 : (magnitude - 0x38000000) >> 13;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | rebiased);
}

// The largest magnitude of a matrix. A deviation of 1 / sqrt(cols) preserves the size of
// activations. Embeddings are far larger than what layers add to them. Otherwise attention would
// make the tokens of a prompt similar, and they would choose the same experts.
float largest_of(WeightUse use, int64_t cols) {
  constexpr float kEmbeddingDeviation = 32;
  const float deviation =
      use == WeightUse::kEmbedding ? kEmbeddingDeviation : 1 / std::sqrt(static_cast<float>(cols));
  return std::sqrt(3.f) * deviation;
}

constexpr float kDeviationOfCodes = 100;

// A row as a checkpoint stores it. FP8 codes are near those of a trained matrix, whose block scales
// make its largest number 448: one in 9,000 is below the smallest normal number, which some kernels
// widen more slowly.
void write_row(std::byte* to, DType dtype, int64_t cols, float largest, Random random) {
  for (int64_t i = 0; i < cols; ++i, to += size_of(dtype)) {
    if (dtype == DType::kF8E4M3) {
      *to = static_cast<std::byte>(cpu::to_e4m3(random.normal() * kDeviationOfCodes));
      continue;
    }
    const float value = random.uniform() * largest;
    if (dtype == DType::kBF16) {
      const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      std::memcpy(to, &half, sizeof(half));
    } else if (dtype == DType::kF16) {
      const uint16_t half = half_of(value);
      std::memcpy(to, &half, sizeof(half));
    } else {
      std::memcpy(to, &value, sizeof(value));
    }
  }
}

// A tensor as a checkpoint stores it; `numbers` owns the scales, or a vector's values.
QuantView stored_view(const WeightSpec& spec, WeightFormat format, int block,
                      std::vector<float>& numbers) {
  const DType dtype = is_integer(format) ? DType::kBF16 : format.dtype;
  QuantView w{.q = {nullptr, spec.rows, spec.cols, spec.cols, dtype}, .scale = {}};
  if (is_vector(spec.use)) {
    numbers.assign(spec.cols, spec.use == WeightUse::kNorm ? 1.f : 0.f);
    w.q.data = numbers.data();
  } else if (dtype == DType::kF8E4M3) {
    const int64_t rows = ceil_div(spec.rows, block), cols = ceil_div(spec.cols, block);
    w.block_rows = w.block_cols = block;
    numbers.assign(rows * cols, 1 / (kDeviationOfCodes * std::sqrt(static_cast<float>(spec.cols))));
    w.scale = {numbers.data(), rows, cols, cols, DType::kF32};
  }
  return w;
}

// Packs the scales, then random rows, kPackRows at a time.
void fill_first(const QuantView& stored, const QuantView& packed, WeightUse use,
                const CpuWeights& home, Team& team) {
  if (!stored.scale.empty()) CpuWeights::pack_scales(stored.scale.data, packed);
  const int64_t row_bytes = stored.q.row_bytes(), n_rows = stored.q.rows;
  const float largest = largest_of(use, stored.q.cols);
  team.run(ceil_div(n_rows, kPackRows), [&](int64_t i, int) {
    const int64_t first = i * kPackRows, n = std::min(kPackRows, n_rows - first);
    std::vector<std::byte> rows(n * row_bytes);
    for (int64_t r = 0; r < n; ++r)
      write_row(rows.data() + r * row_bytes, stored.q.dtype, stored.q.cols, largest,
                Random(first + r));
    if (use == WeightUse::kEmbedding)
      std::memcpy(packed.q.row_data(first), rows.data(), n * row_bytes);
    else if (stored.q.dtype == packed.q.dtype)
      home.pack(rows.data(), packed, first, n);
    else
      home.convert(rows.data(), stored, packed, first, n);
  });
}

struct Copy {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};

// Source and target have the same layout: numbers, then scales, contiguous in the arena.
void add_copies(const TensorView& from, const TensorView& to, int64_t bytes,
                std::vector<Copy>& copies) {
  for (int64_t at = 0; at < bytes; at += kCopyBytes)
    copies.push_back(
        {from.row_data(0) + at, to.row_data(0) + at, std::min(kCopyBytes, bytes - at)});
}

}  // namespace

QuantView RandomTensor::stored(const WeightSpec& spec) {
  return stored_view(spec, format_of(spec.use, formats_), scale_block_of(config_), numbers_);
}

void RandomTensor::write_rows(const QuantView& stored, WeightUse use, int64_t first, int64_t n,
                              std::byte* to) {
  const int64_t row_bytes = stored.q.row_bytes();
  if (stored.q.data)  // a vector
    std::memcpy(to, stored.q.row_data(first), n * row_bytes);
  else
    for (int64_t r = 0; r < n; ++r)
      write_row(to + r * row_bytes, stored.q.dtype, stored.q.cols, largest_of(use, stored.q.cols),
                Random(first + r));
}

void fill_with_normal(TensorView x) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < x.rows * x.cols; ++i) x.row<float>(0)[i] = normal(rng);
}

ModelWeights random_weights(const ModelConfig& config, WeightFormats formats,
                            const std::function<bool(const WeightSpec&)>& wanted, CpuWeights& home,
                            Team& team) {
  const int block = scale_block_of(config);
  std::vector<float> numbers;
  const auto packed_bytes = [&](const WeightSpec& spec, WeightFormat format) {
    const QuantView w = stored_view(spec, format, block, numbers);
    return is_vector(spec.use)                 ? CpuWeights::vector_bytes(w)
           : spec.use == WeightUse::kEmbedding ? CpuWeights::table_bytes(w)
           : is_integer(format)                ? home.converted_bytes(w, format)
                                               : home.packed_bytes(w);
  };
  ModelWeights weights;
  weights.slices = home.expert_slices(config.expert_dim, formats.experts.dtype);
  std::vector<int64_t> region_bytes(home.n_regions());
  for_each_weight(weights, config, [&](const WeightSpec& spec, QuantView&) {
    int64_t& bytes = region_bytes[CpuWeights::region_of(spec)];
    if (wanted(spec)) bytes += packed_bytes(spec, format_of(spec.use, formats));
    if (config.tied_head && spec.use == WeightUse::kEmbedding)
      bytes += packed_bytes({spec.name, -1, -1, WeightUse::kHead, spec.rows, spec.cols},
                            format_of(WeightUse::kHead, formats));
  });
  const int64_t bytes = std::accumulate(region_bytes.begin(), region_bytes.end(), int64_t{0});
  const int64_t available = available_memory_bytes();
  require(bytes <= available,
          "random weights of {:.1f} GB do not fit: {:.1f} GB of memory are available; choose fewer "
          "--layers or a smaller format",
          gigabytes(bytes), gigabytes(available));
  home.allocate(region_bytes);

  std::map<std::tuple<bool, DType, int, int64_t, int64_t>, QuantView> firsts;
  std::vector<Copy> copies;
  const auto make = [&](const WeightSpec& spec, QuantView& slot) {
    const WeightFormat format = format_of(spec.use, formats);
    const QuantView stored = stored_view(spec, format, block, numbers);
    const bool table = spec.use == WeightUse::kEmbedding;
    const int region = CpuWeights::region_of(spec);
    slot = is_vector(spec.use)  ? home.keep_vector(stored)
           : table              ? home.reserve_table(stored)
           : is_integer(format) ? home.reserve_converted(stored, format, region)
                                : home.reserve(stored, region);
    if (is_vector(spec.use)) return;
    const auto [first, is_first] =
        firsts.try_emplace({table, format.dtype, format.group, spec.rows, spec.cols}, slot);
    if (is_first) return fill_first(stored, slot, spec.use, home, team);
    add_copies(first->second.q, slot.q, packed_bytes(spec, format), copies);
  };
  for_each_weight(weights, config, [&](const WeightSpec& spec, QuantView& slot) {
    if (wanted(spec)) make(spec, slot);
    if (config.tied_head && spec.use == WeightUse::kEmbedding)
      make({spec.name, -1, -1, WeightUse::kHead, spec.rows, spec.cols}, weights.head);
  });
  team.run(std::ssize(copies),
           [&](int64_t i, int) { std::memcpy(copies[i].to, copies[i].from, copies[i].bytes); });
  return weights;
}

}  // namespace tandem
