// `tandem bench comm`: what ranks do together, beside MPI's own calls.
#include "bench/comm/comm.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/comm/gpu_calls.h"
#include "comm/agreement.h"
#include "comm/hosts.h"
#include "io/atomic_file.h"
#include "io/json.h"
#include "loader/rank_gpus.h"
#include "model/batch.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxBytes = 256 << 20;  // of a call
constexpr int kMostRequestRows = 8192;    // a prompt's chunk

bool measures_gpus(const BenchOptions& o) { return o.device == DeviceChoice::kCuda; }

// Called before a GPU is used, which each rank chooses first.
void check_comm(const BenchOptions& o) {
  const bool simulates =
      !o.simulated_hosts.empty() || o.simulated_delay.count() > 0 || o.simulated_rate > 0;
  for (const int64_t n : o.bytes)
    require(n >= 1 && n <= kMaxBytes, "--bytes {}: must be between 1 and {}", n, kMaxBytes);
  require(!o.as_network || !o.out.empty(), "--as-network: there is no --out to write to");
  require(o.ranks || (o.bytes.empty() && !o.as_network),
          "bench comm: {} is about several ranks: give --ranks 2, or start it with mpirun",
          o.as_network ? "--as-network" : "--bytes");
  require_list("--tokens", o.tokens, o.ranks ? kMaxStepTokens : kMostRequestRows);
  require(o.ranks || !simulates,
          "bench comm: --simulate-hosts, --simulate-delay and --simulate-rate are about several "
          "ranks: give --ranks 2, or start it with mpirun");
  require(o.out.empty() || !simulates,
          "--out {}: what is simulated is no measurement of a network: leave --simulate-hosts, "
          "--simulate-delay and --simulate-rate out",
          o.out);
  if (o.ranks && !o.simulated_hosts.empty())
    simulated_hosts_of_ranks(o.simulated_hosts, o.ranks->group.size());
  if (measures_gpus(o)) {
    require(o.ranks,
            "bench comm: --device cuda is about the GPUs of several ranks: give --ranks 2, or "
            "start it with mpirun");
    require(!simulates && !o.as_network,
            "--device cuda: NCCL's calls are measured as they are: leave --simulate-hosts, "
            "--simulate-delay, --simulate-rate and --as-network out");
    return;
  }
  if (!o.ranks || o.out.empty() || o.as_network) return;
  const std::vector<int> hosts = hosts_of_ranks(o.ranks->group);
  require(*std::max_element(hosts.begin(), hosts.end()) > 0,
          "--out {}: all ranks are on one host, whose memory is no network: start ranks on several "
          "hosts, or give --as-network to write it as one all the same",
          o.out);
}

void bench_network(const BenchInput& bench, const OnRow& on_row) {
  const BenchOptions& o = bench.options;
  Group& group = o.ranks->group;
  std::vector<int> hosts = hosts_of_ranks(group);
  const int n_hosts = 1 + *std::max_element(hosts.begin(), hosts.end());
  if (n_hosts == 1 && !o.as_network) return;
  // Rank 0 writes. What is wrong with its file is known before the measurement.
  std::string machine;
  run_on_all(group, [&] {
    if (o.out.empty() || group.rank() > 0) return;
    machine = machine_before(o.out);
    with_network(machine, o.out, {1, 1}, n_hosts);
    AtomicFile probe(o.out);
  });
  if (n_hosts == 1)
    for (int r = 0; r < group.size(); ++r) hosts[r] = r;
  const MeasuredLink measured =
      measure_network(group, calls_of_cpus(*o.ranks), hosts,
                      *std::max_element(o.bytes.begin(), o.bytes.end()), o.seconds);
  for (const auto& [bytes, seconds] : {std::pair(measured.small_bytes, measured.small),
                                       std::pair(measured.large_bytes, measured.large)}) {
    Json row = comm_row(*o.ranks, "between hosts", bytes, seconds);
    row["hosts"] = n_hosts;
    on_row(row);
  }
  run_on_all(group, [&] {
    if (!machine.empty())
      write_new_file(o.out, with_network(machine, o.out, measured.link, n_hosts));
  });
}

// One process alone: what a request to a worker costs.
void bench_alone(const BenchInput& bench, const OnRow& on_row) {
  const std::string& out = bench.options.out;
  std::string machine;
  if (!out.empty()) {
    machine = machine_before(out);
    with_request_seconds(machine, out, 1e-6);
    AtomicFile probe(out);
  }
  const double seconds = bench_requests(bench, on_row);
  if (!out.empty()) write_new_file(out, with_request_seconds(machine, out, seconds));
}

void bench_gpus(const BenchInput& bench, const OnRow& on_row) {
  const BenchOptions& o = bench.options;
  Group& group = o.ranks->group;
  choose_gpus_of_ranks(o.ranks->ranks, DeviceChoice::kCuda);
  std::string machine;
  run_on_all(group, [&] {
    if (o.out.empty() || group.rank() > 0) return;
    machine = machine_before(o.out);
    with_gpu_link(machine, o.out, {1, 1});
    AtomicFile probe(o.out);
  });
  const std::unique_ptr<GpuCalls> gpus = connect_gpus(group);
  machine = bench_gpu_calls(bench, HostLayout(hosts_of_ranks(group)), *gpus, machine, on_row);
  group.barrier();  // the GPUs of others may still be in a call
  run_on_all(group, [&] {
    if (!machine.empty()) write_new_file(o.out, machine);
  });
}

void bench_comm(const BenchInput& input, const OnRow& on_row) {
  if (!input.options.ranks) return bench_alone(input, on_row);
  BenchInput bench = input;
  BenchOptions& o = bench.options;
  if (o.bytes.empty()) o.bytes = {1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20};
  o.ranks->group.set_patience({});
  if (measures_gpus(o)) return bench_gpus(bench, on_row);
  const HostLayout hosts(o.simulated_hosts.empty()
                             ? hosts_of_ranks(o.ranks->group)
                             : simulated_hosts_of_ranks(o.simulated_hosts, o.ranks->group.size()));
  const OnRow with_hosts = [&](Json row) {
    row["hosts"] = hosts.n_hosts();
    add_simulated(row, o);
    on_row(row);
  };
  bench_barrier(*o.ranks, o.seconds, with_hosts);
  for (const int64_t bytes : o.bytes) bench_collectives(*o.ranks, bytes, o.seconds, with_hosts);
  for (const int n : o.tokens) bench_exchanges(bench, hosts, n, with_hosts);
  bench_network(bench, on_row);
}

}  // namespace

void add_simulated(Json& row, const BenchOptions& o) {
  if (!o.simulated_hosts.empty()) row["simulated_hosts"] = o.simulated_hosts;
  if (o.simulated_delay.count() > 0) row["delay_seconds"] = o.simulated_delay.count();
  if (o.simulated_rate > 0) row["simulated_bytes_per_second"] = o.simulated_rate;
}

namespace {

// The first column is wider between hosts: "exchange all-to-all, each rank" is there only then.
int width_of_operation(int n_hosts) { return n_hosts > 1 ? 30 : 20; }

// The tokens and formats of an exchange of rows; empty for other operations.
std::string tokens_of(const Json& row) {
  return row.contains("tokens") ? std::to_string(row["tokens"].get<int>()) : "";
}
std::string formats_of(const Json& row) {
  if (!row.contains("tokens")) return "";
  return row["there"].get<std::string>() + ", " + row["back"].get<std::string>();
}

std::string header_of_gpus(const Json& row) {
  const int n_hosts = row["hosts"];
  return fmt::format(
      "the GPUs of {} ranks{} ({}), by NCCL: in a recorded graph, and enqueued one by one\n\n"
      "| operation            | tokens | there, back |       KB |"
      "        us |   GB/s | enqueued us | over it |\n"
      "|:---------------------|-------:|:------------|---------:|"
      "----------:|-------:|------------:|--------:|\n",
      row["ranks"].get<int>(), n_hosts > 1 ? fmt::format(" on {} hosts", n_hosts) : "",
      row["gpu"].get<std::string>());
}

std::string text_of_gpus(const Json& row) {
  const auto number = [&](const char* key) { return row[key].get<double>(); };
  return fmt::format(
      "| {:<20} | {:>6} | {:<11} | {:>8.1f} | {:>9.1f} | {:>6.2f} | {:>11.1f} | {:>7.2f} |\n",
      row["operation"].get<std::string>(), tokens_of(row), formats_of(row), number("bytes") / 1024,
      number("seconds") * 1e6, number("bytes_per_second") * 1e-9, number("enqueued_seconds") * 1e6,
      number("seconds_over_enqueued"));
}

std::string header(const Json& row) {
  if (row.contains("gpu")) return header_of_gpus(row);
  const int n_ranks = row["ranks"];
  const char* const raw = n_ranks > 1 ? "MPI" : "raw";
  const int n_hosts = row.value("hosts", 1), width = width_of_operation(n_hosts);
  const std::string on_hosts = n_hosts > 1 ? fmt::format(" on {} hosts", n_hosts) : "";
  return fmt::format(
      "{}, beside {}\n\n"
      "| {:<{}} | tokens | there, back |       KB |        us |   GB/s |    {} us | over {} |{}\n"
      "|:{:-<{}}|-------:|:------------|---------:|----------:|-------:|----------:|---------:|{}"
      "\n",
      n_ranks > 1 ? fmt::format("{} ranks{}", n_ranks, on_hosts)
                  : "a backbone and a worker on this host",
      n_ranks > 1 ? row["mpi"].get<std::string>() : "TCP or UCX alone", "operation", width, raw,
      raw, n_hosts > 1 ? " KB between hosts |" : "", "", width + 1,
      n_hosts > 1 ? "-----------------:|" : "");
}

std::string text(const Json& row) {
  if (row.contains("gpu")) return text_of_gpus(row);
  const auto rate = row["bytes_per_second"];
  const auto us = [&](const char* key) { return row[key].get<double>() * 1e6; };
  const int n_hosts = row.value("hosts", 1);
  std::string crossing;
  if (n_hosts > 1)
    crossing = row.contains("bytes_between_hosts")
                   ? fmt::format(" {:>16.1f} |", row["bytes_between_hosts"].get<double>() / 1024)
                   : fmt::format(" {:>16} |", "");
  return fmt::format(
      "| {:<{}} | {:>6} | {:<11} | {:>8.1f} | {:>9.1f} | {:>6} | {:>9.1f} | {:>8.2f} |{}\n",
      row["operation"].get<std::string>(), width_of_operation(n_hosts), tokens_of(row),
      formats_of(row), row["bytes"].get<double>() / 1024, us("seconds"),
      rate.is_null() ? "" : fmt::format("{:.2f}", rate.get<double>() * 1e-9), us("raw_seconds"),
      row["seconds_over_raw"].get<double>(), crossing);
}

}  // namespace

Json comm_row(const BenchRanks& ranks, const std::string& operation, int64_t bytes,
              const ComparedSeconds& seconds) {
  return comm_row(ranks.group.size(), ranks.raw.name(), operation, bytes, seconds);
}

Json comm_row(int n_ranks, const std::string& raw, const std::string& operation, int64_t bytes,
              const ComparedSeconds& seconds) {
  std::optional<double> rate;
  if (bytes > 0) rate = static_cast<double>(bytes) / seconds.own;
  return {{"bench", "comm"},
          {"operation", operation},
          {"ranks", n_ranks},
          {"mpi", raw},
          {"bytes", bytes},
          {"seconds", seconds.own},
          {"bytes_per_second", or_null(rate)},
          {"raw_seconds", seconds.raw},
          {"seconds_over_raw", seconds.own_over_raw}};
}

Benchmark comm_benchmark() {
  using enum BenchFlag;
  return {.name = "comm",
          .help =
              "what ranks do together, beside MPI's own calls with the same bytes, or their GPUs "
              "by NCCL; without ranks, requests to a worker beside TCP",
          .examples =
              "  tandem bench comm\n"
              "  tandem bench comm --ranks 2\n"
              "  tandem bench comm --ranks 2 --device cuda\n"
              "  mpirun -np 2 --host a,b --map-by node --bind-to none tandem bench comm "
              "--out two_boxes.json\n",
          .flags = {kConfig, kDevice, kIsa, kBytes, kTokens, kNetwork},
          .tokens_help = "tokens of each rank in an exchange of experts' rows, a list",
          .tokens = {1, 16, 128},
          .check = check_comm,
          .on_ranks = bench_comm,
          .header = header,
          .text = text};
}

}  // namespace tandem
