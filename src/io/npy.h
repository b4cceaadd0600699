// NumPy's .npy files (format 1.0): float32, row-major.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/atomic_file.h"

namespace tandem {

// Writes rows sequentially; close() completes the file. Throws Error when it cannot be written.
class NpyWriter {
 public:
  NpyWriter(const std::string& path, const std::vector<int64_t>& shape);

  void write(std::span<const float> values) { file_.write(std::as_bytes(values)); }
  void close() { file_.close(); }

 private:
  AtomicFile file_;
};

}  // namespace tandem
