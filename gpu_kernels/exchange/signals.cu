// Kernels of one thread, which any stream and graph accepts (docs/hybrid.md compares them with the
// driver's operations of stream_flags.h). A poll is one read over the link, about a microsecond.
#include <atomic>
#include <thread>

#include "clock.h"
#include "device.h"
#include "gpu_kernels/exchange/signal_steps.h"
#include "gpu_kernels/exchange/signals.h"

namespace tandem::gpu {
namespace {

__global__ void raise_kernel(const __grid_constant__ SignalWords signal) { raise(signal); }

__global__ void await_kernel(const __grid_constant__ SignalWords signal) {
  await_raise(signal);
  count_await(signal);
}

struct ProbeArgs {
  uint32_t *raised, *seen;  // mapped
  uint64_t patience_nanoseconds;
};

__global__ void probe_kernel(const __grid_constant__ ProbeArgs a) {
  const uint64_t end = nanoseconds() + a.patience_nanoseconds;
  while (load_acquire(a.raised) == 0)
    if (nanoseconds() > end) return;
  store_release(a.seen, 1);
}

}  // namespace

void SignalToHost::raise(const Stream& stream) {
  launch(raise_kernel, {.threads = 1}, stream, words());
}

bool SignalToHost::take() {
  const std::atomic_ref<uint32_t> raised(*words().word);
  if (raised.load(std::memory_order_acquire) == n_taken_) return false;
  ++n_taken_;
  return true;
}

void SignalToHost::await(const Stream& stream) {
  constexpr int kPollsBetweenChecks = 1 << 8;
  for (int polls = 1; !take(); ++polls) {
    std::this_thread::yield();
    if (polls % kPollsBetweenChecks == 0) stream.throw_if_failed();
  }
}

void SignalToStream::raise() {
  const std::atomic_ref<uint32_t> raised(*words().word);
  raised.store(++n_raised_, std::memory_order_release);
}

void SignalToStream::await(const Stream& stream) {
  launch(await_kernel, {.threads = 1}, stream, words());
}

// The host raises right after the launch. If launches block, the launch returns only after the
// probe kernel has timed out.
std::string why_no_hand_off(Stream& stream) {
  constexpr uint64_t kPatience = 2'000'000'000;
  const Buffer words(2 * sizeof(uint32_t), Site::kMapped);
  const std::atomic_ref<uint32_t> raised(words.as<uint32_t>()[0]), seen(words.as<uint32_t>()[1]);
  raised = 0;
  seen = 0;
  launch(probe_kernel, {.threads = 1}, stream,
         {words.as<uint32_t>(), words.as<uint32_t>() + 1, kPatience});
  raised.store(1, std::memory_order_release);
  stream.wait();
  if (seen == 1) return "";
  return "kernel launches block until the kernel has ended (CUDA_LAUNCH_BLOCKING, or a tool that "
         "runs one at a time), so a GPU that shares a model with the CPU would wait forever: unset "
         "CUDA_LAUNCH_BLOCKING, run without the tool, or use --device cpu";
}

}  // namespace tandem::gpu
