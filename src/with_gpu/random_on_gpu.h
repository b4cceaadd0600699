// Operands for timing: the clock of tensor cores depends on the data.
#pragma once
#include <algorithm>
#include <random>

#include "gpu_kernels/numbers.h"
#include "gpu_kernels/runtime.h"

namespace tandem {

// Fills the buffer with random numbers between -1 and 1, a few million of them repeated, and waits.
inline void fill_with_random(gpu::Stream& stream, Number type, const gpu::Buffer& buffer) {
  constexpr int64_t kMaxBytes = 4 << 20;
  const int64_t bytes = std::min(buffer.bytes(), kMaxBytes);
  const gpu::Buffer numbers(bytes, gpu::Site::kMapped);
  std::minstd_rand rng(1);
  const auto fill = [&]<class T>(T* to, auto number) {
    for (int64_t i = 0; i < bytes / int64_t{sizeof(T)}; ++i) to[i] = number();
  };
  const auto uniform = [&] { return static_cast<float>(rng()) * 0x1p-30f - 1; };
  if (type == Number::kF32) fill(numbers.as<float>(), uniform);
  if (type == Number::kBF16) fill(numbers.as<bf16>(), [&] { return narrow(uniform()); });
  if (type == Number::kF8E4M3)  // a sign and an exponent, magnitudes up to 1
    fill(numbers.as<fp8_e4m3>(), [&] { return fp8_e4m3{static_cast<uint8_t>(rng() >> 8 & 0xb7)}; });
  for (int64_t at = 0; at < buffer.bytes(); at += bytes)
    stream.copy(numbers.as<std::byte>(), std::min(bytes, buffer.bytes() - at),
                buffer.as<std::byte>() + at);
  stream.wait();
}

}  // namespace tandem
