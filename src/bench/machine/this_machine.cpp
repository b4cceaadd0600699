#include "bench/machine/this_machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

#include "bench/gpu/gpu_benches.h"
#include "bench/machine/machine_report.h"
#include "bench/measured_curves.h"
#include "core/check.h"
#include "core/clock.h"
#include "io/atomic_file.h"
#include "io/json.h"
#include "io/machine_json.h"
#include "loader/weights/model_cache.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

DiskSpeed disk_speed(const Measuring& how, int n_threads) {
  constexpr int64_t kFileBytes = 256 << 20;
  if (!how.disk.empty()) return speed_of_files(how.disk, n_threads, how.seconds);
  const std::string folder = default_cache_directory();
  if (folder.empty()) return {0, "neither XDG_CACHE_HOME nor HOME says where to write a file"};
  const int64_t bytes = how.memory_bytes > 0 ? std::min(kFileBytes, how.memory_bytes) : kFileBytes;
  return speed_of_folder(folder, bytes, n_threads, how.seconds);
}

FoundGpus gpus_with_rates(double seconds) {
  FoundGpus found = find_gpus();
  if (found.gpus.empty()) return found;
  try {
    found.rates = measured_gpu(seconds);
  } catch (const Error& error) {
    found.why_no_rates = error.what();
  }
  return found;
}

}  // namespace

nlohmann::ordered_json measure_this_machine(const Measuring& how) {
  const Topology topology = this_topology();
  const Topology part = with_threads(topology, how.n_threads);
  const DiskSpeed disk = disk_speed(how, part.n_cores());
  const FoundGpus gpus = gpus_with_rates(how.seconds);  // before the team pins this thread
  Team team(part);
  const int64_t enough = MachineSpeed::enough_bytes(team);
  MachineSpeed speed(team, how.memory_bytes > 0 ? std::min(enough, how.memory_bytes) : enough);
  nlohmann::ordered_json report = machine_report(topology, speed, how.seconds);
  add_disk_and_gpus(report, disk, gpus);
  return report;
}

std::string this_machine_path() {
  const std::string folder = default_cache_directory();
  char host[256] = {};
  if (folder.empty() || gethostname(host, sizeof host) != 0) return {};
  return (fs::path(folder) / fmt::format("machine-{}.json", host)).string();
}

bool save_this_machine(nlohmann::ordered_json& report) {
  const std::optional<Machine> before = saved_this_machine();
  if (!report.contains("efficiency") && before && !before->curves.empty() &&
      before->cpu == report["cpu"].get<std::string>() &&
      before->isa == report["isa"].get<std::string>())
    report["efficiency"] = curves_to_json(before->curves);
  report["measured_at"] = seconds_since_1970();
  const std::string path = this_machine_path();
  if (path.empty()) return false;
  std::error_code ignored;
  fs::create_directories(fs::path(path).parent_path(), ignored);
  try {
    write_new_file(path, report.dump() + "\n");
  } catch (const Error&) {
    return false;
  }
  return true;
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

namespace {

void bench_machine(const BenchInput& bench, const OnRow& on_row) {
  constexpr int64_t kMaxRowsBytes = 64 << 20;
  const BenchOptions& o = bench.options;
  std::vector<EfficiencyCurve> curves;
  if (!o.curves.empty())
    curves = measured_curves(read_text_file(o.curves, kMaxRowsBytes), o.curves,
                             cpu::name_of(cpu::best_isa()));
  nlohmann::ordered_json report =
      measure_this_machine({.n_threads = o.n_threads,
                            .seconds = o.seconds,
                            .memory_bytes = static_cast<int64_t>(o.memory_gb * 1e9),
                            .disk = o.disk});
  if (!curves.empty()) report["efficiency"] = curves_to_json(curves);
  if (!save_this_machine(report)) o.warn("cannot keep the measurement in " + this_machine_path());
  on_row(report);
}

}  // namespace

Benchmark machine_benchmark() {
  using enum BenchFlag;
  return {
      .name = "machine",
      .help = "read bandwidth of memory and disk, peak of every arithmetic instruction",
      .examples =
          "  tandem bench machine --json | jq .read_bytes_per_second\n"
          "  tandem bench experts --json > rows.json; tandem bench machine --curves rows.json\n",
      .flags = {kDisk, kCurves},
      .alone = bench_machine,
      .header = nullptr,
      .text = machine_text};
}

}  // namespace tandem
