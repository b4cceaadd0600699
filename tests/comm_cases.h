// What every group of ranks has to do, checked by its ranks themselves: run by threads
// (comm_test.cpp) and by processes under MPI (mpi_ranks.cpp). Every number has a value that follows
// from the ranks it belongs to, and outputs are filled with others before.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "comm/group.h"

namespace tandem::test {

// Byte i of what rank `from` sends to rank `to`; 0xee is never sent.
inline std::byte sent_byte(int from, int to, int64_t i) {
  return static_cast<std::byte>((from * 31 + to * 17 + i * 7 + i / 200) % 0xee);
}
constexpr std::byte kUnwritten{0xee};

// Different for every pair, also 0, and growing with `scale`.
inline int64_t bytes_between(int from, int to, int64_t scale) {
  return (from * 5 + to * 3) % 4 * scale + (from + to) % 2;
}

inline void check_broadcast(Group& group) {
  for (int root = 0; root < group.size(); ++root)
    for (const int64_t n : {0, 1, 100'000}) {
      std::vector<std::byte> x(n, kUnwritten);
      if (group.rank() == root)
        for (int64_t i = 0; i < n; ++i) x[i] = sent_byte(root, 0, i);
      group.broadcast(x, root);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], sent_byte(root, 0, i)) << root << " " << i;
    }
}

inline void check_all_gather(Group& group) {
  for (const int64_t scale : {0, 1, 7392, 200'000})
    for (const bool in_place : {false, true}) {
      std::vector<int64_t> sizes;
      for (int r = 0; r < group.size(); ++r) sizes.push_back(bytes_between(r, 0, scale));
      int64_t total = 0, at = 0;
      for (int r = 0; r < group.size(); ++r) {
        if (r == group.rank()) at = total;
        total += sizes[r];
      }
      std::vector<std::byte> out(total, kUnwritten), own(sizes[group.rank()]);
      std::byte* const mine = in_place ? out.data() + at : own.data();
      for (int64_t i = 0; i < sizes[group.rank()]; ++i) mine[i] = sent_byte(group.rank(), 0, i);
      group.all_gather({mine, own.size()}, {out, sizes});
      int64_t place = 0;
      for (int r = 0; r < group.size(); ++r)
        for (int64_t i = 0; i < sizes[r]; ++i)
          ASSERT_EQ(out[place++], sent_byte(r, 0, i)) << "rank " << r << ", byte " << i;
    }
}

inline void check_all_to_all(Group& group) {
  for (const int64_t scale : {0, 1, 7392, 200'000}) {
    std::vector<int64_t> to, from;
    std::vector<std::byte> in, out;
    for (int r = 0; r < group.size(); ++r) {
      to.push_back(bytes_between(group.rank(), r, scale));
      from.push_back(bytes_between(r, group.rank(), scale));
      for (int64_t i = 0; i < to.back(); ++i) in.push_back(sent_byte(group.rank(), r, i));
      out.resize(out.size() + from.back(), kUnwritten);
    }
    group.all_to_all({in, to}, {out, from});
    int64_t place = 0;
    for (int r = 0; r < group.size(); ++r)
      for (int64_t i = 0; i < from[r]; ++i)
        ASSERT_EQ(out[place++], sent_byte(r, group.rank(), i)) << "rank " << r << ", byte " << i;
  }
}

// The numbers of a rank, of sizes so different that the order of a sum shows in its bits.
inline std::vector<float> numbers_of(int rank, int64_t n) {
  std::mt19937 random(100 + rank);
  std::vector<float> x(n);
  for (float& v : x)
    v = std::ldexp(static_cast<float>(random() % 20001) - 10000, static_cast<int>(random() % 24));
  return x;
}

inline std::vector<float> ascending_sum(int n_ranks, int64_t n) {
  std::vector<float> sum = numbers_of(0, n);
  for (int r = 1; r < n_ranks; ++r) {
    const std::vector<float> x = numbers_of(r, n);
    for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
  }
  return sum;
}

inline void check_sums(Group& group) {
  for (const int64_t n : {0, 1, 3, 7168, 50'000}) {
    const std::vector<float> want = ascending_sum(group.size(), n);
    std::vector<float> x = numbers_of(group.rank(), n);
    group.all_reduce(x);
    ASSERT_EQ(x, want);

    std::vector<int64_t> sizes(group.size(), 0);  // the last but one rank has everything but a tail
    sizes.back() = n / 3;
    sizes[std::max(0, group.size() - 2)] += n - n / 3;
    int64_t at = 0;
    for (int r = 0; r < group.rank(); ++r) at += sizes[r];
    const std::vector<float> in = numbers_of(group.rank(), n);
    std::vector<float> out(sizes[group.rank()], std::numeric_limits<float>::quiet_NaN());
    group.reduce_scatter({in, sizes}, out);
    ASSERT_TRUE(std::equal(out.begin(), out.end(), want.begin() + at));
  }
}

// Each rank puts a row at its place in every window, in rounds: nothing is read before it is there,
// and nothing is overwritten before it was read.
inline void check_window(Group& group) {
  constexpr int64_t kRow = 1000;
  const auto window = group.allocate_window(kRow * group.size());
  ASSERT_EQ(static_cast<int64_t>(window->of(group.rank()).size()), kRow * group.size());
  for (const std::byte b : window->of(group.rank())) ASSERT_EQ(b, std::byte{0});
  group.barrier();
  for (uint64_t round = 1; round <= 50; ++round) {
    const auto value = [&](int from, int to) { return sent_byte(from, to, int64_t(round)); };
    for (int r = 0; r < group.size(); ++r) {
      const std::vector<std::byte> row(kRow, value(group.rank(), r));
      std::copy(row.begin(), row.end(), window->of(r).begin() + kRow * group.rank());
      window->signal(r, 2 * round);
    }
    for (int r = 0; r < group.size(); ++r) {
      window->wait(r, 2 * round);
      for (const std::byte b : window->of(group.rank()).subspan(kRow * r, kRow))
        ASSERT_EQ(b, value(r, group.rank())) << "round " << round << ", rank " << r;
    }
    for (int r = 0; r < group.size(); ++r) window->signal(r, 2 * round + 1);
    for (int r = 0; r < group.size(); ++r) window->wait(r, 2 * round + 1);
  }
}

// Halves, rows and columns of a grid, single ranks; groups of groups; some ranks in none.
inline void check_split(Group& group) {
  for (const int n_colors : {1, 2, 3}) {
    const auto part = group.split(group.rank() % n_colors);
    ASSERT_EQ(part->rank(), group.rank() / n_colors);
    ASSERT_EQ(part->size(), (group.size() - group.rank() % n_colors + n_colors - 1) / n_colors);
    for (int r = 0; r < part->size(); ++r)
      ASSERT_EQ(part->world_rank(r), group.world_rank(r * n_colors + group.rank() % n_colors));
    check_all_to_all(*part);
    check_sums(*part);
    check_window(*part);
    const auto deeper = part->split(part->rank() / 2);
    check_all_gather(*deeper);
    check_sums(group);  // between calls of its parts
    // One part has more groups than the others.
    if (group.rank() % n_colors == 0) check_sums(*part->split(part->rank()));
  }
  const auto some = group.split(group.rank() == 0 ? -1 : 7);
  ASSERT_EQ(some == nullptr, group.rank() == 0);
  if (some) check_sums(*some);
}

// The ranks make calls of two groups in different orders, which nothing but the groups tells apart.
inline void call_in_two_orders(Group& group) {
  const auto a = group.split(0), b = group.split(0);
  (group.rank() == 0 ? a : b)->barrier();
  (group.rank() == 0 ? b : a)->barrier();
}

inline void check_group(Group& group) {
  group.barrier();
  check_broadcast(group);
  check_all_gather(group);
  check_all_to_all(group);
  check_sums(group);
  check_window(group);
  check_split(group);
  std::vector<int> ranks(group.size(), -1);
  group.all_gather_values(group.rank(), std::span(ranks));
  for (int r = 0; r < group.size(); ++r) ASSERT_EQ(ranks[r], r);
}

}  // namespace tandem::test
