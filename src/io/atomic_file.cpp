#include "io/atomic_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/check.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Refuses a path that is not a plain file: the rename would replace a device and fail for a folder.
const std::string& replaceable(const std::string& path) {
  std::error_code ignored;
  require(!fs::exists(path, ignored) || fs::is_regular_file(path, ignored),
          "{} cannot be written (it is no plain file): choose another name", path);
  return path;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path)
    : path_(replaceable(path)),
      partial_(fmt::format("{}.{}.partial", path, getpid())),
      file_(std::fopen(partial_.c_str(), "wb")) {
  require(file_ != nullptr, "{} cannot be written ({}): choose another place", path_,
          std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (!file_) return;
  std::fclose(file_);
  std::remove(partial_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  const bool ok = std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size();
  require(ok, "{} cannot be written ({}): is the disk full?", path_, std::strerror(errno));
}

void AtomicFile::close() {
  const bool flushed = std::fflush(file_) == 0;
  const bool closed = std::fclose(std::exchange(file_, nullptr)) == 0;
  std::error_code error;
  if (flushed && closed) fs::rename(partial_, path_, error);
  if (!flushed || !closed || error) std::remove(partial_.c_str());
  require(flushed && closed && !error, "{} cannot be written: is the disk full?", path_);
}

void write_new_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.close();
}

}  // namespace tandem
