// A file mapped for reading: the owner of the bytes behind a checkpoint's views.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tandem {

// Touching data() reads the disk; read() does the same through a system call. When somebody cuts
// the file short while it is mapped, data() past its new end kills the process (SIGBUS), read()
// throws Error. So headers and bulk loads go through read(), and require_unchanged() is asked
// before anything else is taken from the mapping.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws Error
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  int64_t bytes() const { return bytes_; }         // when it was opened
  const std::byte* data() const { return data_; }  // [bytes()], read-only
  bool contains(const std::byte* p) const { return p >= data_ && p < data_ + bytes_; }

  // Fills `out` from `offset`. Throws Error on a read error or when the file ends before.
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
