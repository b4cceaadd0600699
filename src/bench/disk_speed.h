// How fast the disk under a model is read, past the page cache, as loading does.
#pragma once
#include <cstdint>
#include <string>

namespace tandem {

struct DiskSpeed {
  double bytes_per_second = 0;  // 0: not measured
  std::string what;             // what was read, or why nothing was
};

// Reads a file, or the *.safetensors of a folder, for about `seconds`. Throws Error when there are
// none. Ask before there are teams: threads start where the caller may run.
DiskSpeed speed_of_files(const std::string& path, int n_threads, double seconds);

// The same of a file of so many bytes that is written into the folder first and removed after.
DiskSpeed speed_of_folder(const std::string& folder, int64_t bytes, int n_threads, double seconds);

}  // namespace tandem
