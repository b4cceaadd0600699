// The parts of `tandem bench comm`: calls of a group and of exchanges beside MPI's own calls that
// move the same bytes, and what a network between hosts gives.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bench/benchmark.h"
#include "comm/host_groups.h"
#include "core/machine.h"

namespace tandem {

// A call, and MPI's that moves the same bytes. All ranks make both.
struct ComparedCalls {
  std::function<void()> own, raw;
  int n = 1;  // calls of one invocation
};
struct ComparedSeconds {
  double own, raw;      // of a call: medians, of the rank that takes longest
  double own_over_raw;  // the median over pairs of measurements beside each other
};
// Alternates between both until each has taken about `seconds`; the same on all ranks.
ComparedSeconds compare(Group& group, const ComparedCalls& calls, double seconds);

// What ranks send: small whole numbers, whose sums are exact in any order.
constexpr float exact_number(int rank, int64_t i) {
  return static_cast<float>((i * 7 + rank * 3) % 61);
}

// The fields of a row that all operations have: `bytes` of rank 0, 0: none; `raw`: the name of what
// the calls are compared with.
nlohmann::ordered_json comm_row(int n_ranks, const std::string& raw, const std::string& operation,
                                int64_t bytes, const ComparedSeconds& seconds);
nlohmann::ordered_json comm_row(const BenchRanks& ranks, const std::string& operation,
                                int64_t bytes, const ComparedSeconds& seconds);

// The fields of a row of a network that is simulated: what of it the options state.
void add_simulated(nlohmann::ordered_json& row, const BenchOptions& options);

// The collective calls, with `bytes` in all. Throws RunError when both give different results.
void bench_collectives(const BenchRanks& ranks, int64_t bytes, double seconds, const OnRow& on_row);
void bench_barrier(const BenchRanks& ranks, double seconds, const OnRow& on_row);

// dispatch() and combine() of every mode for so many tokens a rank, with the model's shapes and
// random routing. The low-latency mode is left out, with a warning, where ranks share no memory.
// Where rows cross once to each host, all-to-all is measured a second time, with rows that go once
// to each rank. hosts: [ranks]
void bench_exchanges(const BenchInput& bench, const HostLayout& hosts, int n_tokens,
                     const OnRow& on_row);

// Requests of so many rows to a worker of this host, for each number of `tokens`, open and
// encrypted. Returns the seconds of the shortest open one.
double bench_requests(const BenchInput& bench, const OnRow& on_row);
// A machine file with it. `source`: in messages. Throws Error for one that describes no machine.
std::string with_request_seconds(const std::string& machine, const std::string& source,
                                 double seconds);

// The calls of an all-to-all with `sizes` [ranks] bytes to and from each rank.
using AllToAllCalls = std::function<ComparedCalls(const std::vector<int64_t>& sizes)>;
AllToAllCalls calls_of_cpus(const BenchRanks& ranks);

// What a sender sends to all others, and they to it at the same time. The latency is that of a
// small message to each of them, the rate that of `bytes` of a sender without it. By the seconds of
// ComparedCalls::own.
struct MeasuredLink {
  Link link;
  ComparedSeconds small, large;
  int64_t small_bytes, large_bytes;  // of a sender
};
// Between hosts, each of which is a sender.
MeasuredLink measure_network(Group& group, const AllToAllCalls& calls,
                             const std::vector<int>& host_of_rank, int64_t bytes, double seconds);
// Between the ranks of hosts, each of which is a sender; some host has several.
MeasuredLink measure_link_on_hosts(Group& group, const AllToAllCalls& calls,
                                   const std::vector<int>& host_of_rank, int64_t bytes,
                                   double seconds);

// The text of a machine file --out before the measurement: the file, or else this machine's own.
std::string machine_before(const std::string& out);
// A machine file after `edit`. `source`: in messages. Throws Error for a file that describes no
// machine, before or then.
std::string edited_machine(const std::string& machine, const std::string& source,
                           const std::function<void(nlohmann::ordered_json& fields)>& edit);
// A machine file with this network; with n_hosts unless it says itself how many there are.
// `source`: in messages. Throws Error for a file that describes no machine.
std::string with_network(const std::string& machine, const std::string& source, Link network,
                         int n_hosts);

}  // namespace tandem
