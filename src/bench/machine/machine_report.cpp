#include "bench/machine/machine_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/machine_info.h"
#include "io/machine_json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTypes[cpu::kNumArithmetics] = {"fp32", "bf16", "int8"};

struct Rates {
  std::vector<double> one, all;  // one per round
};

// All loops in turn, round after round, so that a slow moment affects all of them equally.
void measure_rounds(MachineSpeed& speed, double seconds, std::vector<Rates>& reads,
                    std::vector<Rates>& peaks) {
  constexpr int kMinRounds = 3;
  reads.resize(speed.read_loops().size());
  peaks.resize(speed.peak_loops().size());
  const double budget = seconds * static_cast<double>(reads.size() + peaks.size());
  const Stopwatch watch;
  for (int round = 0; round < kMinRounds || watch.seconds() < budget; ++round) {
    for (size_t i = 0; i < reads.size(); ++i) {
      const cpu::ReadLoop& loop = speed.read_loops()[i];
      reads[i].one.push_back(speed.read_bytes_per_second(loop, Threads::kOne));
      reads[i].all.push_back(speed.read_bytes_per_second(loop, Threads::kAll));
    }
    for (size_t i = 0; i < peaks.size(); ++i) {
      const cpu::PeakLoop& loop = speed.peak_loops()[i];
      peaks[i].one.push_back(speed.ops_per_second(loop, Threads::kOne));
      peaks[i].all.push_back(speed.ops_per_second(loop, Threads::kAll));
    }
  }
}

// Rates of single nodes, scaled to add up to the rate of all nodes together.
void add_numa_nodes(Json& report, const Topology& topology, MachineSpeed& speed, double seconds) {
  constexpr int64_t kNodeBytes = 1 << 30;
  const NumaSpeed numa = numa_speed(topology, speed.best_read_loop(), kNodeBytes, seconds);
  if (!numa.bound)
    report["notes"].push_back(
        "memory cannot be bound to NUMA nodes (not permitted, as in a container without SYS_NICE): "
        "rates of single nodes are of memory anywhere");
  double sum = 0;
  int64_t memory = 0;
  for (const NumaNode& node : numa.nodes) sum += node.read_bytes_per_second;
  const double scale = report["read_bytes_per_second"]["all"].get<double>() / sum;
  for (const NumaNode& node : numa.nodes) {
    const int64_t bytes = node.memory_bytes > 0
                              ? node.memory_bytes
                              : report["memory_bytes"].get<int64_t>() / topology.n_nodes();
    report["nodes"].push_back({{"cores", node.cores},
                               {"memory_bytes", bytes},
                               {"read_bytes_per_second", node.read_bytes_per_second * scale}});
    memory += bytes;
  }
  report["memory_bytes"] = memory;
  report["read_bytes_per_second"]["cross"] =
      std::min(numa.cross_bytes_per_second, report["read_bytes_per_second"]["all"].get<double>());
}

}  // namespace

Json machine_report(const Topology& topology, MachineSpeed& speed, double seconds) {
  std::vector<Rates> reads, peaks;
  measure_rounds(speed, seconds, reads, peaks);

  Json read_rates = {{"one_thread", 0.0}, {"all", 0.0}}, read_loops = Json::array();
  for (size_t i = 0; i < reads.size(); ++i) {
    const double one = median(reads[i].one), all = median(reads[i].all);
    read_loops.push_back({{"loop", speed.read_loops()[i].name}, {"one_thread", one}, {"all", all}});
    read_rates["one_thread"] = std::max(read_rates["one_thread"].get<double>(), one);
    read_rates["all"] = std::max(read_rates["all"].get<double>(), all);
  }
  Json best = {{"fp32", nullptr}, {"bf16", nullptr}, {"int8", nullptr}};
  Json instructions = Json::array();
  for (size_t i = 0; i < peaks.size(); ++i) {
    const cpu::PeakLoop& loop = speed.peak_loops()[i];
    const char* type = kTypes[static_cast<int>(loop.type)];
    const double all = median(peaks[i].all);
    instructions.push_back({{"type", type},
                            {"instruction", loop.instruction},
                            {"one_core", median(peaks[i].one)},
                            {"all_cores", all}});
    if (best[type].is_null() || best[type].get<double>() < all) best[type] = all;
  }

  const MachineInfo info = machine_info();
  Json report = {{"bench", "machine"},
                 {"cpu", info.cpu},
                 {"isa", cpu::name_of(cpu::best_isa())},
                 {"sockets", std::min(info.n_sockets, topology.n_nodes())},
                 {"numa_nodes", topology.n_nodes()},
                 {"cores", topology.n_cores()},
                 {"threads", speed.team().size()},
                 {"memory_bytes", info.memory_bytes},
                 {"last_level_cache_bytes", info.last_level_cache_bytes},
                 {"read_bytes_per_second", read_rates},
                 {"peak_ops_per_second", best},
                 {"read_loops", read_loops},
                 {"instructions", instructions},
                 {"gpus", Json::array()},
                 {"notes", topology.notes}};
  if (topology.n_nodes() > 1) add_numa_nodes(report, topology, speed, seconds);
  return report;
}

namespace {

Json unmeasured(const GpuInfo& gpu) {
  return {{"name", gpu.name},
          {"memory_bytes", gpu.memory_bytes},
          {"read_bytes_per_second", nullptr},
          {"h2d_bytes_per_second", nullptr},
          {"d2h_bytes_per_second", nullptr}};
}

}  // namespace

void add_disk_and_gpus(Json& report, const DiskSpeed& disk, const FoundGpus& found) {
  report["disk_read_bytes_per_second"] =
      disk.bytes_per_second > 0 ? Json(disk.bytes_per_second) : Json();
  report["disk"] = disk.what;
  for (const GpuInfo& gpu : found.gpus)
    report["gpus"].push_back(report["gpus"].empty() && found.rates ? gpu_to_json(*found.rates)
                                                                   : unmeasured(gpu));
  if (found.gpus.empty())
    report["notes"].push_back("no GPU: " + found.why_none);
  else if (!found.rates)
    report["notes"].push_back("GPUs are not measured (" + found.why_no_rates +
                              "): `tandem plan` leaves them out until a machine file gives rates");
}

namespace {

double giga(const Json& rate) { return rate.get<double>() * 1e-9; }

std::string gpu_text(const Json& gpu) {
  std::string text = fmt::format("\nGPU: {}, {:.1f} GB\n", gpu["name"].get<std::string>(),
                                 giga(gpu["memory_bytes"]));
  if (gpu["read_bytes_per_second"].is_null()) return text;
  const double datasheet = gpu.value("datasheet_bf16_ops_per_second", 0.0);
  return text + fmt::format(
                    "  reads {:.0f} GB/s; {:.1f} Tflop/s float, {:.1f} Tflop/s BF16 (mma{})\n"
                    "  link, GB/s: {:.1f} to the GPU, {:.1f} from it; pageable {:.1f}, {:.1f}\n",
                    giga(gpu["read_bytes_per_second"]),
                    giga(gpu["peak_ops_per_second"]["fp32"]) * 1e-3,
                    giga(gpu["peak_ops_per_second"]["bf16"]) * 1e-3,
                    datasheet > 0 ? fmt::format("; data sheet: {:.1f}", datasheet * 1e-12) : "",
                    giga(gpu["h2d_bytes_per_second"]), giga(gpu["d2h_bytes_per_second"]),
                    giga(gpu["h2d_pageable_bytes_per_second"]),
                    giga(gpu["d2h_pageable_bytes_per_second"]));
}

}  // namespace

std::string machine_text(const Json& r) {
  std::string text = fmt::format(
      "{}\n{} cores, {} threads, {} NUMA node(s), instruction set {}\n\n"
      "{:<52}{:>12}{:>12}\n",
      r["cpu"].get<std::string>(), r["cores"].get<int>(), r["threads"].get<int>(),
      r["numa_nodes"].get<int>(), r["isa"].get<std::string>(), "reading memory, GB/s", "1 thread",
      "all");
  for (const Json& loop : r["read_loops"])
    text += fmt::format("  {:<50}{:>12.1f}{:>12.1f}\n", loop["loop"].get<std::string>(),
                        giga(loop["one_thread"]), giga(loop["all"]));
  text += fmt::format("\n{:<52}{:>12}{:>12}\n", "peak, Gop/s (multiply-add = 2)", "1 core", "all");
  for (const Json& i : r["instructions"])
    text +=
        fmt::format("  {:<5}{:<45}{:>12.1f}{:>12.1f}\n", i["type"].get<std::string>(),
                    i["instruction"].get<std::string>(), giga(i["one_core"]), giga(i["all_cores"]));
  if (r.contains("disk")) {
    const Json& disk = r["disk_read_bytes_per_second"];
    text += fmt::format("\n{:<64}{:>12}\n  {}\n", "reading the disk, GB/s",
                        disk.is_null() ? "not measured" : fmt::format("{:.2f}", giga(disk)),
                        r["disk"].get<std::string>());
  }
  for (const Json& gpu : r["gpus"]) text += gpu_text(gpu);
  for (const Json& note : r["notes"]) text += fmt::format("\n{}\n", note.get<std::string>());
  return text;
}

}  // namespace tandem
