// Read speed of the disk that holds a model, bypassing the page cache as loading does.
#pragma once
#include <cstdint>
#include <string>

namespace tandem {

struct DiskSpeed {
  double bytes_per_second = 0;  // 0: not measured
  std::string what;             // what was read, or why nothing was
};

// Reads a file, or the *.safetensors of a folder, for about `seconds`. Throws Error when there are
// none. Call before creating teams: new threads inherit the caller's CPU affinity.
DiskSpeed speed_of_files(const std::string& path, int n_threads, double seconds);

// Reads a temporary file of `bytes` bytes in the folder likewise.
DiskSpeed speed_of_folder(const std::string& folder, int64_t bytes, int n_threads, double seconds);

}  // namespace tandem
