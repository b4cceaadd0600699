// The emulator must reject wrong kernels and name the place. Each kernel runs in a process of its
// own, which must abort with the right message in at least one order of the threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <limits>
#include <regex>
#include <string>

#include "device.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 64;

struct Args {
  int* out;  // [kThreads]; a correct kernel writes 1
  const bf16* in;
};

struct Shared {
  alignas(16) bf16 rows[kThreads][8];
  int slot[kThreads];
};

__global__ void right(Args a) {
  Shared& s = shared_memory<Shared>();
  s.slot[threadIdx.x] = 1;
  __syncthreads();
  a.out[threadIdx.x] = s.slot[kThreads - 1 - threadIdx.x];
}
__global__ void reads_next_without_barrier(Args a) {
  Shared& s = shared_memory<Shared>();
  s.slot[threadIdx.x] = 1;
  a.out[threadIdx.x] = s.slot[min(threadIdx.x + 1, kThreads - 1)];
}
__global__ void reads_previous_without_barrier(Args a) {
  Shared& s = shared_memory<Shared>();
  s.slot[threadIdx.x] = 1;
  a.out[threadIdx.x] = s.slot[max(threadIdx.x, 1) - 1];
}
__global__ void two_different_barriers(Args a) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  a.out[threadIdx.x] = 1;
}
constexpr int kShuffleLine = __LINE__ + 3;
__global__ void lanes_missing_from_a_shuffle(Args a) {
  a.out[threadIdx.x] = 1;
  if (threadIdx.x % 2) a.out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 2);
}
__global__ void lanes_at_two_shuffles(Args a) {
  if (threadIdx.x % 2)
    a.out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 2);
  else
    a.out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 2);
}
__global__ void barrier_that_some_never_reach(Args a) {
  a.out[threadIdx.x] = 1;
  if (threadIdx.x < 32)
    __syncthreads();
  else
    a.out[threadIdx.x] = __shfl_sync(~0u, 1, threadIdx.x == 40 ? (__syncthreads(), 0) : 0);
}
__global__ void reads_before_the_copy_is_done(Args a) {
  Shared& s = shared_memory<Shared>();
  cp_async_16(s.rows[threadIdx.x], a.in, true);
  cp_async_commit();
  a.out[threadIdx.x] = to_float(s.rows[threadIdx.x][0]) == 0;
}
constexpr int kMisalignedLine = __LINE__ + 4;
__global__ void misaligned_ldmatrix(Args a) {
  Shared& s = shared_memory<Shared>();
  uint32_t v[4];
  ldmatrix_x4(v, &s.rows[threadIdx.x % 32][1]);
  a.out[threadIdx.x] = static_cast<int>(v[0] | 1);
}
__global__ void copies_to_no_shared_memory(Args a) {
  cp_async_16(a.out, a.in, true);
  a.out[threadIdx.x] = 1;
}
constexpr int kOddPairLine = __LINE__ + 2;
__global__ void reads_a_pair_at_an_odd_number(Args a) {
  const float2 v = *reinterpret_cast<const float2*>(a.in + 2);
  a.out[threadIdx.x] = v.x == v.x;
}
__global__ void writes_past_the_buffer(Args a) { a.out[threadIdx.x + kThreads] = 1; }

void expect_ones(void (*kernel)(Args), int64_t shared_bytes) {
  Stream stream;
  const Buffer out = nans_on_gpu<int>(kThreads);
  const Buffer in = on_gpu(stream, std::vector<bf16>(128));
  launch(kernel, {.threads = kThreads, .shared_bytes = shared_bytes}, stream,
         {.out = out.as<int>(), .in = in.as<bf16>()});
  for (const int v : from_gpu<int>(stream, out)) check(v == 1, "result");
}

// Runs `run` in a child process. Returns its message on standard error if it aborts, else nothing.
template <class Run>
std::string last_words(const char* order, Run run) {
  std::array<int, 2> ends = {};
  check(pipe(ends.data()) == 0, "a pipe");
  const pid_t child = fork();
  if (child == 0) {
    setenv("TANDEM_GPU_ORDER", order, 1);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    run();
    _exit(0);
  }
  close(ends[1]);
  std::string words;
  std::array<char, 4096> some = {};
  for (ssize_t n; (n = read(ends[0], some.data(), some.size())) > 0;) words.append(some.data(), n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (status == 0) return {};
  return words.empty() ? "not a word" : words;
}

// The process must abort in some order, and every abort must have this message or a sanitizer's.
template <class Run>
testing::AssertionResult found(Run run, const std::string& pattern) {
  const std::regex expected(pattern + "|Sanitizer: ");
  int n_deaths = 0;
  for (const char* order : {"forward", "reverse"}) {
    const std::string words = last_words(order, run);
    if (words.empty()) continue;
    ++n_deaths;
    if (!std::regex_search(words, expected))
      return testing::AssertionFailure()
             << "\"" << words << "\" does not say \"" << pattern << "\"";
  }
  if (n_deaths > 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "it lives";
}

testing::AssertionResult found_in(void (*kernel)(Args), const std::string& pattern,
                                  int64_t shared_bytes = sizeof(Shared)) {
  return found([=] { expect_ones(kernel, shared_bytes); }, pattern);
}

template <class Run>
testing::AssertionResult accepted(Run run) {
  for (const char* order : {"forward", "reverse"}) {
    const std::string words = last_words(order, run);
    if (!words.empty()) return testing::AssertionFailure() << words;
  }
  return testing::AssertionSuccess();
}

// The message for a fault in a kernel of this file: line, name, block and thread.
std::string fault_in(const char* kernel, const std::string& what, int line = 0) {
  return "gpu_emulator_test.cu:" + (line > 0 ? std::to_string(line) : "[0-9]+") +
         ": .*::" + kernel + "\\(Args\\): block \\(0, 0, 0\\) thread [0-9]+: " + what;
}
const std::string kWrongResult = "check failed: result";

TEST(Emulator, AcceptsARightKernel) {
  EXPECT_TRUE(accepted([] { expect_ones(right, sizeof(Shared)); }));
}
TEST(Emulator, FindsMissingBarriers) {
  EXPECT_TRUE(found_in(reads_next_without_barrier, kWrongResult));
  EXPECT_TRUE(found_in(reads_previous_without_barrier, kWrongResult));
}
TEST(Emulator, FindsThreadsThatNeverMeet) {
  EXPECT_TRUE(found_in(two_different_barriers,
                       fault_in("two_different_barriers",
                                "threads of one block meet at different __syncthreads\\(\\)")));
  EXPECT_TRUE(found_in(lanes_missing_from_a_shuffle,
                       "deadlock in block \\(0, 0, 0\\):\n"
                       "  warp 0: lanes aaaaaaaa of ffffffff meet at .*gpu_emulator_test.cu:" +
                           std::to_string(kShuffleLine)));
  EXPECT_TRUE(found_in(
      lanes_at_two_shuffles,
      fault_in("lanes_at_two_shuffles", "lanes of one warp meet at different collectives")));
  EXPECT_TRUE(found_in(barrier_that_some_never_reach,
                       fault_in("barrier_that_some_never_reach",
                                "threads of one block meet at different __syncthreads\\(\\)")));
}
TEST(Emulator, FindsUnfinishedCopies) {
  EXPECT_TRUE(found_in(reads_before_the_copy_is_done, kWrongResult));
}
TEST(Emulator, FindsWrongAddresses) {
  EXPECT_TRUE(
      found_in(misaligned_ldmatrix,
               fault_in("misaligned_ldmatrix", "shared address misaligned", kMisalignedLine)));
  EXPECT_TRUE(
      found_in(copies_to_no_shared_memory,
               fault_in("copies_to_no_shared_memory", "address outside shared_memory\\(\\)")));
  EXPECT_TRUE(found_in(reads_a_pair_at_an_odd_number,
                       "gpu_emulator_test.cu:" + std::to_string(kOddPairLine) +
                           ":[0-9]+: runtime error: .*misaligned address"));
  EXPECT_TRUE(found_in(writes_past_the_buffer,
                       "block \\(0, 0, 0\\) thread [0-9]+, which last met others at no line:0, "
                       "touches memory behind a buffer, at 0x[0-9a-f]+: addr2line -fe "));
}
TEST(Emulator, FindsTooLittleSharedMemory) {
  EXPECT_TRUE(found_in(right, fault_in("right", "launched with less shared memory"), 64));
}

// A kernel that is launched by this file, in grids of which two blocks run.
__global__ void nothing(Args) {}
void launch_nothing(const LaunchShape& shape) {
  setenv("TANDEM_GPU_BLOCKS", "1", 1);
  Stream stream;
  launch(nothing, shape, stream, {});
  stream.wait();
}
TEST(Emulator, FindsShapesThatCudaRefuses) {
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  const auto refused = [](const LaunchShape& shape, const std::string& what) {
    return found([=] { launch_nothing(shape); },
                 "gpu_emulator_test.cu:[0-9]+: launch_nothing: check failed: " + what);
  };
  const std::string limits = " blocks: CUDA takes 1 to 2147483647 x 65535 x 65535";
  EXPECT_TRUE(
      accepted([] { launch_nothing({.grid_x = kMaxInt, .grid_y = 65535, .threads = 1024}); }));
  EXPECT_TRUE(accepted([] { launch_nothing({.grid_z = 65535, .shared_bytes = 99 << 10}); }));
  EXPECT_TRUE(refused({.grid_x = 0}, "a grid of 0 x 1 x 1" + limits));
  EXPECT_TRUE(refused({.grid_y = 65536}, "a grid of 1 x 65536 x 1" + limits));
  EXPECT_TRUE(refused({.grid_z = 65536}, "a grid of 1 x 1 x 65536" + limits));
  EXPECT_TRUE(refused({.grid_z = -1}, "a grid of 1 x 1 x -1" + limits));
  EXPECT_TRUE(refused({.threads = 1025}, "a block of 1025 threads"));
  EXPECT_TRUE(refused({.threads = 0}, "a block of 0 threads"));
  EXPECT_TRUE(refused({.shared_bytes = (99 << 10) + 1}, "101377 bytes of shared memory"));
}

TEST(Emulator, FindsAHostThatReadsDeviceMemory) {
  EXPECT_TRUE(found(
      [] {
        const Buffer buffer(256, Site::kDevice);
        if (*buffer.as<volatile int>() == 0) std::puts("zero");
      },
      "the host touches device memory while no stream works"));
}

// The state of tests that record forbidden and allowed operations.
struct Recording {
  Stream stream, side;
  Event fork, join;
  const Buffer x = nans_on_gpu<int>(kThreads), pinned{kThreads * sizeof(int), Site::kMapped};
  std::vector<int> pageable = std::vector<int>(kThreads);

  void fork_to_side() {
    stream.record(fork);
    side.wait_for(fork);
    side.copy(pinned.as<int>(), x.bytes(), x.as<int>());
  }
  void join_side() {
    side.record(join);
    stream.wait_for(join);
  }
};

void record_and_replay(void (*work)(Recording&)) {
  Recording r;
  const Graph graph = r.stream.capture([&] { work(r); });
  r.stream.replay(graph);
  r.stream.wait();
}

testing::AssertionResult found_in_recording(void (*work)(Recording&), const std::string& what) {
  return found([=] { record_and_replay(work); }, "runtime.cpp:[0-9]+: .*check failed: " + what);
}

TEST(Emulator, AcceptsARightRecording) {
  EXPECT_TRUE(accepted([] {
    record_and_replay([](Recording& r) {
      r.stream.copy(r.pinned.as<int>(), r.x.bytes(), r.x.as<int>());
      r.fork_to_side();
      r.join_side();
      r.stream.copy(r.x.as<int>(), r.x.bytes(), r.pinned.as<int>());
    });
  }));
}
TEST(Emulator, FindsRecordedCopiesOfPageableMemory) {
  const std::string pageable = "a recorded copy is between device and mapped memory";
  EXPECT_TRUE(found_in_recording(
      [](Recording& r) { r.stream.copy(r.pageable.data(), r.x.bytes(), r.x.as<int>()); },
      pageable));
  EXPECT_TRUE(found_in_recording(
      [](Recording& r) { r.stream.copy(r.x.as<int>(), r.x.bytes(), r.pageable.data()); },
      pageable));
  EXPECT_TRUE(found_in_recording(
      [](Recording& r) {  // the second half of the copy is outside of the buffer
        r.stream.copy(r.pinned.as<int>() + kThreads / 2, r.x.bytes() + (1 << 12), r.x.as<int>());
      },
      pageable));
}
TEST(Emulator, FindsWaitingInARecording) {
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.stream.wait(); },
                                 "a stream is waited for in a recording"));
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.side.wait(); },
                                 "a stream is waited for in a recording"));
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.fork.wait(); },
                                 "an event is waited for in a recording"));
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.stream.throw_if_failed(); },
                                 "a stream is asked in a recording"));
}
TEST(Emulator, FindsAllocationInARecording) {
  EXPECT_TRUE(found_in_recording([](Recording&) { const Buffer b(64, Site::kDevice); },
                                 "memory is allocated in a recording"));
  EXPECT_TRUE(found_in_recording([](Recording&) { const Buffer b(64, Site::kMapped); },
                                 "memory is allocated in a recording"));
}
TEST(Emulator, FindsAForkWithoutAJoin) {
  constexpr char kLeft[] =
      "a stream that joined a recording has work that the recording does not wait for";
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.fork_to_side(); }, kLeft));
  EXPECT_TRUE(found_in_recording(
      [](Recording& r) {  // more work after the join
        r.fork_to_side();
        r.join_side();
        r.side.copy(r.x.as<int>(), r.x.bytes(), r.pinned.as<int>());
      },
      kLeft));
}
TEST(Emulator, FindsEventsFromOutsideARecording) {
  EXPECT_TRUE(found(
      [] {
        Recording r;
        r.side.record(r.fork);
        r.stream.capture([&] { r.stream.wait_for(r.fork); });
      },
      "a recording waits for an event from outside of it"));
  EXPECT_TRUE(found(
      [] {
        Recording r;
        r.stream.capture([&] { r.stream.record(r.fork); });
        r.side.wait_for(r.fork);
      },
      "a stream records into one graph at a time"));
}

}  // namespace
}  // namespace tandem::gpu
