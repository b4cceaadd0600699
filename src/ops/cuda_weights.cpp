#include "ops/cuda_weights.h"

#include <algorithm>
#include <cstring>

#include "core/rounding.h"
#include "cpu_kernels/kernels.h"
#include "ops/cpu_weights.h"
#include "ops/int4_words.h"

namespace tandem {
namespace {

constexpr int64_t kRowAlignment = 16;  // bytes

DType type_on_gpu(DType stored, WeightUse use) {
  if (is_vector(use) || stored == DType::kF16) return DType::kF32;
  return stored == DType::kI4Words ? DType::kBF16 : stored;
}

int64_t stride_of(int64_t cols, DType dtype) {
  const int64_t step = kRowAlignment / size_of(dtype);
  return round_up(cols, step);
}

bool keeps_scales(const QuantView& stored) {
  return !stored.scale.empty() && stored.q.dtype != DType::kI4Words;
}

// Decodes a row of a stored matrix that the GPU keeps in another format.
class RowDecoder {
 public:
  explicit RowDecoder(const QuantView& stored)
      : stored_(stored),
        kernels_(cpu::kernels_for(cpu::Isa::kReference)),
        values_(static_cast<size_t>(stored.q.cols)),
        scales_(static_cast<size_t>(stored.scale.cols)) {}

  void write(const std::byte* row, int64_t at, DType type, std::byte* to) {
    const int64_t cols = stored_.q.cols;
    if (stored_.q.dtype == DType::kI4Words) {
      int4_values(row, cols, values_.data());
      kernels_.decode({stored_.scale.row_data(at), kernel_type(stored_.scale.dtype), scales_.data(),
                       stored_.scale.cols});
      for (int64_t c = 0; c < cols; ++c) values_[c] *= scales_[c / stored_.block_cols];
    } else {
      kernels_.decode({row, kernel_type(stored_.q.dtype), values_.data(), cols});
    }
    if (type == DType::kBF16)
      kernels_.encode_bf16({values_.data(), reinterpret_cast<cpu::bf16*>(to), cols});
    else
      std::memcpy(to, values_.data(), static_cast<size_t>(cols) * sizeof(float));
  }

 private:
  const QuantView& stored_;
  const cpu::KernelTable kernels_;
  std::vector<float> values_, scales_;
};

}  // namespace

int64_t CudaWeights::bytes_of(const QuantView& stored, WeightUse use) {
  const DType type = type_on_gpu(stored.q.dtype, use);
  const int64_t codes =
      Arena::padded_bytes(stored.q.rows * stride_of(stored.q.cols, type) * size_of(type));
  if (!keeps_scales(stored)) return codes;
  return codes + Arena::padded_bytes(stored.scale.rows * stored.scale.cols * size_of(DType::kF32));
}

void CudaWeights::allocate(int64_t bytes, gpu::Site site) {
  memory_ = gpu::Buffer(bytes, site);
  arena_ = Arena(std::span(memory_.as<std::byte>(), static_cast<size_t>(bytes)));
}

QuantView CudaWeights::reserve(const QuantView& stored, WeightUse use) {
  const DType type = type_on_gpu(stored.q.dtype, use);
  QuantView on_gpu = {.q = arena_.matrix(stored.q.rows, stride_of(stored.q.cols, type), type),
                      .scale = {}};
  on_gpu.q.cols = stored.q.cols;
  if (!keeps_scales(stored)) return on_gpu;
  on_gpu.scale = arena_.matrix(stored.scale.rows, stored.scale.cols, DType::kF32);
  on_gpu.block_rows = stored.block_rows;
  on_gpu.block_cols = stored.block_cols;
  return on_gpu;
}

void CudaWeights::upload_rows(const std::byte* rows, const QuantView& stored,
                              const QuantView& on_gpu, int64_t first_row, int64_t n_rows) {
  const int64_t stored_bytes = stored.q.row_bytes(), bytes = on_gpu.q.row_bytes();
  const bool decodes = stored.q.dtype != on_gpu.q.dtype;
  RowDecoder decoder(stored);
  copy_rows(on_gpu.q, first_row, n_rows, [&](int64_t row, std::byte* to) {
    const std::byte* from = rows + (row - first_row) * stored_bytes;
    const int64_t used = on_gpu.q.cols * size_of(on_gpu.q.dtype);
    if (decodes)
      decoder.write(from, row, on_gpu.q.dtype, to);
    else
      std::memcpy(to, from, static_cast<size_t>(used));
    std::memset(to + used, 0, static_cast<size_t>(bytes - used));
  });
}

void CudaWeights::upload_scales(const std::byte* scales, const QuantView& stored,
                                const QuantView& on_gpu) {
  const int64_t bytes = on_gpu.scale.row_bytes(), stored_bytes = stored.scale.row_bytes();
  copy_rows(on_gpu.scale, 0, on_gpu.scale.rows, [&](int64_t row, std::byte* to) {
    std::memcpy(to, scales + row * stored_bytes, static_cast<size_t>(bytes));
  });
}

// Copies rows to the GPU, as many at a time as fit a stage.
void CudaWeights::copy_rows(const TensorView& to, int64_t first_row, int64_t n_rows,
                            const std::function<void(int64_t row, std::byte* to)>& fill) {
  const int64_t row_bytes = to.row_bytes();
  check(row_bytes <= kStageBytes, "a row fits a stage");
  const int64_t at_once = kStageBytes / row_bytes;
  for (int64_t done = 0; done < n_rows; done += at_once) {
    const int64_t n = std::min(at_once, n_rows - done), row = first_row + done;
    Stage stage = take_stage();
    auto* staged = stage.memory.as<std::byte>();
    for (int64_t i = 0; i < n; ++i) fill(row + i, staged + i * row_bytes);
    stream_.copy(staged, n * row_bytes, to.row_data(row));
    stream_.record(stage.copied);
    give_back(std::move(stage));
  }
}

CudaWeights::Stage CudaWeights::take_stage() {
  std::unique_lock lock(mutex_);
  if (stages_.empty() && n_stages_ < kStages) {
    ++n_stages_;
    lock.unlock();
    return {gpu::Buffer(kStageBytes, gpu::Site::kMapped), gpu::Event()};
  }
  returned_.wait(lock, [&] { return !stages_.empty(); });
  Stage stage = std::move(stages_.front());  // the one returned first
  stages_.erase(stages_.begin());
  lock.unlock();
  stage.copied.wait();
  return stage;
}

void CudaWeights::give_back(Stage stage) {
  const std::lock_guard lock(mutex_);
  stages_.push_back(std::move(stage));
  returned_.notify_one();
}

gpu::Weight gpu_weight(const QuantView& w) {
  const Number type = w.q.dtype == DType::kF32    ? Number::kF32
                      : w.q.dtype == DType::kBF16 ? Number::kBF16
                                                  : Number::kF8E4M3;
  gpu::Weight weight = {.data = w.q.data,
                        .stride = w.q.stride,
                        .type = type,
                        .rows = static_cast<int>(w.q.rows),
                        .cols = static_cast<int>(w.q.cols)};
  if (w.scale.empty()) return weight;
  weight.scale = static_cast<const float*>(w.scale.data);
  weight.scale_stride = w.scale.stride;
  weight.block_rows = w.block_rows;
  weight.block_cols = w.block_cols;
  return weight;
}

}  // namespace tandem
