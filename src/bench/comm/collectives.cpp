// `tandem bench comm`: the calls of a group.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "bench/comm/comm.h"
#include "core/memory.h"

namespace tandem {
namespace {

// Memory of a call: what it reads, and its result by the group and by MPI.
struct CallMemory {
  explicit CallMemory(int64_t bytes) : in_(bytes), own_(bytes), raw_(bytes) {}
  Bytes in(int64_t n) const { return in_.span().first(n); }
  Bytes own(int64_t n) const { return own_.span().first(n); }
  Bytes raw(int64_t n) const { return raw_.span().first(n); }

 private:
  Buffer in_, own_, raw_;
};

std::span<float> floats(Bytes bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

void fill(std::span<float> x, int rank) {
  for (size_t i = 0; i < x.size(); ++i) x[i] = exact_number(rank, static_cast<int64_t>(i));
}

// Both once, with equal results in `own` and `raw`; then the time of both.
ComparedSeconds checked(const BenchRanks& ranks, const char* operation, const ComparedCalls& calls,
                        ConstBytes own, ConstBytes raw, double seconds) {
  calls.own();
  calls.raw();
  require_run(std::equal(own.begin(), own.end(), raw.begin(), raw.end()),
              "{}: rank {} gets another result than by {}", operation, ranks.group.rank(),
              ranks.raw.name());
  return compare(ranks.group, calls, seconds);
}

}  // namespace

void bench_collectives(const BenchRanks& ranks, int64_t bytes, double seconds,
                       const OnRow& on_row) {
  Group& group = ranks.group;
  RawCollectives& mpi = ranks.raw;
  const int rank = group.rank(), size = group.size();
  // Floats of equal pieces, and pieces of one or two units for all_to_all.
  const int64_t piece = std::max<int64_t>(bytes / (4 * size), 1) * 4, n = piece * size;
  const int64_t unit = std::max<int64_t>(2 * bytes / (3 * size), 1);
  std::vector<int64_t> out_sizes, in_sizes;
  const auto units = [](int from, int to) { return 1 + (from + to) % 2; };
  for (int r = 0; r < size; ++r) {
    out_sizes.push_back(unit * units(rank, r));
    in_sizes.push_back(unit * units(r, rank));
  }
  const int64_t n_out = std::accumulate(out_sizes.begin(), out_sizes.end(), int64_t{0});
  const int64_t n_in = std::accumulate(in_sizes.begin(), in_sizes.end(), int64_t{0});
  const int64_t most = std::max({n, n_out, n_in});
  const CallMemory m(most);
  const auto row = [&](const char* name, int64_t moved, const ComparedSeconds& s) {
    on_row(comm_row(ranks, name, moved, s));
  };

  fill(floats(m.in(most)), rank);
  std::memcpy(m.own(n).data(), m.in(n).data(), n);
  std::memcpy(m.raw(n).data(), m.in(n).data(), n);
  row("broadcast", n,
      checked(ranks, "broadcast",
              {[&] { group.broadcast(m.own(n), 0); }, [&] { mpi.broadcast(m.raw(n), 0); }},
              m.own(n), m.raw(n), seconds));

  const Bytes mine = m.in(piece);
  row("all_gather", n,
      checked(ranks, "all_gather",
              {[&] { group.all_gather_equal(mine, m.own(n)); },
               [&] { mpi.all_gather(mine, m.raw(n)); }},
              m.own(n), m.raw(n), seconds));

  row("all_to_all", n_out,
      checked(ranks, "all_to_all",
              {[&] {
                 group.all_to_all({m.in(n_out), out_sizes}, {m.own(n_in), in_sizes});
               },
               [&] {
                 mpi.all_to_all({m.in(n_out), out_sizes}, {m.raw(n_in), in_sizes});
               }},
              m.own(n_in), m.raw(n_in), seconds));

  const std::vector<int64_t> pieces(size, piece / 4);
  row("reduce_scatter", n,
      checked(ranks, "reduce_scatter",
              {[&] {
                 group.reduce_scatter({floats(m.in(n)), pieces}, floats(m.own(piece)));
               },
               [&] { mpi.reduce_scatter(floats(m.in(n)), floats(m.raw(piece))); }},
              m.own(piece), m.raw(piece), seconds));

  // A group adds in place, so what it adds grows; the first sum is compared, zeros are timed.
  std::memcpy(m.own(n).data(), m.in(n).data(), n);
  const ComparedCalls add = {[&] { group.all_reduce(floats(m.own(n))); },
                             [&] { mpi.all_reduce(floats(m.in(n)), floats(m.raw(n))); }};
  add.own();
  add.raw();
  require_run(std::memcmp(m.own(n).data(), m.raw(n).data(), n) == 0,
              "all_reduce: rank {} gets another result than by {}", rank, mpi.name());
  std::memset(m.own(n).data(), 0, n);
  std::memset(m.in(n).data(), 0, n);
  row("all_reduce", n, compare(group, add, seconds));
}

void bench_barrier(const BenchRanks& ranks, double seconds, const OnRow& on_row) {
  const ComparedCalls calls = {[&] { ranks.group.barrier(); }, [&] { ranks.raw.barrier(); }};
  on_row(comm_row(ranks, "barrier", 0, compare(ranks.group, calls, seconds)));
}

}  // namespace tandem
