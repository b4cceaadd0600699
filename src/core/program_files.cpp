#include "core/program_files.h"

#include <filesystem>

namespace tandem {

std::string program_file(const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  for (int up = 0; up <= 3 && !folder.empty(); ++up, folder = folder.parent_path())
    if (fs::exists(folder / name, ignored)) return (folder / name).string();
  return {};
}

}  // namespace tandem
