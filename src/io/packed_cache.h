// A packed cache file: the bytes of packed memory as they are, so that the next start is a plain
// parallel read. Verified, never trusted. Who owns the bytes says what they depend on (the key) and
// where things lie in them (the manifest).
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
  // nullopt when there is no such file. Throws PackedError when it cannot be opened.
  static std::optional<PackedFile> open(const std::string& path);

  // Throws PackedError when the file is no packed cache, damaged, or made for another key, and says
  // why.
  void read_header(std::string_view key);
  // After read_header().
  const std::string& manifest() const { return header_.manifest; }
  int64_t data_bytes() const { return header_.data_bytes; }
  // Fills `to`, data_bytes() at an address of whole disk pages, and checks every block. Throws
  // PackedError when one is damaged; `to` holds anything then.
  void read(std::byte* to, const LoadOptions& options) const;

  // Removes the file, if its name still means this file. Whether that is possible does not matter:
  // a file that is not sound is not used.
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
  std::span<const std::byte> data;  // at an address of whole disk pages
};

// Writes `path` so that it appears complete or not at all, whatever ends this process: under a
// temporary name, which is locked as long as its writer lives, then forced to the disk and renamed.
// Creates its folder. Leaves alone what is there under the same key. Throws Error when the place is
// read-only or full or another process is writing the same file; nothing is left behind then.
void write_packed_file(const std::string& path, const PackedContent& content,
                       const LoadOptions& options);

// Removes the temporaries of writers that were killed. Never throws.
void remove_stale_packed_files(const std::string& directory);

}  // namespace tandem
