#include "comm/hosts.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <string>

#include "core/check.h"

namespace tandem {
namespace {

// The number that the kernel drew when it started; where it does not say, the host's name.
std::array<char, 256> name_of_host() {
  std::array<char, 256> name{};
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string line;
  if (std::getline(file, line) && !line.empty())
    line.copy(name.data(), name.size() - 1);
  else
    gethostname(name.data(), name.size() - 1);
  return name;
}

template <class T>
void broadcast(Group& group, T& value, int root) {
  group.broadcast(std::as_writable_bytes(std::span(&value, 1)), root);
}

ClockDifference difference_of(Group& group, int rank, const std::function<double()>& now) {
  constexpr int kRounds = 32;
  ClockDifference best = {0, std::numeric_limits<double>::infinity()};
  for (int round = 0; round < kRounds; ++round) {
    double there = 0;
    const double before = now();
    broadcast(group, there, 0);
    if (group.rank() == rank) there = now();
    broadcast(group, there, rank);
    const double after = now();
    if ((after - before) / 2 < best.within)
      best = {(before + after) / 2 - there, (after - before) / 2};
  }
  broadcast(group, best, 0);
  return best;
}

}  // namespace

std::vector<int> hosts_of_ranks(Group& group) {
  std::vector<std::array<char, 256>> names(group.size());
  group.all_gather_values(name_of_host(), std::span(names));
  std::vector<int> hosts;
  int n_hosts = 0;
  for (int r = 0; r < group.size(); ++r) {
    const auto first = std::find(names.begin(), names.begin() + r, names[r]) - names.begin();
    hosts.push_back(first < r ? hosts[first] : n_hosts++);
  }
  return hosts;
}

std::vector<int> simulated_hosts_of_ranks(const std::vector<int>& n_of_host, int n_ranks) {
  std::vector<int> hosts;
  for (const int n : n_of_host) {
    require(n >= 1 && n <= n_ranks - std::ssize(hosts),
            "--simulate-hosts {}: there are {} ranks, of which every host has one or more",
            fmt::join(n_of_host, ","), n_ranks);
    hosts.insert(hosts.end(), n, hosts.empty() ? 0 : hosts.back() + 1);
  }
  require(std::ssize(hosts) == n_ranks, "--simulate-hosts {}: there are {} ranks, and {} on hosts",
          fmt::join(n_of_host, ","), n_ranks, hosts.size());
  return hosts;
}

std::vector<ClockDifference> clock_differences(Group& group, const std::vector<int>& host_of_rank,
                                               const std::function<double()>& now) {
  std::vector<ClockDifference> of_host(1), of_rank;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (host_of_rank[rank] == static_cast<int>(of_host.size()))
      of_host.push_back(difference_of(group, rank, now));
    of_rank.push_back(of_host[host_of_rank[rank]]);
  }
  return of_rank;
}

}  // namespace tandem
