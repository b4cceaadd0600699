// Reads and writes past the page cache, so that a model is in memory once and disks run at their
// speed without read-ahead.
#pragma once
#include <cstddef>
#include <cstdint>

#include "io/mapped_file.h"

namespace tandem {

constexpr int64_t kDiskPage = 4096;  // also satisfies every disk's alignment for O_DIRECT
constexpr int64_t disk_page_down(int64_t n) { return n / kDiskPage * kDiskPage; }
constexpr int64_t disk_page_up(int64_t n) { return disk_page_down(n + kDiskPage - 1); }

// A second descriptor of an open file that passes the page cache by. Where the file system cannot,
// it does nothing, and the caller goes through the page cache.
class DirectFile {
 public:
  DirectFile(int fd, int flags);  // O_RDONLY or O_RDWR
  DirectFile(DirectFile&& other) noexcept;
  ~DirectFile();

  // `offset`, `bytes` and `out` are whole pages. Return how many bytes were read or written, whole
  // pages except at the file's end; fewer than asked at that end and where it failed.
  int64_t read(int64_t offset, int64_t bytes, std::byte* out) const;
  int64_t write(int64_t offset, int64_t bytes, const std::byte* from) const;

 private:
  int fd_;
};

// Whether at least half of these pages are in the page cache. What the kernel will not tell counts
// as cached.
bool mostly_cached(const MappedFile& file, int64_t begin, int64_t bytes);

}  // namespace tandem
