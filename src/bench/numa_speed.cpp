#include "bench/numa_speed.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/memory.h"

namespace tandem {
namespace {

constexpr int64_t kNodePieceBytes = 1 << 20;

// All cores of `node` read the memory together.
double read_rate(const Topology& topology, int node, const Buffer& memory,
                 const cpu::ReadLoop& loop, double seconds) {
  std::atomic<int64_t> next = 0;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
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
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  return static_cast<double>(next * kNodePieceBytes) / spent.count();
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
