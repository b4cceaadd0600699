// NumPy's .npy files (format 1.0): float32, row-major.
#pragma once
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

namespace tandem {

// Writes rows one after another under a temporary name; close() gives the file its own name, so
// that no half file is left behind. Throws Error when it cannot be written.
class NpyWriter {
 public:
  NpyWriter(const std::string& path, const std::vector<int64_t>& shape);
  ~NpyWriter();
  NpyWriter(const NpyWriter&) = delete;
  NpyWriter& operator=(const NpyWriter&) = delete;

  void write(std::span<const float> values);
  void close();

 private:
  const std::string path_, partial_;
  std::FILE* file_;
};

}  // namespace tandem
