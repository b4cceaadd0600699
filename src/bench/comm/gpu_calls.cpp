// `tandem bench comm --device cuda`: the rows, and what a machine file gets.
#include "bench/comm/gpu_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "comm/agreement.h"
#include "io/json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json gpu_row(const GpuCalls& gpus, const HostLayout& hosts, const std::string& operation,
             int64_t bytes, const ComparedSeconds& seconds) {
  return {{"bench", "comm"},
          {"operation", operation},
          {"device", "cuda"},
          {"gpu", gpus.gpu()},
          {"ranks", hosts.n_ranks()},
          {"hosts", hosts.n_hosts()},
          {"bytes", bytes},
          {"seconds", seconds.own},
          {"bytes_per_second", static_cast<double>(bytes) / seconds.own},
          {"enqueued_seconds", seconds.raw},
          {"seconds_over_enqueued", seconds.own_over_raw}};
}

// A way of rows, named as those of CPU ranks.
struct GpuWay {
  std::string operation;
  ExchangeMode mode;
  bool by_hosts = false;
};

std::vector<GpuWay> gpu_ways_on(const HostLayout& hosts) {
  const bool by_hosts = hosts.has_equal_hosts();
  std::vector<GpuWay> ways;
  for (const ExchangeMode mode : kExchangeModes) {
    // GPUs of several hosts have no windows in each other's memory.
    if (mode == ExchangeMode::kLowLatency && hosts.n_hosts() > 1 && !by_hosts) continue;
    const std::string operation = std::string("exchange ") + name_of(mode);
    ways.push_back({operation, mode, by_hosts && mode != ExchangeMode::kGather});
    if (by_hosts && mode == ExchangeMode::kAllToAll)
      ways.push_back({operation + ", each rank", mode});
  }
  return ways;
}

}  // namespace

std::string bench_gpu_calls(const BenchInput& bench, const HostLayout& hosts, GpuCalls& gpus,
                            const std::string& machine, const OnRow& on_row) {
  const BenchOptions& o = bench.options;
  Group& group = o.ranks->group;
  const auto measured_row = [&](const std::string& operation, GpuCalls::Prepared prepared) {
    const ComparedSeconds seconds = compare(group, prepared.calls, o.seconds);
    Json row = gpu_row(gpus, hosts, operation, prepared.bytes, seconds);
    prepared.close();
    prepared = {};
    group.barrier();  // memory is freed before the next calls: that of a GPU waits for its work
    return row;
  };
  for (const int64_t bytes : o.bytes)
    for (const GpuCall call : kGpuCalls)
      on_row(measured_row(name_of(call), gpus.prepare(call, bytes)));
  for (const int n : o.tokens)
    for (const ExpertRows rows : {ExpertRows::kFp8, ExpertRows::kExact})
      for (const GpuWay& way : gpu_ways_on(hosts)) {
        std::optional<GpuCalls::Prepared> prepared;
        try {
          prepared =
              gpus.exchange(bench.config, {way.mode, rows, n, way.by_hosts ? &hosts : nullptr});
        } catch (const AgreedError& error) {  // a GPU has no memory, or reaches that of none
          if (error.while_running) throw;
          if (group.rank() == 0)
            o.warn(fmt::format("{} is not measured: {}", name_of(way.mode), error.what()));
          continue;
        }
        const RowFormats formats = prepared->formats;
        Json row = measured_row(way.operation, std::move(*prepared));
        row["config"] = o.config;
        row["tokens"] = n;
        row["there"] = name_of(formats.there);
        row["back"] = name_of(formats.back);
        on_row(row);
      }
  const AllToAllCalls calls = [&](const std::vector<int64_t>& sizes) {
    return gpus.all_to_all(sizes).calls;
  };
  const int64_t bytes = *std::max_element(o.bytes.begin(), o.bytes.end());
  const auto measured = [&](const char* operation, const MeasuredLink& m) {
    on_row(gpu_row(gpus, hosts, operation, m.small_bytes, m.small));
    on_row(gpu_row(gpus, hosts, operation, m.large_bytes, m.large));
    return m.link;
  };
  std::string after = machine;
  if (hosts.n_ranks() > hosts.n_hosts()) {
    const Link link =
        measured("within hosts",
                 measure_link_on_hosts(group, calls, hosts.host_of_rank(), bytes, o.seconds));
    if (!machine.empty()) after = with_gpu_link(after, o.out, link);
  }
  if (hosts.n_hosts() > 1) {
    const Link link = measured(
        "between hosts", measure_network(group, calls, hosts.host_of_rank(), bytes, o.seconds));
    if (!machine.empty()) after = with_network(after, o.out, link, hosts.n_hosts());
  }
  return after;
}

std::string with_gpu_link(const std::string& machine, const std::string& source, Link link) {
  return edited_machine(machine, source, [&](Json& fields) {
    require(!fields.contains("kinds"),
            "--out {}: it has hosts of several kinds: write gpu_link into the kind of these GPUs",
            source);
    fields["gpu_link"] = {{"bytes_per_second", link.bytes_per_second},
                          {"latency_seconds", link.latency_seconds}};
  });
}

}  // namespace tandem
