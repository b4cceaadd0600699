// A packed cache file: an image of packed memory, so that the next start is a plain parallel read.
// Everything read is verified. The owner of the bytes defines what they depend on (the key) and
// their layout (the manifest).
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "io/direct_file.h"
#include "io/load_jobs.h"
#include "io/mapped_file.h"
#include "io/packed_header.h"

namespace tandem {

constexpr std::string_view kPackedExtension = ".tandempack";

class PackedFile {
 public:
  // Returns nullopt when there is no such file. Throws PackedError when it cannot be opened.
  static std::optional<PackedFile> open(const std::string& path);

  // Throws PackedError with the reason when the file is not a packed cache, is damaged, or was made
  // for another key.
  void read_header(std::string_view key);
  // Valid after read_header().
  const std::string& manifest() const { return header_.manifest; }
  int64_t data_bytes() const { return header_.data_bytes; }
  // Reads data_bytes() bytes to `to`, which is aligned to kDiskPage, and checks every block. Throws
  // PackedError when a block is damaged; the content of `to` is undefined then.
  void read(std::byte* to, const LoadOptions& options) const;

  // Removes the file if its path still refers to it. Failure to remove it is ignored, since a
  // damaged file is never used.
  void discard() const;

 private:
  explicit PackedFile(const std::string& path) : file_(path) {}
  int64_t data_offset() const { return file_.bytes() - header_.data_bytes; }
  void read_piece(int64_t begin, int64_t bytes, std::byte* to, const DirectFile& direct) const;

  MappedFile file_;
  PackedHeader header_{};
};

struct PackedContent {
  std::string key, manifest;
  std::span<const std::byte> data;  // aligned to kDiskPage
};

// Writes `path` atomically, even if this process is killed: to a temporary file, which is locked
// while its writer lives, then flushed to disk (fsync) and renamed. Creates the folder. An existing
// file with the same key is kept. Throws Error when the folder is read-only, the disk is full or
// another process is writing the same file; the temporary file is removed then.
void write_packed_file(const std::string& path, const PackedContent& content,
                       const LoadOptions& options);

// Removes the temporary files of writers that were killed. Never throws.
void remove_stale_packed_files(const std::string& directory);

}  // namespace tandem
