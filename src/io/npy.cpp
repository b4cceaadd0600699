#include "io/npy.h"

#include <fmt/ranges.h>

namespace tandem {
namespace {

// Magic, version, header length, and the header padded with spaces to a multiple of 64 bytes.
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

NpyWriter::NpyWriter(const std::string& path, const std::vector<int64_t>& shape) : file_(path) {
  file_.write(npy_header(shape));
}

}  // namespace tandem
