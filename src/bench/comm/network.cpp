// `tandem bench comm --out`: links between hosts and between the ranks of a host, for machine
// files.
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "bench/comm/comm.h"
#include "bench/machine/this_machine.h"
#include "core/memory.h"
#include "io/json.h"
#include "io/machine_json.h"

namespace tandem {
namespace {

// Whether two ranks send each other something.
using ArePartners = std::function<bool(int a, int b)>;

// sender_of_rank: [ranks]
MeasuredLink measure(Group& group, const AllToAllCalls& calls, const ArePartners& are_partners,
                     const std::vector<int>& sender_of_rank, int64_t bytes, double seconds) {
  constexpr int64_t kSmall = 1024;
  std::map<int, int64_t> n_pieces_of;  // of a sender in a call
  int64_t n_pieces = 0;                // of the sender that has most
  for (int a = 0; a < group.size(); ++a)
    for (int b = 0; b < group.size(); ++b)
      if (are_partners(a, b)) n_pieces = std::max(n_pieces, ++n_pieces_of[sender_of_rank[a]]);
  check(n_pieces > 0, "ranks that send each other something");
  const auto of_pieces = [&](int64_t piece) {
    std::vector<int64_t> sizes;
    for (int r = 0; r < group.size(); ++r)
      sizes.push_back(are_partners(group.rank(), r) ? piece : 0);
    const ComparedSeconds measured = compare(group, calls(sizes), seconds);
    group.barrier();  // memory is freed before the next calls: that of a GPU waits for its work
    return measured;
  };
  const int64_t piece = std::max(bytes / n_pieces / 4 * 4, kSmall + 4);
  const ComparedSeconds small = of_pieces(kSmall), large = of_pieces(piece);
  const double without_latency = std::max(large.own - small.own, large.own / 2);
  return {{static_cast<double>(piece * n_pieces) / without_latency, small.own},
          small,
          large,
          kSmall * n_pieces,
          piece * n_pieces};
}

}  // namespace

AllToAllCalls calls_of_cpus(const BenchRanks& ranks) {
  return [&ranks](const std::vector<int64_t>& sizes) -> ComparedCalls {
    struct Memory {
      std::vector<int64_t> sizes;
      Buffer in, out;
    };
    const auto bytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const auto m = std::make_shared<Memory>(Memory{sizes, Buffer(bytes), Buffer(bytes)});
    return {[&ranks, m] {
              ranks.group.all_to_all({m->in.span(), m->sizes}, {m->out.span(), m->sizes});
            },
            [&ranks, m] {
              ranks.raw.all_to_all({m->in.span(), m->sizes}, {m->out.span(), m->sizes});
            }};
  };
}

MeasuredLink measure_network(Group& group, const AllToAllCalls& calls,
                             const std::vector<int>& host_of_rank, int64_t bytes, double seconds) {
  const auto are_partners = [&](int a, int b) { return host_of_rank[a] != host_of_rank[b]; };
  return measure(group, calls, are_partners, host_of_rank, bytes, seconds);
}

MeasuredLink measure_link_on_hosts(Group& group, const AllToAllCalls& calls,
                                   const std::vector<int>& host_of_rank, int64_t bytes,
                                   double seconds) {
  const auto are_partners = [&](int a, int b) {
    return a != b && host_of_rank[a] == host_of_rank[b];
  };
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return measure(group, calls, are_partners, ranks, bytes, seconds);
}

std::string machine_before(const std::string& out) {
  constexpr int64_t kMost = 1 << 20;
  const std::string own = this_machine_path();
  if (std::filesystem::exists(out)) return read_text_file(out, kMost);
  require(!own.empty() && std::filesystem::exists(own),
          "--out {}: neither it nor a measurement of this machine exists: run `tandem bench "
          "machine` first",
          out);
  return read_text_file(own, kMost);
}

std::string edited_machine(const std::string& machine, const std::string& source,
                           const std::function<void(nlohmann::ordered_json& fields)>& edit) {
  machine_from_json(machine, source);
  nlohmann::ordered_json tree = parse_ordered_json(machine, source);
  edit(tree);
  std::string text = tree.dump(1) + "\n";
  machine_from_json(text, source);
  return text;
}

std::string with_network(const std::string& machine, const std::string& source, Link network,
                         int n_hosts) {
  return edited_machine(machine, source, [&](nlohmann::ordered_json& fields) {
    if (n_hosts > 1 && fields.value("hosts", 1) == 1 && !fields.contains("kinds"))
      fields["hosts"] = n_hosts;
    fields["network"] = {{"bytes_per_second", network.bytes_per_second},
                         {"latency_seconds", network.latency_seconds}};
  });
}

}  // namespace tandem
