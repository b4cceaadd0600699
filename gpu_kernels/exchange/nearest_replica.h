// Which replica of an expert computes a token: the same decision on every rank, on CPUs and GPUs.
#pragma once
#include <cstdint>

namespace tandem {

// Hosts of ranks, of which the first is number `first` of all: `n_of_host` consecutive ones on
// each, or dealt to `n_in_turns` hosts in turns.
struct RankHosts {
  int first = 0;
  int n_of_host = 1 << 30;
  int n_in_turns = 0;  // 0: consecutive
  constexpr int of(int rank) const {
    return n_in_turns > 0 ? (first + rank) % n_in_turns : (first + rank) / n_of_host;
  }
};

// A number that depends on the experts of a token alone, ids: [n], and not on the other tokens of a
// step: the same token uses the same replicas whatever is computed beside it.
constexpr uint32_t hash_of_choice(const int32_t* ids, int n) {
  uint32_t h = 0x9e3779b9u;
  for (int i = 0; i < n; ++i) {
    h = (h ^ static_cast<uint32_t>(ids[i])) * 0x85ebca6bu;
    h ^= h >> 15;
  }
  return h;
}

// The rank that computes the expert, one of the n > 0 that have it: `source`, else one on the host
// of `source`, else any. The token's hash decides among several. source: the rank that has the
// token's row; -1: all ranks have it. Ranks agree where the ids are the same on all of them.
constexpr int nearest_replica(const int32_t* ranks, int n, int source, RankHosts hosts,
                              uint32_t hash, int32_t expert) {
  if (n < 2) return ranks[0];
  int n_near = 0;
  for (int i = 0; i < n && source >= 0; ++i) {
    if (ranks[i] == source) return source;
    n_near += hosts.of(ranks[i]) == hosts.of(source);
  }
  uint32_t h = (hash ^ static_cast<uint32_t>(expert)) * 0xc2b2ae35u;
  h ^= h >> 16;
  int left = static_cast<int>(h % static_cast<uint32_t>(n_near > 0 ? n_near : n));
  for (int i = 0; i < n; ++i) {
    if (n_near > 0 && hosts.of(ranks[i]) != hosts.of(source)) continue;
    if (left-- == 0) return ranks[i];
  }
  return ranks[0];
}

}  // namespace tandem
