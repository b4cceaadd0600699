#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace tandem {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe by mistake must not wait for its writer.
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(fd_ >= 0, "cannot open {}: {}", path, std::strerror(errno));
  try {
    struct stat status;
    require(fstat(fd_, &status) == 0, "cannot open {}: {}", path, std::strerror(errno));
    require(S_ISREG(status.st_mode), "cannot open {}: not a regular file", path);
    bytes_ = status.st_size;
    if (bytes_ == 0) return;
    void* data = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd_, 0);
    require(data != MAP_FAILED, "cannot map {} ({} bytes): {}", path, bytes_, std::strerror(errno));
    data_ = static_cast<std::byte*>(data);
  } catch (...) {
    close(fd_);
    throw;
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  std::swap(data_, other.data_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

void MappedFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = pread(fd_, out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    require(n >= 0, "cannot read {} at byte {}: {}", path_, offset, std::strerror(errno));
    require(n > 0, "{} ends at byte {}: it was cut short while in use; download it again", path_,
            offset);
    offset += n;
    out = out.subspan(n);
  }
}

void MappedFile::require_unchanged() const {
  struct stat status;
  require(fstat(fd_, &status) == 0, "cannot read {}: {}", path_, std::strerror(errno));
  require(status.st_size == bytes_,
          "{} had {} bytes when it was opened and has {} now: keep it as is while tandem runs",
          path_, bytes_, status.st_size);
}

}  // namespace tandem
