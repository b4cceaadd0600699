// Directories and files that are removed with their objects.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "core/check.h"

namespace tandem {

class TempDirectory {
 public:
  explicit TempDirectory(
      const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string pattern = (parent / "tandem-test-XXXXXX").string();
    check(mkdtemp(pattern.data()) != nullptr, "mkdtemp");
    path_ = pattern;
  }
  TempDirectory(const TempDirectory&) = delete;
  ~TempDirectory() { std::filesystem::remove_all(path_); }

  std::string path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  void write(const std::string& name, std::string_view text) const {
    std::ofstream(file(name), std::ios::binary) << text;
  }

 private:
  std::string path_;
};

// A file with the given text.
class TempFile {
 public:
  explicit TempFile(std::string_view text) { dir_.write("file.json", text); }
  std::string path() const { return dir_.file("file.json"); }

 private:
  TempDirectory dir_;
};

// The cache directory of this process.
class CacheDirectory {
 public:
  CacheDirectory() { setenv("XDG_CACHE_HOME", dir_.path().c_str(), 1); }
  ~CacheDirectory() { unsetenv("XDG_CACHE_HOME"); }
  const TempDirectory& dir() const { return dir_; }

 private:
  TempDirectory dir_;
};

}  // namespace tandem
