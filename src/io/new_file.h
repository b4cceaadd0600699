// A file that appears whole or not at all: written under a temporary name beside its own.
#pragma once
#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

class NewFile {
 public:
  // Throws Error when nothing can be written there, so before there is anything to write.
  explicit NewFile(const std::string& path);
  ~NewFile();  // an unfinished one is removed
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  // Both throw Error when the disk is full.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void close();  // gives the file its name

 private:
  const std::string path_, partial_;
  std::FILE* file_;
};

void write_new_file(const std::string& path, std::string_view text);

}  // namespace tandem
