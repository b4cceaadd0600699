// `tandem bench comm --device cuda`: the rows, and what a machine file gets.
#include "bench/comm/gpu_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>

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

}  // namespace

std::string bench_gpu_calls(const BenchInput& bench, const HostLayout& hosts, GpuCalls& gpus,
                            const std::string& machine, const OnRow& on_row) {
  const BenchOptions& o = bench.options;
  Group& group = o.ranks->group;
  for (const int64_t bytes : o.bytes)
    for (const GpuCall call : kGpuCalls) {
      GpuCalls::Prepared prepared = gpus.prepare(call, bytes);
      const ComparedSeconds seconds = compare(group, prepared.calls, o.seconds);
      on_row(gpu_row(gpus, hosts, name_of(call), prepared.bytes, seconds));
      prepared.calls = {};
      group.barrier();  // its memory is freed before the next calls
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
