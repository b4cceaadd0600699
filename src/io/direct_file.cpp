#include "io/direct_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"

namespace tandem {

DirectFile::DirectFile(int fd, int flags)
    : fd_(open(fmt::format("/proc/self/fd/{}", fd).c_str(), flags | O_CLOEXEC | O_DIRECT)) {}

DirectFile::DirectFile(DirectFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

DirectFile::~DirectFile() {
  if (fd_ >= 0) close(fd_);
}

int64_t DirectFile::read(int64_t offset, int64_t bytes, std::byte* out) const {
  int64_t done = 0;
  while (fd_ >= 0 && done < bytes) {
    const ssize_t n = pread(fd_, out + done, bytes - done, offset + done);
    if (n <= 0) break;
    done += n;
    if (done % kDiskPage != 0) break;
  }
  return done;
}

int64_t DirectFile::write(int64_t offset, int64_t bytes, const std::byte* from) const {
  int64_t done = 0;
  while (fd_ >= 0 && done < bytes) {
    const ssize_t n = pwrite(fd_, from + done, bytes - done, offset + done);
    if (n <= 0) break;
    done += n;
    if (done % kDiskPage != 0) break;
  }
  return disk_page_down(done);
}

bool mostly_cached(const MappedFile& file, int64_t begin, int64_t bytes) {
  const int64_t page = disk_page_down(begin);
  const int64_t n_pages = (disk_page_up(begin + bytes) - page) / kDiskPage;
  std::vector<unsigned char> resident(n_pages);
  std::byte* const address = const_cast<std::byte*>(file.data()) + page;
  if (mincore(address, begin + bytes - page, resident.data()) != 0) return true;
  return 2 * std::count_if(resident.begin(), resident.end(), [](int r) { return r & 1; }) >=
         n_pages;
}

}  // namespace tandem
