#include "npy.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/check.h"

namespace tandem {
namespace {

// Magic, version, length of the header, the header padded with spaces to a multiple of 64 bytes.
std::string npy_header(const std::vector<int64_t>& shape) {
  std::string dict = fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({},), }}",
                                 fmt::join(shape, ", "));
  while ((10 + dict.size() + 1) % 64 != 0) dict += ' ';
  dict += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(dict.size() & 0xff);
  header += static_cast<char>(dict.size() >> 8);
  return header + dict;
}

}  // namespace

NpyWriter::NpyWriter(const std::string& path, const std::vector<int64_t>& shape)
    : path_(path),
      partial_(fmt::format("{}.{}.partial", path, getpid())),
      file_(std::fopen(partial_.c_str(), "wb")) {
  require(file_ != nullptr, "{} cannot be written ({}): choose another --out", path_,
          std::strerror(errno));
  const std::string header = npy_header(shape);
  std::fwrite(header.data(), 1, header.size(), file_);
}

NpyWriter::~NpyWriter() {
  if (!file_) return;
  std::fclose(file_);
  std::remove(partial_.c_str());
}

void NpyWriter::write(std::span<const float> values) {
  const bool ok = std::fwrite(values.data(), sizeof(float), values.size(), file_) == values.size();
  require(ok, "{} cannot be written ({}): is the disk full?", path_, std::strerror(errno));
}

void NpyWriter::close() {
  const bool flushed = std::fflush(file_) == 0;
  const bool closed = std::fclose(std::exchange(file_, nullptr)) == 0;
  std::error_code error;
  if (flushed && closed) std::filesystem::rename(partial_, path_, error);
  if (!flushed || !closed || error) std::remove(partial_.c_str());
  require(flushed && closed && !error,
          "{} cannot be written: is the disk full, or is it a directory?", path_);
}

}  // namespace tandem
