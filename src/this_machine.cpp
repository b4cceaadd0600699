#include "this_machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "core/check.h"
#include "io/machine_json.h"
#include "model_cache.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string this_machine_path() {
  const std::string folder = default_cache_directory();
  char host[256] = {};
  if (folder.empty() || gethostname(host, sizeof host - 1) != 0) return {};
  return (fs::path(folder) / fmt::format("machine-{}.json", host)).string();
}

bool save_this_machine(nlohmann::ordered_json& report) {
  report["measured_at"] = now();
  const std::string path = this_machine_path();
  if (path.empty()) return false;
  std::error_code ignored;
  fs::create_directories(fs::path(path).parent_path(), ignored);
  // Whole or not at all, also for a reader at the same time.
  const std::string temporary = fmt::format("{}.{}", path, getpid());
  {
    std::ofstream file(temporary);
    file << report.dump() << '\n';
    if (!file.flush()) {
      fs::remove(temporary, ignored);
      return false;
    }
  }
  fs::rename(temporary, path, ignored);
  return !ignored;
}

std::optional<Machine> saved_this_machine() {
  const std::string path = this_machine_path();
  std::error_code ignored;
  if (path.empty() || !fs::exists(path, ignored)) return {};
  try {
    return machine_from_file(path);
  } catch (const Error&) {
    return {};
  }
}

std::string age_in_words(int64_t seconds) {
  const auto ago = [](int64_t n, const char* unit) {
    return fmt::format("{} {}{} ago", n, unit, n == 1 ? "" : "s");
  };
  if (seconds < 60) return "just now";
  if (seconds < 3600) return ago(seconds / 60, "minute");
  if (seconds < 86400) return ago(seconds / 3600, "hour");
  return ago(seconds / 86400, "day");
}

}  // namespace tandem
