// Implements stream_flags.h: the stream's thread writes and polls.
#include "gpu_kernels/stream_flags.h"

#include <atomic>

#include "core/yield_core.h"
#include "gpu_kernels/emulated/emulator.h"
#include "gpu_kernels/emulated/loss.h"

namespace tandem::gpu {

std::string why_no_stream_flags() { return ""; }

void raise_flag(const Stream& stream, uint32_t* word) {
  const emulated::InDriver driver;
  emulated::enqueue(stream, [=] { std::atomic_ref(*word).store(1, std::memory_order_release); });
}

void take_flag(const Stream& stream, uint32_t* word) {
  const emulated::InDriver driver;
  emulated::enqueue(stream, [=] {
    const std::atomic_ref flag(*word);
    while (flag.load(std::memory_order_acquire) != 1 && !emulated::is_lost()) yield_core();
    flag.store(0, std::memory_order_release);
  });
}

}  // namespace tandem::gpu
