// A file mapped for reading; it owns the bytes that a checkpoint's views refer to.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tandem {

// Both data(), by page faults, and read(), by a system call, read the disk. If the file is
// truncated while it is mapped, access to data() past the new end kills the process (SIGBUS),
// whereas read() throws Error. So headers and bulk loads use read(), and require_unchanged() is
// called before anything else is read from the mapping.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws Error
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  int64_t bytes() const { return bytes_; }         // size when the file was opened
  const std::byte* data() const { return data_; }  // [bytes()], read-only
  bool contains(const std::byte* p) const { return p >= data_ && p < data_ + bytes_; }

  // Fills `out` from `offset`. Throws Error on a read error or when the file is too short.
  void read(int64_t offset, std::span<std::byte> out) const;
  // Throws Error when the file's size is no longer bytes().
  void require_unchanged() const;

 private:
  std::string path_;
  int fd_ = -1;
  int64_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace tandem
