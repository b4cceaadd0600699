// Runs a grid of GPU threads on one CPU thread: threads of a block are fibers that switch at
// barriers, warp collectives and polls. Blocks run one after another, or each on its own CPU thread
// if the launch is co_resident. Misuse that would make a GPU hang or compute garbage aborts.
//
// This file is compiled without -fsanitize=thread: the sanitizer then treats fibers as unordered
// threads, and only barriers, __syncwarp and acquire/release order their memory.
#include "gpu_kernels/emulated/emulator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/yield_core.h"
#include "gpu_kernels/emulated/device.h"
#include "gpu_kernels/emulated/fiber.h"
#include "gpu_kernels/emulated/loss.h"

constinit thread_local uint3 threadIdx, blockIdx;
constinit thread_local dim3 blockDim, gridDim;

namespace tandem::gpu::emulated {
namespace {

constexpr int64_t kMaxSharedBytes = 99 * 1024;  // limit of the weakest GPUs: sm_89 and sm_120

// Lanes that synchronise under one mask. Packets alternate between two tables, because no lane can
// be two rounds ahead of a lane that still reads.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  uint64_t round = 0;
  Where at = {};
  Packet packets[2][32];
  float sums[2][32][4];  // sums of multiply()
};

struct Fiber : Context {
  int thread = 0;
  bool done = true;
  bool polling = false;
  const uint64_t* waits_for = nullptr;  // runnable once this counter differs from `seen`
  uint64_t seen = 0;
  Where last_met = {};        // the last barrier or collective
  Meeting* joined = nullptr;  // the last collective
  std::deque<PendingCopy> copies;
  int copy_group = 0;
};

std::array<float, 256> e4m3_values() {
  std::array<float, 256> all;
  for (int i = 0; i < 256; ++i) all[i] = widen(fp8_e4m3{static_cast<uint8_t>(i)});
  return all;
}

// c [16, 8] += a [16, depth] b [depth, 8]. Each sum is formed in ascending order of k; eight at a
// time are in registers, since one sum waits for its last addition.
[[gnu::target_clones("avx2", "default")]] void multiply_add(const float* a, const float* b,
                                                            float* c, int depth) {
  using Row [[gnu::vector_size(32)]] = float;
  constexpr int kRows = 8;
  for (int first = 0; first < 16; first += kRows) {
    Row sums[kRows];
    std::memcpy(sums, c + first * 8, sizeof sums);
    for (int k = 0; k < depth; ++k) {
      Row columns;
      std::memcpy(&columns, b + k * 8, sizeof columns);
      for (int row = 0; row < kRows; ++row) sums[row] += a[(first + row) * depth + k] * columns;
    }
    std::memcpy(c + first * 8, sums, sizeof sums);
  }
}

// [16, 8] sums += a [16, kDepth] b [kDepth, 8] of a warp. Lane l has, of each half of the depth, a
// quarter of rows l / 4 and l / 4 + 8 of a and of column l / 4 of b; of the sums, two columns of
// these rows. decode(word, to) writes the kDepth / 8 numbers of a packet's word.
template <int kDepth, class Decode>
void add_products(const Packet* lanes, float (*sums)[4], Decode decode) {
  constexpr int kWord = kDepth / 8;
  float a[16][kDepth], b[kDepth][8], c[16][8];
  for (int row = 0; row < 8; ++row)
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int l = row * 4 + quarter;
      for (int half = 0; half < 2; ++half) {
        const int k = half * kDepth / 2 + quarter * kWord;
        decode(lanes[l].word[2 * half], &a[row][k]);
        decode(lanes[l].word[2 * half + 1], &a[row + 8][k]);
        float column[kWord];
        decode(lanes[l].word[4 + half], column);
        for (int i = 0; i < kWord; ++i) b[k + i][row] = column[i];
      }
      std::memcpy(&c[row][quarter * 2], sums[l], 2 * sizeof(float));
      std::memcpy(&c[row + 8][quarter * 2], sums[l] + 2, 2 * sizeof(float));
    }
  multiply_add(&a[0][0], &b[0][0], &c[0][0], kDepth);
  for (int l = 0; l < 32; ++l) {
    std::memcpy(sums[l], &c[l / 4][l % 4 * 2], 2 * sizeof(float));
    std::memcpy(sums[l] + 2, &c[l / 4 + 8][l % 4 * 2], 2 * sizeof(float));
  }
}

using SharedMemory = std::unique_ptr<void, decltype(&std::free)>;

struct Grid {
  LaunchShape shape;
  const std::function<void()>& body;
  std::vector<int64_t> blocks;       // blocks that run, in this order
  std::vector<SharedMemory> shared;  // one for each of them, or one in turn
  uint64_t begin_mark = 0, end_mark = 0;
};

// Heap memory, where AddressSanitizer guards both ends.
SharedMemory allocate_shared(int64_t bytes) {
  void* p = nullptr;
  check(posix_memalign(&p, 128, static_cast<size_t>(bytes)) == 0, "shared memory");
  return {p, &std::free};
}

class Block {
 public:
  // Reserves memory, since growth within a fiber would look like a race to ThreadSanitizer.
  Block() {
    for (Warp& warp : warps_) warp.meetings.reserve(kReservedMasks);
  }
  ~Block();
  void run(Grid& grid, size_t nth);

  void sync(Where at);
  Packet& join(unsigned mask, Where at);
  const Packet* meet(bool orders_memory);
  void multiply(Mma kind, float (&c)[4]);
  void poll();
  void copy(PendingCopy copy);

  Fiber* running = nullptr;  // null: none
  std::byte* shared = nullptr;
  int64_t shared_bytes = 0;

 private:
  void prepare(int n_threads);
  void abandon();
  struct Turn {
    bool ran = false, progress = false;  // whether any thread ran; whether any did more than poll
  };
  Turn run_each(std::span<const int> threads);
  Fiber* next_ready();
  void suspend();
  void wait_until_changed(const uint64_t& counter);
  Meeting& meeting(unsigned mask);
  bool arrives_last(Meeting& m);
  static void open(Meeting& m);
  void open_barrier();
  [[noreturn]] void report_deadlock() const;
  static void fiber_main();

  static constexpr int kReservedMasks = 32;  // distinct masks of a warp, usually
  Context scheduler_;
  Stacks stacks_;
  std::vector<Fiber> fibers_;
  std::span<const int> waiting_;  // threads of this turn that have not been looked at
  Turn turn_;
  struct Warp {
    std::vector<std::unique_ptr<Meeting>> meetings;  // one for each mask
    Meeting* last = nullptr;                         // used by the last collective
  };
  std::array<Warp, kMaxThreads / 32> warps_;
  Grid* grid_ = nullptr;
  int n_live_ = 0, n_arrived_ = 0;
  uint64_t round_ = 0, barrier_marks_[2] = {};
  int64_t n_copies_ = 0, n_collectives_ = 0;  // counts of this run
  Where barrier_at_ = {};
};

// A fiber never leaves its CPU thread, so one thread-local pointer finds the block.
thread_local Block* current = nullptr;

constinit thread_local int driver_depth = 0;

// Forward, reverse and shuffled schedules expose different missing barriers; tests run all three.
template <class Id>
void put_in_order(std::vector<Id>& ids, uint64_t salt) {
  static const char* const set = std::getenv("TANDEM_GPU_ORDER");
  static const std::string order = set ? set : "forward";
  if (order == "reverse") std::reverse(ids.begin(), ids.end());
  if (order == "shuffled")
    std::shuffle(ids.begin(), ids.end(), std::minstd_rand(static_cast<unsigned>(salt)));
}
std::vector<int> schedule(int n, uint64_t salt) {
  std::vector<int> ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  put_in_order(ids, salt);
  return ids;
}

// The indices of the first and the last n_at_ends of n blocks.
std::vector<int64_t> blocks_to_run(int64_t n, int64_t n_at_ends) {
  std::vector<int64_t> ids;
  const int64_t n_first = std::min(n, n_at_ends);
  for (int64_t i = 0; i < n_first; ++i) ids.push_back(i);
  for (int64_t i = std::max(n_first, n - n_first); i < n; ++i) ids.push_back(i);
  put_in_order(ids, 0);
  return ids;
}

bool same(Where a, Where b) { return a.line() == b.line() && a.file_name() == b.file_name(); }

}  // namespace

InDriver::InDriver() { ++driver_depth; }
InDriver::~InDriver() { --driver_depth; }
bool in_driver() { return driver_depth > 0; }

Counts& counts() {
  static Counts counts;
  return counts;
}

void check_shape(const LaunchShape& s, Caller at) {
  const auto require = [&](bool ok, const char* format, auto... values) {
    if (ok) return;
    std::array<char, 160> what = {};
    std::snprintf(what.data(), what.size(), format, values...);
    check(false, what.data(), at);
  };
  require(s.grid_x >= 1 && s.grid_y >= 1 && s.grid_z >= 1 && s.grid_y <= kMaxGridYz &&
              s.grid_z <= kMaxGridYz,
          "a grid of %d x %d x %d blocks: CUDA takes 1 to 2147483647 x 65535 x 65535", s.grid_x,
          s.grid_y, s.grid_z);
  require(s.threads >= 1 && s.threads <= kMaxThreads, "a block of %d threads: CUDA takes 1 to %d",
          s.threads, kMaxThreads);
  require(s.shared_bytes >= 0 && s.shared_bytes <= kMaxSharedBytes,
          "%lld bytes of shared memory: a block has up to %lld",
          static_cast<long long>(s.shared_bytes), static_cast<long long>(kMaxSharedBytes));
}

int64_t blocks_option() {
  const char* set = std::getenv("TANDEM_GPU_BLOCKS");
  return set ? std::atoll(set) : std::numeric_limits<int64_t>::max();
}

namespace {
thread_local int64_t n_begun = 0;  // threads of the running grid
}
void begin_early() { ++n_begun; }

void run_grid(const LaunchShape& shape, int64_t n_at_ends, const std::function<void()>& body) {
  const int64_t n_blocks = int64_t{shape.grid_x} * shape.grid_y * shape.grid_z;
  Grid grid{shape, body, blocks_to_run(n_blocks, n_at_ends), {}};
  // Freed or reused memory would make ThreadSanitizer treat the blocks as ordered.
  const size_t n_shared = shape.co_resident || under_thread_sanitizer() ? grid.blocks.size() : 1;
  for (size_t i = 0; i < n_shared; ++i) grid.shared.push_back(allocate_shared(shape.shared_bytes));
  publish(&grid.begin_mark);
  if (shape.co_resident) {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < grid.blocks.size(); ++i)
      threads.emplace_back([&grid, i] {
        const InDriver driver;
        Block block;
        block.run(grid, i);
        observe(&grid.end_mark);
      });
  } else {
    static thread_local Block block;  // keeps its stacks between launches
    n_begun = 0;
    for (size_t i = 0; i < grid.blocks.size(); ++i) block.run(grid, i);
    check(!shape.early || n_begun == std::ssize(grid.blocks) * shape.threads,
          "a thread of a kernel that starts early does not wait for earlier kernels");
  }
  observe(&grid.end_mark);
}

void Block::run(Grid& grid, size_t nth) {
  const LaunchShape& shape = grid.shape;
  current = this;
  grid_ = &grid;
  gridDim = {static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y),
             static_cast<unsigned>(shape.grid_z)};
  blockDim = {static_cast<unsigned>(shape.threads), 1, 1};
  const auto i = static_cast<uint64_t>(grid.blocks[nth]);
  blockIdx = {static_cast<unsigned>(i % gridDim.x),
              static_cast<unsigned>(i / gridDim.x % gridDim.y),
              static_cast<unsigned>(i / gridDim.x / gridDim.y)};
  shared = static_cast<std::byte*>(grid.shared[nth % grid.shared.size()].get());
  shared_bytes = shape.shared_bytes;
  std::memset(shared, 0xff, static_cast<size_t>(shared_bytes));
  prepare(shape.threads);
  publish(&grid.begin_mark);  // observed first by every thread of the block
  std::vector<int> order = schedule(shape.threads, 0);
  const bool fixed = order == schedule(shape.threads, 1);
  for (uint64_t salt = 1; n_live_ > 0; ++salt) {
    Turn all;
    for (size_t first = 0; first < order.size(); first += 32) {
      const std::span warp(order.begin() + first, std::min(order.size(), first + 32) - first);
      Turn turn;
      do {
        turn = run_each(warp);
        all.ran |= turn.ran;
        all.progress |= turn.progress;
      } while (fixed && turn.progress);  // keeps the stacks of a warp in the cache
    }
    if (!all.ran) report_deadlock();
    if (!all.progress) {  // all wait for an event outside the block
      if (is_lost()) return abandon();
      yield_core();
    }
    if (!fixed) order = schedule(shape.threads, salt);
  }
  counts().copies += std::exchange(n_copies_, 0);
  counts().collectives += std::exchange(n_collectives_, 0);
}

void Block::prepare(int n_threads) {
  if (fibers_.empty()) {
    fibers_.reserve(kMaxThreads);  // pointers to running fibers must stay valid
    scheduler_ = this_context();
  }
  for (int i = static_cast<int>(fibers_.size()); i < n_threads; ++i) {
    static_cast<Context&>(fibers_.emplace_back()) = stacks_.make(i, &fiber_main);
    fibers_.back().thread = i;
  }
  for (int i = 0; i < n_threads; ++i) {
    fibers_[i].done = fibers_[i].polling = false;
    fibers_[i].waits_for = nullptr;
  }
  n_live_ = n_threads;
  n_arrived_ = 0;
}

// Discards unfinished threads after the GPU is lost.
void Block::abandon() {
  for (Fiber& f : fibers_) destroy(f);
  fibers_.clear();
  for (Warp& warp : warps_) {
    warp.meetings.clear();
    warp.last = nullptr;
  }
}

Block::~Block() {
  for (Fiber& f : fibers_) destroy(f);
}

// Runs each of the ready threads once. A thread that suspends continues with the next one, which
// takes half as many switches as a return to the scheduler after each.
Block::Turn Block::run_each(std::span<const int> threads) {
  waiting_ = threads;
  turn_ = {};
  if (Fiber* const first = next_ready()) switch_to(scheduler_, *first);
  running = nullptr;
  return turn_;
}

// Makes the next ready thread of this turn the running one; null if there is none.
Fiber* Block::next_ready() {
  while (!waiting_.empty()) {
    Fiber& f = fibers_[waiting_.front()];
    waiting_ = waiting_.subspan(1);
    if (f.done || (f.waits_for && *f.waits_for == f.seen)) continue;
    f.waits_for = nullptr;
    f.polling = false;
    running = &f;
    threadIdx = {static_cast<unsigned>(f.thread), 0, 0};
    turn_.ran = true;
    return &f;
  }
  return nullptr;
}

void Block::suspend() {
  Fiber& mine = *running;
  turn_.progress |= !mine.polling;
  Fiber* const next = next_ready();
  switch_to(mine, next ? *next : scheduler_);
}

// A fiber outlives its GPU thread and continues with the same thread of the next block.
void Block::fiber_main() {
  Block& block = *current;
  arrived(*block.running, &block.scheduler_);
  for (;;) {
    observe(&block.grid_->begin_mark);
    block.running->last_met = {};
    block.running->copies.clear();
    block.running->copy_group = 0;
    block.grid_->body();
    publish(&block.grid_->end_mark);
    block.running->done = true;
    --block.n_live_;
    if (block.n_arrived_ == block.n_live_) block.open_barrier();  // exited threads do not count
    block.suspend();
  }
}

void Block::wait_until_changed(const uint64_t& counter) {
  running->waits_for = &counter;
  running->seen = counter;
  suspend();
}

void Block::open_barrier() {
  n_arrived_ = 0;
  ++round_;
}

void Block::sync(Where at) {
  running->last_met = at;
  if (n_arrived_ == 0) barrier_at_ = at;
  if (!same(at, barrier_at_)) fault("threads of one block meet at different __syncthreads()", at);
  uint64_t* mark = &barrier_marks_[round_ & 1];  // two: a fast thread may be one round ahead
  publish(mark);
  if (++n_arrived_ == n_live_)
    open_barrier();
  else
    wait_until_changed(round_);
  observe(mark);
}

// The collective of the lanes of `mask` in the warp of the running thread.
Meeting& Block::meeting(unsigned mask) {
  Warp& warp = warps_[running->thread / 32];
  if (warp.last && warp.last->mask == mask) return *warp.last;
  auto& all = warp.meetings;
  auto it = std::find_if(all.begin(), all.end(), [&](auto& m) { return m->mask == mask; });
  if (it == all.end()) {
    it = all.insert(it, std::make_unique<Meeting>());
    (*it)->mask = mask;
  }
  return *(warp.last = it->get());
}

Packet& Block::join(unsigned mask, Where at) {
  Fiber& mine = *running;
  const int lane = mine.thread % 32;
  ++n_collectives_;
  mine.last_met = at;
  if (!(mask >> lane & 1)) fault("the mask of a warp collective lacks the calling lane", at);
  const int n_lanes = static_cast<int>(blockDim.x) - (mine.thread - lane);
  if (n_lanes < 32) mask &= (1u << n_lanes) - 1;
  Meeting& m = meeting(mask);
  if (m.arrived == 0) m.at = at;
  if (!same(at, m.at)) fault("lanes of one warp meet at different collectives", at);
  mine.joined = &m;
  return m.packets[m.round & 1][lane];
}

// True if this lane is the last to arrive, which opens the meeting; the others wait until then.
bool Block::arrives_last(Meeting& m) {
  m.arrived |= 1u << running->thread % 32;
  return m.arrived == m.mask;
}
void Block::open(Meeting& m) {
  m.arrived = 0;
  ++m.round;
}

const Packet* Block::meet(bool orders_memory) {
  Meeting& m = *running->joined;
  Packet* packets = m.packets[m.round & 1];
  if (orders_memory) publish(packets);
  if (arrives_last(m))
    open(m);
  else
    wait_until_changed(m.round);
  if (orders_memory) observe(packets);
  return packets;
}

// The last lane computes for all, so that numbers are decoded once and columns form a vector.
void Block::multiply(Mma kind, float (&c)[4]) {
  Meeting& m = *running->joined;
  const int lane = running->thread % 32;
  const Packet* packets = m.packets[m.round & 1];
  float(*sums)[4] = m.sums[m.round & 1];
  std::copy_n(c, 4, sums[lane]);
  if (arrives_last(m)) {
    if (kind == Mma::kBf16) {
      add_products<16>(packets, sums, [](uint32_t word, float* to) {
        to[0] = std::bit_cast<float>(word << 16);
        to[1] = std::bit_cast<float>(word & 0xffff0000u);
      });
    } else {
      static const std::array<float, 256> values = e4m3_values();
      const float* const value = values.data();
      add_products<32>(packets, sums, [value](uint32_t word, float* to) {
        for (int i = 0; i < 4; ++i) to[i] = value[word >> i * 8 & 0xff];
      });
    }
    open(m);
  } else {
    wait_until_changed(m.round);
  }
  std::copy_n(sums[lane], 4, c);
}

void Block::poll() {
  running->polling = true;
  suspend();
}

void Block::copy(PendingCopy copy) {
  n_copies_ += copy.from != nullptr;
  copy.group = running->copy_group;
  running->copies.push_back(copy);
}

void Block::report_deadlock() const {
  std::fprintf(stderr, "deadlock in block (%u, %u, %u):\n", blockIdx.x, blockIdx.y, blockIdx.z);
  if (n_arrived_)
    std::fprintf(stderr, "  %d of %d threads wait at __syncthreads(), %s:%u\n", n_arrived_, n_live_,
                 barrier_at_.file_name(), barrier_at_.line());
  for (size_t w = 0; w < warps_.size(); ++w)
    for (const auto& m : warps_[w].meetings)
      if (m->arrived)
        std::fprintf(stderr, "  warp %zu: lanes %08x of %08x meet at %s:%u\n", w, m->arrived,
                     m->mask, m->at.file_name(), m->at.line());
  std::abort();
}

void sync_block(Where at) { current->sync(at); }
Packet& join(unsigned mask, Where at) { return current->join(mask, at); }
const Packet* meet(bool orders_memory) { return current->meet(orders_memory); }
void multiply(Mma kind, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4], Where at) {
  Block& block = *current;
  Packet& mine = block.join(~0u, at);
  for (int i = 0; i < 4; ++i) mine.word[i] = a[i];
  mine.word[4] = b0;
  mine.word[5] = b1;
  block.multiply(kind, c);
}
void yield() { current->poll(); }

void* shared_memory(int64_t bytes, Where at) {
  if (bytes > current->shared_bytes)
    fault("launched with less shared memory than the kernel uses", at);
  return current->shared;
}

void check_shared(const void* p, int64_t bytes, int64_t alignment, Where at) {
  const auto* b = static_cast<const std::byte*>(p);
  if (b < current->shared || b + bytes > current->shared + current->shared_bytes)
    fault("address outside shared_memory()", at);
  if (reinterpret_cast<uintptr_t>(p) % alignment) fault("shared address misaligned", at);
}

void push_copy(PendingCopy copy) { current->copy(copy); }

void close_group() { ++current->running->copy_group; }

bool pop_copy(int n_pending_groups, PendingCopy& out) {
  Fiber& f = *current->running;
  if (f.copies.empty() || f.copies.front().group >= f.copy_group - n_pending_groups) return false;
  out = f.copies.front();
  f.copies.pop_front();
  return true;
}

void name_running_thread(char* to, size_t n) {
  if (!current || !current->running) {
    std::snprintf(to, n, "the host");
    return;
  }
  const Where met = current->running->last_met;
  std::snprintf(to, n, "block (%u, %u, %u) thread %u, which last met others at %s:%u,", blockIdx.x,
                blockIdx.y, blockIdx.z, threadIdx.x, met.line() ? met.file_name() : "no line",
                met.line());
}

void fault(const char* what, Where at) {
  std::fprintf(stderr, "%s:%u: %s: block (%u, %u, %u) thread %u: %s\n", at.file_name(), at.line(),
               at.function_name(), blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, what);
  std::abort();
}

}  // namespace tandem::gpu::emulated
