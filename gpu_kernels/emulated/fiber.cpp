// Compiled without -fsanitize=thread, like emulator.cpp.
#include "gpu_kernels/emulated/fiber.h"

#include <sys/mman.h>

#include "core/check.h"

// Saves the callee-saved registers on the current stack and continues on another one. Ends with a
// jump, because a return would always be mispredicted.
extern "C" void tandem_switch_stack(void** save, void* load);
asm(R"(
  .text
  .globl tandem_switch_stack
  .type tandem_switch_stack, @function
tandem_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
  .size tandem_switch_stack, . - tandem_switch_stack
)");

// Defined only in sanitized programs.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* saved, const void** bottom, size_t* size);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* address, size_t size);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
}

namespace tandem::gpu::emulated {
namespace {

constexpr size_t kPage = 4096, kStackBytes = 256 * 1024, kSlot = kPage + kStackBytes;

}  // namespace

bool under_thread_sanitizer() { return __tsan_acquire != nullptr; }

void publish(void* mark) {
  if (__tsan_release) __tsan_release(mark);
}

void observe(void* mark) {
  if (__tsan_acquire) __tsan_acquire(mark);
}

Stacks::~Stacks() {
  if (!memory_) return;
  // Fibers never return from their functions; the next mapping here must not inherit poisoned
  // regions.
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(memory_, kSlot * kMaxThreads);
  munmap(memory_, kSlot * kMaxThreads);
}

Context Stacks::make(int i, void (*main)()) {
  if (!memory_) {
    void* p = mmap(nullptr, kSlot * kMaxThreads, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(p != MAP_FAILED, "stacks of emulated threads");
    memory_ = static_cast<std::byte*>(p);
  }
  std::byte* slot = memory_ + static_cast<size_t>(i) * kSlot;
  mprotect(slot, kPage, PROT_NONE);
  // The layout that tandem_switch_stack expects: six registers, the entry point, a return address
  // for the ABI. Stack tops are staggered, since equal page offsets would share cache sets.
  void** top = reinterpret_cast<void**>(slot + kSlot - static_cast<size_t>(i) % 32 * 128);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(main);
  return {.stack_pointer = top - 6,
          .bottom = slot + kPage,
          .bytes = kStackBytes,
          .tsan = __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr};
}

Context this_context() {
  return {.tsan = __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr};
}

void destroy(Context& context) {
  if (__tsan_destroy_fiber) __tsan_destroy_fiber(context.tsan);
}

void switch_to(Context& from, Context& to) {
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(&from.asan, to.bottom, to.bytes);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan, 1);  // 1: orders no memory
  tandem_switch_stack(&from.stack_pointer, to.stack_pointer);
  arrived(from, &to);
}

void arrived(Context& here, Context* from) {
  if (!__sanitizer_finish_switch_fiber) return;
  if (from->bottom) return __sanitizer_finish_switch_fiber(here.asan, nullptr, nullptr);
  __sanitizer_finish_switch_fiber(here.asan, &from->bottom, &from->bytes);
}

}  // namespace tandem::gpu::emulated
