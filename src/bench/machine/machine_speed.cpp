#include "bench/machine/machine_speed.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "core/machine_info.h"

namespace tandem {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;  // per read, 50 to 100 us
constexpr int64_t kBurstPieces = 64;      // per thread and burst
constexpr double kPeakPieceSeconds = 1e-4;
constexpr int64_t kPeakPieces = 16;  // per thread and burst
constexpr int kTrials = 5;

// The lowest instruction set whose kernels may use a feature.
cpu::Isa isa_of(cpu::Feature feature) {
  switch (feature) {
    case cpu::Feature::kBaseline:
      break;
    case cpu::Feature::kAvx2:
    case cpu::Feature::kAvxVnni:
      return cpu::Isa::kAvx2;
    case cpu::Feature::kAvx512:
    case cpu::Feature::kAvx512Vnni:
    case cpu::Feature::kAvx512Bf16:
      return cpu::Isa::kAvx512;
    case cpu::Feature::kAmxInt8:
    case cpu::Feature::kAmxBf16:
      return cpu::Isa::kAmx;
  }
  return cpu::Isa::kReference;
}

// The number of rounds that take about kPeakPieceSeconds.
int64_t rounds_of_piece(const cpu::PeakLoop& loop, double ops_per_second) {
  const double rounds =
      ops_per_second * kPeakPieceSeconds / static_cast<double>(loop.ops_per_round);
  return std::max<int64_t>(1, static_cast<int64_t>(rounds));
}

}  // namespace

double median(std::vector<double> values) {
  check(!values.empty(), "median of nothing");
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

int64_t MachineSpeed::enough_bytes(const Team& team) {
  return std::min((int64_t{1} << 30) * team.size(), available_memory_bytes() / 4);
}

MachineSpeed::MachineSpeed(Team& team, int64_t bytes)
    : team_(team),
      pieces_per_thread_(std::max<int64_t>(1, bytes / team.size() / kPieceBytes)),
      memory_(pieces_per_thread_ * team.size() * kPieceBytes),
      slices_(team.size()) {
  touch();
  for (int island = 0; island < cpu::kNumSpeedLoops; ++island) {
    const cpu::SpeedLoops loops = cpu::speed_loops(island);
    for (int i = 0; i < loops.n_reads; ++i)
      if (cpu::cpu_has(loops.reads[i].needs)) reads_.push_back(loops.reads[i]);
    for (int i = 0; i < loops.n_peaks; ++i)
      if (cpu::cpu_has(loops.peaks[i].needs)) peaks_.push_back(loops.peaks[i]);
    if (loops.start && cpu::cpu_has(loops.start->needs)) starts_.push_back(*loops.start);
  }
  for (const cpu::PeakLoop& loop : peaks_) {
    constexpr int64_t kFirstGuess = 2000;
    double rate = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      const double seconds = seconds_of([&] { loop.run(kFirstGuess); });
      rate = std::max(rate, static_cast<double>(kFirstGuess * loop.ops_per_round) / seconds);
    }
    peak_rates_.push_back(rate);
  }
  double best = 0;
  for (const cpu::ReadLoop& loop : reads_) {
    std::vector<double> rates(kTrials);
    for (double& rate : rates) rate = read_bytes_per_second(loop, Threads::kAll);
    if (median(rates) <= best) continue;
    best = median(rates);
    best_read_ = loop;
  }
}

// Every thread writes its own slice, so that the pages are on its NUMA node. Each item waits until
// all have started, so that no thread takes two.
void MachineSpeed::touch() {
  const int64_t slice_bytes = pieces_per_thread_ * kPieceBytes;
  std::atomic<int> n_begun = 0;
  team_.run(team_.size(), [&](int64_t, int thread) {
    ++n_begun;
    while (n_begun < team_.size()) std::this_thread::yield();
    slices_[thread].data = memory_.data() + thread * slice_bytes;
    std::memset(slices_[thread].data, 1, slice_bytes);
  });
}

const cpu::PeakLoop& MachineSpeed::best_peak_loop(cpu::Arithmetic type, cpu::Isa isa) const {
  int best = -1;
  for (int i = 0; i < static_cast<int>(peaks_.size()); ++i)
    if (peaks_[i].type == type && isa_of(peaks_[i].needs) <= isa &&
        (best < 0 || peak_rates_[i] > peak_rates_[best]))
      best = i;
  if (best < 0) return best_peak_loop(cpu::Arithmetic::kF32, isa);
  return peaks_[best];
}

const std::byte* MachineSpeed::next_piece(int thread) {
  Slice& slice = slices_[thread];
  slice.next = (slice.next + 1) % pieces_per_thread_;
  return slice.data + slice.next * kPieceBytes;
}

// Calls piece(thread) n_pieces times per thread, repeatedly.
template <class Piece>
double MachineSpeed::pieces_per_second(int64_t n_pieces, Threads threads, double seconds,
                                       Piece piece) {
  const int64_t n = n_pieces * (threads == Threads::kAll ? team_.size() : 1);
  int64_t done = 0;
  double spent = 0;
  do {
    spent += seconds_of([&] {
      if (threads == Threads::kAll)
        return team_.run(n, [&](int64_t, int thread) { piece(thread); });
      for (int64_t i = 0; i < n; ++i) piece(0);
    });
    done += n;
  } while (spent < seconds);
  return static_cast<double>(done) / spent;
}

double MachineSpeed::read_bytes_per_second(const cpu::ReadLoop& loop, Threads threads,
                                           double seconds) {
  return kPieceBytes * pieces_per_second(kBurstPieces, threads, seconds, [&](int thread) {
           loop.run(next_piece(thread), kPieceBytes);
         });
}

double MachineSpeed::ops_per_second(const cpu::PeakLoop& loop, Threads threads, double seconds) {
  const auto at = std::find_if(peaks_.begin(), peaks_.end(),
                               [&](const cpu::PeakLoop& one) { return one.run == loop.run; });
  check(at != peaks_.end(), "a loop of this machine");
  const int64_t rounds = rounds_of_piece(loop, peak_rates_[at - peaks_.begin()]);
  return static_cast<double>(rounds * loop.ops_per_round) *
         pieces_per_second(kPeakPieces, threads, seconds, [&](int) { loop.run(rounds); });
}

double MachineSpeed::instructions_per_second(const cpu::PeakLoop& peak, double seconds) {
  constexpr int64_t kRounds = 100'000;  // 100 to 600 us
  const auto last = std::find_if(
      starts_.rbegin(), starts_.rend(),
      [&](const cpu::StartLoop& start) { return isa_of(start.needs) <= isa_of(peak.needs); });
  check(last != starts_.rend(), "a peak of AVX2 or later");
  return static_cast<double>(kRounds * last->instructions_per_round) *
         pieces_per_second(kPeakPieces, Threads::kAll, seconds, [&](int) { last->run(kRounds); });
}

namespace {

constexpr int64_t kNodePieceBytes = 1 << 20;

// All cores of `node` read the memory together.
double read_rate(const Topology& topology, int node, const Buffer& memory,
                 const cpu::ReadLoop& loop, double seconds) {
  std::atomic<int64_t> next = 0;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  const Stopwatch watch;
  for (const int cpu : topology.nodes[node].cpus)
    threads.emplace_back([&, cpu] {
      const Pin pin(topology, cpu);
      do
        loop.run(memory.data() + next++ % (memory.bytes() / kNodePieceBytes) * kNodePieceBytes,
                 kNodePieceBytes);
      while (!stop);
    });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  return static_cast<double>(next * kNodePieceBytes) / watch.seconds();
}

}  // namespace

NumaSpeed numa_speed(const Topology& topology, const cpu::ReadLoop& loop, int64_t bytes,
                     double seconds) {
  const int n = topology.n_nodes();
  bytes = std::max(kNodePieceBytes, bytes / kNodePieceBytes * kNodePieceBytes);
  NumaSpeed speed;
  for (int i = 0; i < n; ++i) {
    const Buffer memory(bytes);
    if (n > 1) speed.bound &= bind_to_node(topology, memory.span(), i);
    std::memset(memory.data(), 1, bytes);
    speed.nodes.push_back({static_cast<int>(topology.nodes[i].cpus.size()),
                           topology.nodes[i].memory_bytes,
                           read_rate(topology, i, memory, loop, seconds)});
    if (n == 1) break;
    const double cross = read_rate(topology, (i + n / 2) % n, memory, loop, seconds);
    speed.cross_bytes_per_second = i == 0 ? cross : std::min(speed.cross_bytes_per_second, cross);
  }
  return speed;
}

}  // namespace tandem
