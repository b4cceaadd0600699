#include <algorithm>
#include <functional>

#include "bench/gpu/gpu_benches.h"
#include "bench/gpu_bench_model.h"
#include "gpu_kernels/peaks.h"
#include "gpu_kernels/runtime.h"

namespace tandem {
namespace {

constexpr int64_t kMinBytes = 1 << 20, kMaxReadBytes = 1 << 30, kMaxCopyBytes = 256 << 20;  // bytes
constexpr int kBlocksEach = 8;        // per multiprocessor
constexpr double kLongEnough = 5e-3;  // seconds per run, which makes a launch negligible

// Units per second of work(n), which does about n units. n is between least and most, and just
// large enough for kLongEnough, which keeps the emulator fast.
double rate_of(gpu::Stream& stream, int64_t least, int64_t most, double seconds,
               const std::function<int64_t(int64_t n)>& work) {
  int64_t done = 0;
  const auto seconds_of_run = [&](int64_t n, double for_seconds) {
    return seconds_of_runs([&](int64_t) { done = work(n); }, [&] { stream.wait(); }, for_seconds);
  };
  const double times = std::clamp(kLongEnough / seconds_of_run(least, 0), 1.0,
                                  static_cast<double>(most) / static_cast<double>(least));
  const double time = seconds_of_run(static_cast<int64_t>(times) * least, seconds);
  return static_cast<double>(done) / time;
}

// At most a quarter of the free memory.
int64_t max_bytes(const gpu::GpuInfo& gpu_info, int64_t bytes) {
  return std::clamp(gpu_info.free_bytes / 4 / kMinBytes * kMinBytes, kMinBytes, bytes);
}

using Multiply = int64_t (*)(const gpu::Stream& stream, int blocks, int rounds, float* out);
double multiply_rate(const gpu::GpuInfo& gpu_info, gpu::Stream& stream, double seconds,
                     Multiply multiply) {
  constexpr int kMaxRounds = 1 << 20;
  const gpu::Buffer out(sizeof(float), gpu::Site::kDevice);
  return rate_of(stream, 1, kMaxRounds, seconds, [&](int64_t rounds) {
    return multiply(stream, kBlocksEach * gpu_info.n_multiprocessors, static_cast<int>(rounds),
                    out.as<float>());
  });
}

}  // namespace

Gpu measured_gpu_bounds(double seconds, bool with_fp8) {
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  gpu::Stream stream;
  Gpu g{};
  g.name = gpu_info.name;
  g.memory_bytes = gpu_info.memory_bytes;
  g.datasheet_bf16_ops_per_second = gpu_info.datasheet_bf16_ops_per_second;
  const gpu::Buffer memory(max_bytes(gpu_info, kMaxReadBytes), gpu::Site::kDevice);
  const gpu::Buffer out(sizeof(uint32_t), gpu::Site::kDevice);
  g.read_bytes_per_second = rate_of(stream, kMinBytes, memory.bytes(), seconds, [&](int64_t bytes) {
    gpu::read_once(stream, memory.as<std::byte>(), bytes, kBlocksEach * gpu_info.n_multiprocessors,
                   out.as<uint32_t>());
    return bytes;
  });
  g.peak.bf16 = multiply_rate(gpu_info, stream, seconds, gpu::multiply_bf16);
  if (with_fp8) g.peak.fp8 = multiply_rate(gpu_info, stream, seconds, gpu::multiply_fp8);
  return g;
}

Gpu measured_gpu(double seconds) {
  Gpu g = measured_gpu_bounds(seconds);
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  gpu::Stream stream;
  g.peak.fp32 = multiply_rate(gpu_info, stream, seconds, gpu::multiply_f32);
  const gpu::Buffer there(max_bytes(gpu_info, kMaxCopyBytes), gpu::Site::kDevice);
  const gpu::Buffer pinned(there.bytes(), gpu::Site::kMapped);
  std::vector<std::byte> pageable(there.bytes());
  const auto copy = [&](const std::byte* from, std::byte* to) {
    return rate_of(stream, kMinBytes, there.bytes(), seconds, [&](int64_t bytes) {
      stream.copy(from, bytes, to);
      return bytes;
    });
  };
  g.h2d_bytes_per_second = copy(pinned.as<std::byte>(), there.as<std::byte>());
  g.d2h_bytes_per_second = copy(there.as<std::byte>(), pinned.as<std::byte>());
  g.h2d_pageable_bytes_per_second = copy(pageable.data(), there.as<std::byte>());
  g.d2h_pageable_bytes_per_second = copy(there.as<std::byte>(), pageable.data());
  return g;
}

}  // namespace tandem
