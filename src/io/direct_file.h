// Reads and writes that bypass the page cache (O_DIRECT), so that a model is in memory only once
// and disks reach full speed without read-ahead.
#pragma once
#include <cstddef>
#include <cstdint>

#include "io/mapped_file.h"

namespace tandem {

constexpr int64_t kDiskPage = 4096;  // also satisfies every disk's alignment for O_DIRECT
constexpr int64_t disk_page_down(int64_t n) { return n / kDiskPage * kDiskPage; }
constexpr int64_t disk_page_up(int64_t n) { return disk_page_down(n + kDiskPage - 1); }

// A second descriptor of an open file, opened with O_DIRECT. If the file system does not support
// it, read() and write() return 0, and the caller uses the page cache.
class DirectFile {
 public:
  DirectFile(int fd, int flags);  // O_RDONLY or O_RDWR
  DirectFile(DirectFile&& other) noexcept;
  ~DirectFile();

  // `offset`, `bytes` and the address are multiples of kDiskPage. Return the bytes read or written,
  // fewer than asked at the end of the file or after an error; a multiple of kDiskPage, except for
  // a read at the end of the file.
  int64_t read(int64_t offset, int64_t bytes, std::byte* out) const;
  int64_t write(int64_t offset, int64_t bytes, const std::byte* from) const;

 private:
  int fd_;
};

// Whether at least half of the pages of a range are in the page cache. True if the kernel does not
// say.
bool mostly_cached(const MappedFile& file, int64_t begin, int64_t bytes);

}  // namespace tandem
