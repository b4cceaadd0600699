// The emulator must object to wrong kernels: each is run in a process of its own, which has to die
// in at least one order of the threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "device.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 64;

struct Args {
  int* out;  // [kThreads], to become 1
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
__global__ void lanes_missing_from_a_shuffle(Args a) {
  a.out[threadIdx.x] = 1;
  if (threadIdx.x % 2) a.out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 2);
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
__global__ void writes_past_the_buffer(Args a) { a.out[threadIdx.x + kThreads] = 1; }

void expect_ones(void (*kernel)(Args), int64_t shared_bytes) {
  Stream stream;
  const Buffer out = nans_on_gpu<int>(kThreads);
  const Buffer in = on_gpu(stream, std::vector<bf16>(128));
  launch(kernel, {.threads = kThreads, .shared_bytes = shared_bytes}, stream,
         {.out = out.as<int>(), .in = in.as<bf16>()});
  for (const int v : from_gpu<int>(stream, out)) check(v == 1, "result");
}

template <class Run>
bool dies(const char* order, Run run) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("TANDEM_GPU_ORDER", order, 1);
    std::freopen("/dev/null", "w", stderr);
    run();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

template <class Run>
bool found(Run run) {
  const bool forward = dies("forward", run), reverse = dies("reverse", run);
  return forward || reverse;
}

bool found_in(void (*kernel)(Args), int64_t shared_bytes = sizeof(Shared)) {
  return found([=] { expect_ones(kernel, shared_bytes); });
}

TEST(Emulator, AcceptsARightKernel) { EXPECT_FALSE(found_in(right)); }
TEST(Emulator, FindsMissingBarriers) {
  EXPECT_TRUE(found_in(reads_next_without_barrier));
  EXPECT_TRUE(found_in(reads_previous_without_barrier));
}
TEST(Emulator, FindsThreadsThatNeverMeet) {
  EXPECT_TRUE(found_in(two_different_barriers));
  EXPECT_TRUE(found_in(lanes_missing_from_a_shuffle));
  EXPECT_TRUE(found_in(barrier_that_some_never_reach));
}
TEST(Emulator, FindsUnfinishedCopies) { EXPECT_TRUE(found_in(reads_before_the_copy_is_done)); }
TEST(Emulator, FindsWrongAddresses) {
  EXPECT_TRUE(found_in(misaligned_ldmatrix));
  EXPECT_TRUE(found_in(copies_to_no_shared_memory));
  EXPECT_TRUE(found_in(writes_past_the_buffer));
}
TEST(Emulator, FindsTooLittleSharedMemory) { EXPECT_TRUE(found_in(right, 64)); }
TEST(Emulator, FindsAHostThatReadsDeviceMemory) {
  EXPECT_TRUE(found([] {
    const Buffer buffer(256, Site::kDevice);
    if (*buffer.as<volatile int>() == 0) std::puts("zero");
  }));
}

// What a recording may not contain, each beside what it may.
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

bool found_in_recording(void (*work)(Recording&)) {
  return found([=] {
    Recording r;
    const Graph graph = r.stream.capture([&] { work(r); });
    r.stream.replay(graph);
    r.stream.wait();
  });
}

TEST(Emulator, AcceptsARightRecording) {
  EXPECT_FALSE(found_in_recording([](Recording& r) {
    r.stream.copy(r.pinned.as<int>(), r.x.bytes(), r.x.as<int>());
    r.fork_to_side();
    r.join_side();
    r.stream.copy(r.x.as<int>(), r.x.bytes(), r.pinned.as<int>());
  }));
}
TEST(Emulator, FindsRecordedCopiesOfPageableMemory) {
  EXPECT_TRUE(found_in_recording(
      [](Recording& r) { r.stream.copy(r.pageable.data(), r.x.bytes(), r.x.as<int>()); }));
  EXPECT_TRUE(found_in_recording(
      [](Recording& r) { r.stream.copy(r.x.as<int>(), r.x.bytes(), r.pageable.data()); }));
  EXPECT_TRUE(found_in_recording([](Recording& r) {  // its second half is somebody else's
    r.stream.copy(r.pinned.as<int>() + kThreads / 2, r.x.bytes() + (1 << 12), r.x.as<int>());
  }));
}
TEST(Emulator, FindsWaitingInARecording) {
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.stream.wait(); }));
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.side.wait(); }));
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.fork.wait(); }));
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.stream.throw_if_failed(); }));
}
TEST(Emulator, FindsAllocationInARecording) {
  EXPECT_TRUE(found_in_recording([](Recording&) { const Buffer b(64, Site::kDevice); }));
  EXPECT_TRUE(found_in_recording([](Recording&) { const Buffer b(64, Site::kMapped); }));
}
TEST(Emulator, FindsAForkWithoutAJoin) {
  EXPECT_TRUE(found_in_recording([](Recording& r) { r.fork_to_side(); }));
  EXPECT_TRUE(found_in_recording([](Recording& r) {  // more work after the join
    r.fork_to_side();
    r.join_side();
    r.side.copy(r.x.as<int>(), r.x.bytes(), r.pinned.as<int>());
  }));
}
TEST(Emulator, FindsEventsFromOutsideARecording) {
  EXPECT_TRUE(found([] {
    Recording r;
    r.side.record(r.fork);
    r.stream.capture([&] { r.stream.wait_for(r.fork); });
  }));
  EXPECT_TRUE(found([] {
    Recording r;
    r.stream.capture([&] { r.stream.record(r.fork); });
    r.side.wait_for(r.fork);
  }));
}

}  // namespace
}  // namespace tandem::gpu
