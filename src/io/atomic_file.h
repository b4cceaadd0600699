// Writes a file atomically: under a temporary name in the same folder, renamed when complete.
#pragma once
#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

class AtomicFile {
 public:
  // Opens the temporary file. Throws Error when the path cannot be written, so that this is known
  // before the content is computed.
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();  // removes the temporary file unless close() was called
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Both throw Error when the disk is full.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void close();  // renames the temporary file to `path`

 private:
  const std::string path_, partial_;
  std::FILE* file_;
};

void write_new_file(const std::string& path, std::string_view text);

}  // namespace tandem
