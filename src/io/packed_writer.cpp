// Writes a packed cache file atomically.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/check.h"
#include "core/memory.h"
#include "io/packed_cache.h"
#include "io/packed_pieces.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporary = ".tmp";

// The locked temporary file of a cache. Its name is the same for all writers of one cache, so that
// two do not fill the disk with the same data; the kernel drops the lock when the process ends.
class Temporary {
 public:
  explicit Temporary(const std::string& path) : path_(path) {
    do {
      if (fd_ >= 0) close(fd_);
      fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
      require(fd_ >= 0, "{} cannot be written: {}", path, std::strerror(errno));
      if (flock(fd_, LOCK_EX | LOCK_NB) == 0) continue;
      const int error = errno;
      close(fd_);
      require(error != EWOULDBLOCK, "{}: another process is writing it", path);
      fail("{} cannot be locked: {}", path, std::strerror(error));
    } while (!still_names(path_, fd_));
  }
  Temporary(const Temporary&) = delete;
  ~Temporary() {
    if (still_names(path_, fd_)) unlink(path_.c_str());
    close(fd_);
  }

  int fd() const { return fd_; }

  // Empties the file and allocates its blocks, so that a full disk is noticed before anything is
  // written.
  void reserve(int64_t bytes) {
    succeed(ftruncate(fd_, 0) == 0, bytes);
    const bool known = fallocate(fd_, 0, 0, bytes) == 0 || errno == EOPNOTSUPP || errno == ENOSYS;
    succeed(known, bytes);
  }
  void write(int64_t offset, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = pwrite(fd_, bytes.data(), bytes.size(), offset);
      if (n < 0 && errno == EINTR) continue;
      succeed(n > 0, static_cast<int64_t>(bytes.size()));
      offset += n;
      bytes = bytes.subspan(n);
    }
  }
  void become(const std::string& path, int64_t bytes) {
    succeed(fsync(fd_) == 0 && rename(path_.c_str(), path.c_str()) == 0, bytes);
    const int folder = open(fs::path(path).parent_path().c_str(), O_RDONLY | O_CLOEXEC);
    if (folder < 0) return;
    fsync(folder);
    close(folder);
  }

 private:
  void succeed(bool ok, int64_t bytes) const {
    require(ok, "{} ({:.3f} GB) cannot be written: {}", path_, gigabytes(bytes),
            std::strerror(errno));
  }

  std::string path_;
  int fd_ = -1;
};

bool holds(const std::string& path, const std::string& key) {
  try {
    auto file = PackedFile::open(path);
    if (file) file->read_header(key);
    return file.has_value();
  } catch (const Error&) {
    return false;
  }
}

std::vector<uint64_t> write_data(const Temporary& file, int64_t offset,
                                 std::span<const std::byte> data, const LoadOptions& options) {
  const DirectFile direct(file.fd(), O_RDWR);
  const auto total = static_cast<int64_t>(data.size());
  std::vector<uint64_t> checksums(n_packed_blocks(total));
  for_each_packed_piece(total, options, [&](int64_t begin, int64_t bytes) {
    const auto piece = data.subspan(begin, bytes);
    for (int64_t at = 0; at < bytes; at += kPackedBlockBytes)
      checksums[(begin + at) / kPackedBlockBytes] =
          checksum_of(piece.subspan(at, std::min(kPackedBlockBytes, bytes - at)));
    const int64_t n = direct.write(offset + begin, disk_page_down(bytes), piece.data());
    file.write(offset + begin + n, piece.subspan(n));
  });
  return checksums;
}

}  // namespace

void write_packed_file(const std::string& path, const PackedContent& content,
                       const LoadOptions& options) {
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  fs::create_directories(folder, error);
  require(fs::is_directory(folder, error), "{} cannot be created: name a folder that can be",
          folder.string());
  Temporary file(path + std::string(kTemporary));
  if (holds(path, content.key)) return;

  const auto data_bytes = static_cast<int64_t>(content.data.size());
  PackedHeader header{.key = content.key,
                      .manifest = content.manifest,
                      .data_bytes = data_bytes,
                      .checksums = std::vector<uint64_t>(n_packed_blocks(data_bytes))};
  const auto data_offset = static_cast<int64_t>(packed_header_text(header).size());
  file.reserve(data_offset + data_bytes);
  header.checksums = write_data(file, data_offset, content.data, options);
  const std::string text = packed_header_text(header);
  file.write(0, std::as_bytes(std::span(text)));
  file.become(path, data_offset + data_bytes);
}

void remove_stale_packed_files(const std::string& directory) {
  const std::string ending = std::string(kPackedExtension) + std::string(kTemporary);
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string path = entry->path().string();
    if (!path.ends_with(ending)) continue;
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && still_names(path, fd)) unlink(path.c_str());
    close(fd);
  }
}

}  // namespace tandem
