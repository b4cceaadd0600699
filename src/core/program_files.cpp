#include "core/program_files.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

namespace tandem {

namespace fs = std::filesystem;
namespace {

// The folders of the file that contains this code, which can be a shared library, and of the
// program.
std::vector<fs::path> homes() {
  std::error_code ignored;
  std::vector<fs::path> found;
  Dl_info here{};
  // A name without a folder is that of a program as it was called.
  if (dladdr(reinterpret_cast<const void*>(&program_file), &here) != 0 && here.dli_fname &&
      fs::path(here.dli_fname).has_parent_path())
    found.push_back(fs::canonical(here.dli_fname, ignored).parent_path());
  found.push_back(fs::read_symlink("/proc/self/exe", ignored).parent_path());
  std::erase_if(found, [](const fs::path& folder) { return folder.empty(); });
  return found;
}

}  // namespace

std::vector<std::string> program_file_places(const std::string& name) {
  std::vector<std::string> places;
  const auto add = [&](const fs::path& folder) {
    const std::string place = (folder / name).string();
    if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
  };
  for (const fs::path& home : homes()) {
    fs::path folder = home;
    for (int up = 0; up <= 3; ++up, folder = folder.parent_path()) add(folder);
    add(home.parent_path() / "share/tandem");
  }
  add(TANDEM_DATA_FOLDER);
  return places;
}

std::string program_file(const std::string& name) {
  std::error_code ignored;
  for (const std::string& place : program_file_places(name))
    if (fs::exists(place, ignored)) return place;
  return {};
}

std::string names_of_program_files(const std::string& name) {
  const std::string folder = program_file(name);
  if (folder.empty())
    return fmt::format("{}, which is missing (looked for {})", name,
                       fmt::join(program_file_places(name), ", "));
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace tandem
