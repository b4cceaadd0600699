#include "hub/checked_files.h"

#include <sys/stat.h>

#include <utility>

#include "core/check.h"
#include "io/atomic_file.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr int64_t kMaxRecordBytes = 64 << 20;

// Digest, size and time of the last change as one text; empty if there is no such file.
std::string state_of(const HubFile& file, const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return "";
  return fmt::format("{} {} {}.{:09}", file.digest.hex, status.st_size, status.st_mtim.tv_sec,
                     status.st_mtim.tv_nsec);
}

}  // namespace

CheckedFiles::CheckedFiles(std::string record_path) : record_path_(std::move(record_path)) {
  try {
    states_ = parse_json(read_text_file(record_path_, kMaxRecordBytes), record_path_)
                  .get<std::map<std::string, std::string>>();
  } catch (const std::exception&) {
    states_.clear();
  }
}

bool CheckedFiles::has(const HubFile& file, const std::string& path) const {
  const auto found = states_.find(file.path);
  return found != states_.end() && found->second == state_of(file, path);
}

void CheckedFiles::add(const HubFile& file, const std::string& path) {
  states_[file.path] = state_of(file, path);
}

void CheckedFiles::save() const {
  write_new_file(record_path_, nlohmann::json(states_).dump(1) + "\n");
}

}  // namespace tandem
