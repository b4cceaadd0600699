// Memory bandwidth and arithmetic peaks of this machine, measured in short bursts of dedicated
// loops. Bursts should alternate with the runs that are compared with them, because a machine's
// speed changes from minute to minute.
#pragma once
#include <span>
#include <vector>

#include "core/clock.h"
#include "core/machine.h"
#include "core/memory.h"
#include "core/team.h"
#include "core/topology.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/peaks.h"

namespace tandem {

double median(std::vector<double> values);  // not empty

enum class Threads { kOne, kAll };

class MachineSpeed {
 public:
  // Reads from `bytes` of memory. Each thread of the team has a part, which it touches first.
  MachineSpeed(Team& team, int64_t bytes);
  // 1 GiB per thread, or a quarter of the available memory if smaller.
  static int64_t enough_bytes(const Team& team);

  Team& team() { return team_; }
  // The loops that this CPU can run.
  std::span<const cpu::ReadLoop> read_loops() const { return reads_; }
  std::span<const cpu::PeakLoop> peak_loops() const { return peaks_; }
  // The fastest read loop with all threads.
  const cpu::ReadLoop& best_read_loop() const { return best_read_; }
  // The fastest loop of a type that instruction set `isa` may use; a float loop if it has none.
  const cpu::PeakLoop& best_peak_loop(cpu::Arithmetic type, cpu::Isa isa) const;

  // One burst of a few milliseconds, or of about `seconds` if longer.
  double read_bytes_per_second(const cpu::ReadLoop& loop, Threads threads, double seconds = 0);
  double ops_per_second(const cpu::PeakLoop& loop, Threads threads, double seconds = 0);
  // Instructions that all threads start, of those that instructions_of_line() counts for the
  // instruction set to which the peak of the products belongs.
  double instructions_per_second(const cpu::PeakLoop& peak, double seconds = 0);

 private:
  void touch();
  const std::byte* next_piece(int thread);
  template <class Piece>
  double pieces_per_second(int64_t n_pieces, Threads threads, double seconds, Piece piece);

  struct alignas(64) Slice {
    std::byte* data = nullptr;
    int64_t next = 0;  // piece
  };
  Team& team_;
  const int64_t pieces_per_thread_;
  Buffer memory_;
  std::vector<Slice> slices_;  // one per thread
  std::vector<cpu::ReadLoop> reads_;
  std::vector<cpu::PeakLoop> peaks_;
  std::vector<double> peak_rates_;  // of peaks_, with one thread
  cpu::ReadLoop best_read_;
  std::vector<cpu::StartLoop> starts_;  // of ascending instruction sets
};

// Read bandwidth of the cores of one NUMA node, from its own memory and from another node's.
struct NumaSpeed {
  std::vector<NumaNode> nodes;        // each measured while the others are idle
  double cross_bytes_per_second = 0;  // the slowest measured pair; 0 for one node
  bool bound = true;                  // memory could be bound to the nodes
};

// Each node's memory, at most `bytes`, is read for `seconds` by its own cores, and then by those of
// node (i + n / 2) mod n.
NumaSpeed numa_speed(const Topology& topology, const cpu::ReadLoop& loop, int64_t bytes,
                     double seconds);

}  // namespace tandem
