// Blocks of memory of one size that are used again, by any threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace tandem {

class BlockPool {
  struct Shared {
    const size_t n_bytes, most_kept;
    std::mutex mutex;
    std::vector<std::unique_ptr<std::byte[]>> free;
  };

 public:
  // Goes back to its pool, which it may outlive. An empty one has no bytes.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept = default;
    Block& operator=(Block&& other) noexcept {
      std::swap(bytes_, other.bytes_);
      std::swap(pool_, other.pool_);
      return *this;
    }
    ~Block() {
      if (!bytes_) return;
      const std::lock_guard lock(pool_->mutex);
      if (pool_->free.size() < pool_->most_kept) pool_->free.push_back(std::move(bytes_));
    }
    std::span<std::byte> span() const { return {bytes_.get(), bytes_ ? pool_->n_bytes : 0}; }

   private:
    friend BlockPool;
    Block(std::shared_ptr<Shared> pool, std::unique_ptr<std::byte[]> bytes)
        : pool_(std::move(pool)), bytes_(std::move(bytes)) {}
    std::shared_ptr<Shared> pool_;
    std::unique_ptr<std::byte[]> bytes_;
  };

  // Keeps at most so many blocks that are not in use.
  BlockPool(size_t n_bytes, size_t most_kept)
      : shared_(new Shared{.n_bytes = n_bytes, .most_kept = most_kept, .mutex = {}, .free = {}}) {}

  // A block with any contents.
  Block take() {
    {
      const std::lock_guard lock(shared_->mutex);
      if (!shared_->free.empty()) {
        std::unique_ptr<std::byte[]> bytes = std::move(shared_->free.back());
        shared_->free.pop_back();
        return {shared_, std::move(bytes)};
      }
    }
    return {shared_, std::make_unique_for_overwrite<std::byte[]>(shared_->n_bytes)};
  }

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace tandem
