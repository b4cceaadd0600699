#include "comm/mapped_window.h"

#include <atomic>

#include "core/rounding.h"

namespace tandem {
namespace {

constexpr int64_t kLine = 64;

}  // namespace

int64_t MappedWindow::memory_bytes(int64_t bytes, int n_ranks) {
  return round_up(bytes, kLine) + n_ranks * kLine;
}

MappedWindow::MappedWindow(Group& group, int64_t bytes, std::vector<std::byte*> memory,
                           std::shared_ptr<const void> owner)
    : group_(group), bytes_(bytes), memory_(std::move(memory)), owner_(std::move(owner)) {}

Bytes MappedWindow::of(int rank) const { return {memory_[rank], static_cast<size_t>(bytes_)}; }

void MappedWindow::signal(int rank, uint64_t number) {
  std::atomic_ref(number_at(rank, group_.rank())).store(number, std::memory_order_release);
}

void MappedWindow::wait(int rank, uint64_t number) {
  const std::atomic_ref told(number_at(group_.rank(), rank));
  group_.wait_for_rank(rank, [&] { return told.load(std::memory_order_acquire) >= number; });
}

uint64_t& MappedWindow::number_at(int owner, int from) const {
  return *reinterpret_cast<uint64_t*>(memory_[owner] + round_up(bytes_, kLine) + from * kLine);
}

}  // namespace tandem
