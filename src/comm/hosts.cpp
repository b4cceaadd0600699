#include "comm/hosts.h"

#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
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

// The cores that this process may use, as a set of 1024; none where the system does not say.
std::array<uint64_t, 16> cores_of_process() {
  static_assert(sizeof(cpu_set_t) == sizeof(uint64_t) * 16);
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  std::array<uint64_t, 16> words;
  std::memcpy(words.data(), &set, sizeof(set));
  return words;
}

// [ranks] equal numbers for equal values, from 0 in the order of ranks; all ranks call it.
template <class T>
std::vector<int> numbered(Group& group, const T& mine) {
  std::vector<T> all(group.size());
  group.all_gather_values(mine, std::span(all));
  std::vector<int> numbers;
  int n = 0;
  for (int r = 0; r < group.size(); ++r) {
    const auto first = std::find(all.begin(), all.begin() + r, all[r]) - all.begin();
    numbers.push_back(first < r ? numbers[first] : n++);
  }
  return numbers;
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

std::vector<int> hosts_of_ranks(Group& group) { return numbered(group, name_of_host()); }

PlaceOnHost place_on_host(Group& group) {
  const std::vector<int> hosts = hosts_of_ranks(group);
  return place_on_host(hosts, numbered(group, cores_of_process()), group.rank());
}

PlaceOnHost place_on_host(const std::vector<int>& host_of_rank,
                          const std::vector<int>& cores_of_rank, int rank) {
  PlaceOnHost place = {0, 0, 0, 0};
  for (int r = 0; r < std::ssize(host_of_rank); ++r) {
    if (host_of_rank[r] != host_of_rank[rank]) continue;
    const bool before = r < rank, same_cores = cores_of_rank[r] == cores_of_rank[rank];
    ++place.n_of_host;
    place.of_host += before;
    place.n_of_cores += same_cores;
    place.of_cores += before && same_cores;
  }
  return place;
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
