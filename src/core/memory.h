// Owning memory. Every tensor of the engine is a view into one of these or into a mapped file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/rounding.h"
#include "core/tensor.h"

namespace tandem {

// For messages.
constexpr double gigabytes(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

// Maps so many bytes of zeros, whole pages, 2 MiB aligned and in huge pages where the kernel
// allows. Null where the address space is refused.
std::byte* map_in_huge_pages(int64_t bytes);

// Zero-filled host memory, 2 MiB aligned, in huge pages, as far as it fills them, where the kernel
// allows. Pages become resident when first written. Throws Error when the address space is
// refused.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);
  // Memory that `owner` keeps alive, such as GPU memory: not zero-filled, and the host need not be
  // able to access it.
  Buffer(std::span<std::byte> memory, std::shared_ptr<const void> owner);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  std::shared_ptr<const void> owner_;
};

// Hands out views of one Buffer, front to back, each 64-byte aligned; nothing is freed before the
// arena is.
class Arena {
 public:
  Arena() = default;
  // `bytes` is the sum of padded_bytes() of all its matrices.
  explicit Arena(int64_t bytes) : Arena(Buffer(bytes)) {}
  explicit Arena(Buffer buffer) : buffer_(std::move(buffer)), memory_(buffer_.span()) {}
  // An arena in memory that the caller owns.
  explicit Arena(std::span<std::byte> memory) : memory_(memory) {}
  // An arena sized for a list of matrices, whose views are set to point into it. for_each(visit)
  // calls visit(TensorView&, rows, cols, dtype) for each matrix and is run twice. allocate(bytes)
  // makes the Buffer.
  template <class ForEach>
  static Arena holding(const ForEach& for_each) {
    return holding(for_each, [](int64_t bytes) { return Buffer(bytes); });
  }
  template <class ForEach, class Allocate>
  static Arena holding(const ForEach& for_each, const Allocate& allocate) {
    Arena arena(allocate(bytes_of(for_each)));
    for_each([&](TensorView& view, int64_t rows, int64_t cols, DType dtype) {
      view = arena.matrix(rows, cols, dtype);
    });
    return arena;
  }

  // Bytes that holding() allocates.
  template <class ForEach>
  static int64_t bytes_of(const ForEach& for_each) {
    int64_t bytes = 0;
    for_each([&](TensorView&, int64_t rows, int64_t cols, DType dtype) {
      bytes += padded_bytes(rows * cols * bits_of(dtype) / 8);
    });
    return bytes;
  }

  TensorView matrix(int64_t rows, int64_t cols, DType dtype);
  std::span<std::byte> memory() const { return memory_; }

  static constexpr int64_t padded_bytes(int64_t bytes) { return round_up(bytes, 64); }

 private:
  Buffer buffer_;
  std::span<std::byte> memory_;
  int64_t used_ = 0;
};

}  // namespace tandem
