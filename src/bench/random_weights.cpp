// Random weights, written as fast as memory takes them: every matrix is cut out of one pool of
// random rows, at another place each time.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "bench/bench_model.h"
#include "bench/machine_info.h"

namespace tandem {
namespace {

constexpr int64_t kPoolElements = 4 << 20;
constexpr int64_t kRowsOfJob = 2 * kPackRows;

// xorshift64*, Vigna 2016
class Random {
 public:
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1DULL;
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1; }  // [-1, 1)

 private:
  uint64_t state_ = 0x9E3779B97F4A7C15ULL;
};

void write_element(std::byte* to, DType dtype, float value, uint8_t code) {
  switch (dtype) {
    case DType::kF8E4M3:
      *to = static_cast<std::byte>((code & 0x7f) == 0x7f ? 0 : code);  // 0x7f is NaN
      return;
    case DType::kBF16: {
      const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      std::memcpy(to, &half, sizeof(half));
      return;
    }
    case DType::kF16: {
      const auto half = static_cast<_Float16>(value);
      std::memcpy(to, &half, sizeof(half));
      return;
    }
    default:
      std::memcpy(to, &value, sizeof(value));
  }
}

// Elements of matrices with `cols` columns; FP8 codes are of any size, their scales see to it.
class Pool {
 public:
  Pool(DType dtype, int64_t cols) : dtype_(dtype), bytes_(kPoolElements * size_of(dtype)) {
    Random random;
    const float largest = std::sqrt(3.f / static_cast<float>(cols));
    for (int64_t i = 0; i < kPoolElements; ++i) {
      const float value = random.uniform() * largest;
      write_element(bytes_.data() + i * size_of(dtype), dtype, value,
                    static_cast<uint8_t>(random.next() >> 56));
    }
  }
  // `n` elements; the place follows from `number`.
  const std::byte* cut(int64_t n, uint64_t number) const {
    const auto places = static_cast<uint64_t>(std::max<int64_t>(1, (kPoolElements - n) / 64));
    return bytes_.data() +
           static_cast<int64_t>(number * 0x9E3779B97F4A7C15ULL % places) * 64 * size_of(dtype_);
  }

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

// A matrix to be filled.
struct Job {
  QuantView packed;
  const Pool* pool;
  int64_t first_row, n_rows;
  bool is_table;
};

bool is_vector(WeightUse use) { return use == WeightUse::kNorm || use == WeightUse::kRouterBias; }

DType dtype_of_use(WeightUse use, WeightFormats formats) {
  switch (use) {
    case WeightUse::kExpert:
      return formats.experts;
    case WeightUse::kAttention:
    case WeightUse::kDense:
    case WeightUse::kShared:
      return formats.backbone;
    case WeightUse::kEmbedding:
    case WeightUse::kHead:
    case WeightUse::kRouter:
      return DType::kBF16;
    case WeightUse::kNorm:
    case WeightUse::kRouterBias:
      return DType::kF32;
  }
  return DType::kF32;
}

// What a checkpoint would hold of a tensor, but for the numbers of matrices.
class Stored {
 public:
  Stored(const ModelConfig& config, WeightFormats formats)
      : block_(config.scale_block > 0 ? config.scale_block : kDefaultScaleBlock),
        formats_(formats) {}

  QuantView view(const WeightSpec& spec) {
    const DType dtype = dtype_of_use(spec.use, formats_);
    QuantView w{.q = {nullptr, spec.rows, spec.cols, spec.cols, dtype}, .scale = {}};
    if (is_vector(spec.use)) {
      const float value = spec.use == WeightUse::kNorm ? 1.f : 0.f;
      w.q.data = constant(spec.rows * spec.cols, value);
    } else if (dtype == DType::kF8E4M3) {
      constexpr float kDeviationOfCodes = 100;
      w.block_rows = w.block_cols = block_;
      const int64_t rows = (spec.rows + block_ - 1) / block_,
                    cols = (spec.cols + block_ - 1) / block_;
      const float scale = 1 / (kDeviationOfCodes * std::sqrt(static_cast<float>(spec.cols)));
      w.scale = {constant(rows * cols, scale), rows, cols, cols, DType::kF32};
    }
    return w;
  }

 private:
  void* constant(int64_t n, float value) {
    std::vector<float>& values = constants_[value];
    if (std::ssize(values) < n) {
      older_.push_back(std::move(values));  // earlier views look at it
      values.assign(n, value);
    }
    return values.data();
  }

  const int block_;
  const WeightFormats formats_;
  std::map<float, std::vector<float>> constants_;
  std::vector<std::vector<float>> older_;
};

void fill(std::vector<Job>& jobs, const CpuWeights& home, Team& team) {
  team.run(std::ssize(jobs), [&](int64_t i, int) {
    const Job& job = jobs[i];
    const int64_t cols = job.packed.q.cols;
    const std::byte* rows = job.pool->cut(job.n_rows * cols, static_cast<uint64_t>(i));
    if (job.is_table)
      std::memcpy(job.packed.q.row_data(job.first_row), rows,
                  job.n_rows * cols * size_of(job.packed.q.dtype));
    else
      home.pack(rows, job.packed, job.first_row, job.n_rows);
  });
}

}  // namespace

ModelWeights random_weights(const ModelConfig& config, WeightFormats formats,
                            const std::function<bool(const WeightSpec&)>& wanted, CpuWeights& home,
                            Team& team) {
  ModelWeights weights;
  Stored stored(config, formats);
  struct Slot {
    QuantView* slot;
    QuantView stored;
    WeightUse use;
  };
  std::vector<Slot> slots;
  int64_t bytes = 0;
  for_each_weight(weights, config, [&](const WeightSpec& spec, QuantView& slot) {
    if (!wanted(spec)) return;
    const QuantView w = stored.view(spec);
    slots.push_back({&slot, w, spec.use});
    bytes += is_vector(spec.use)                 ? CpuWeights::vector_bytes(w)
             : spec.use == WeightUse::kEmbedding ? CpuWeights::table_bytes(w)
                                                 : home.packed_bytes(w);
  });
  require(bytes <= available_memory_bytes(),
          "random weights of {:.1f} GB do not fit: {:.1f} GB of memory are available; choose fewer "
          "--layers or a smaller format",
          static_cast<double>(bytes) * 1e-9, static_cast<double>(available_memory_bytes()) * 1e-9);
  home.allocate(bytes);

  std::map<std::pair<DType, int64_t>, Pool> pools;
  std::vector<Job> jobs;
  for (const Slot& s : slots) {
    if (is_vector(s.use)) {
      *s.slot = home.keep_vector(s.stored);
      continue;
    }
    const bool is_table = s.use == WeightUse::kEmbedding;
    *s.slot = is_table ? home.reserve_table(s.stored) : home.reserve(s.stored);
    const TensorView& q = s.stored.q;
    const int64_t cols_of_pool = q.dtype == DType::kF8E4M3 ? 1 : q.cols;
    const Pool& pool =
        pools.try_emplace({q.dtype, cols_of_pool}, q.dtype, cols_of_pool).first->second;
    for (int64_t first = 0; first < q.rows; first += kRowsOfJob)
      jobs.push_back({*s.slot, &pool, first, std::min(kRowsOfJob, q.rows - first), is_table});
  }
  if (config.tied_head) weights.head = weights.embed;
  fill(jobs, home, team);
  return weights;
}

}  // namespace tandem
