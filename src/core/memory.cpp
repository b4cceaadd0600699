#include "core/memory.h"

#include <sys/mman.h>

#include <utility>

namespace tandem {
namespace {

constexpr int64_t kHugePage = 2 << 20, kPage = 4096;

// The kernel clears a whole huge page at its first use, so the end of a buffer that does not fill
// one, and all of a small buffer, is in small pages.
int64_t mapped_bytes(int64_t bytes) { return round_up(bytes, kPage); }

}  // namespace

// mmap promises only 4 KiB alignment: map one huge page more and give the ends back.
std::byte* map_in_huge_pages(int64_t bytes) {
  void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = round_up(begin, kHugePage);
  munmap(raw, aligned - begin);  // fails without effect if there is nothing before
  munmap(reinterpret_cast<void*>(aligned + bytes), begin + kHugePage - aligned);
  madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);
  return reinterpret_cast<std::byte*>(aligned);
}

Buffer::Buffer(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = map_in_huge_pages(mapped_bytes(bytes));
  require(data_ != nullptr,
          "no memory: {:.2f} GB could not be reserved; use a smaller model, --ctx or format",
          bytes * 1e-9);
}

Buffer::Buffer(std::span<std::byte> memory, std::shared_ptr<const void> owner)
    : data_(memory.data()), bytes_(std::ssize(memory)), owner_(std::move(owner)) {}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(owner_, other.owner_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ && !owner_) munmap(data_, mapped_bytes(bytes_));
}

TensorView Arena::matrix(int64_t rows, int64_t cols, DType dtype) {
  const int64_t bytes = padded_bytes(rows * cols * bits_of(dtype) / 8);
  check(used_ + bytes <= std::ssize(memory_), "an arena has room for its matrices");
  TensorView view{memory_.data() + used_, rows, cols, cols, dtype};
  used_ += bytes;
  return view;
}

}  // namespace tandem
