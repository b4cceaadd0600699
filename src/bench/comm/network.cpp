// `tandem bench comm --out`: the network between hosts, for machine files.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "bench/comm/comm.h"
#include "core/memory.h"
#include "io/json.h"
#include "io/machine_json.h"

namespace tandem {
namespace {

// all_to_all with `piece` bytes for each rank of another host and none for the others.
class Crossing {
 public:
  Crossing(const BenchRanks& ranks, const std::vector<int>& host_of_rank, int64_t piece)
      : ranks_(ranks) {
    for (const int host : host_of_rank)
      sizes_.push_back(host == host_of_rank[ranks.group.rank()] ? 0 : piece);
    const auto bytes = std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
    in_ = Buffer(bytes);
    out_ = Buffer(bytes);
  }
  ComparedSeconds seconds(double to_measure) {
    return compare(ranks_.group,
                   {[&] {
                      ranks_.group.all_to_all({in_.span(), sizes_}, {out_.span(), sizes_});
                    },
                    [&] {
                      ranks_.raw.all_to_all({in_.span(), sizes_}, {out_.span(), sizes_});
                    }},
                   to_measure);
  }

 private:
  const BenchRanks& ranks_;
  std::vector<int64_t> sizes_;
  Buffer in_, out_;
};

// Pairs of a rank of the host and one of another, of the host that has most.
int64_t most_pairs(const std::vector<int>& host_of_rank) {
  std::map<int, int64_t> n_of_host;
  for (const int host : host_of_rank) ++n_of_host[host];
  int64_t most = 0;
  for (const auto& [host, n] : n_of_host) most = std::max(most, n * (std::ssize(host_of_rank) - n));
  return most;
}

}  // namespace

MeasuredNetwork measure_network(const BenchRanks& ranks, const std::vector<int>& host_of_rank,
                                int64_t bytes, double seconds) {
  constexpr int64_t kSmall = 1024;
  const int64_t pairs = most_pairs(host_of_rank);
  check(pairs > 0, "ranks on several hosts");
  const int64_t piece = std::max(bytes / pairs, kSmall + 1);
  const ComparedSeconds small = Crossing(ranks, host_of_rank, kSmall).seconds(seconds);
  const ComparedSeconds large = Crossing(ranks, host_of_rank, piece).seconds(seconds);
  const double without_latency = std::max(large.own - small.own, large.own / 2);
  return {{static_cast<double>(piece * pairs) / without_latency, small.own},
          small,
          large,
          kSmall * pairs,
          piece * pairs};
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
