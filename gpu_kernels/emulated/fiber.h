// Stacks that take turns on one CPU thread. Sanitizers are notified of every switch;
// ThreadSanitizer is told that a switch does not order memory, so that it treats the fibers as
// concurrent threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tandem::gpu::emulated {

// A stack, its saved stack pointer, and the sanitizers' state.
struct Context {
  void* stack_pointer = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* asan = nullptr;
  void* tsan = nullptr;
};

constexpr int kMaxThreads = 1024;  // per block

// The stacks of one block, each above a guard page; pages are allocated when touched.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  // The stack of thread i. The first switch to it calls `main`, which never returns.
  Context make(int i, void (*main)());

 private:
  std::byte* memory_ = nullptr;
};

// The context of the caller.
Context this_context();
void destroy(Context& context);

void switch_to(Context& from, Context& to);
// Must be the first statement on a new stack, and after each switch back to one.
void arrived(Context& here, Context* first_from);

bool under_thread_sanitizer();
// Tell ThreadSanitizer about memory order between fibers.
void publish(void* mark);
void observe(void* mark);

}  // namespace tandem::gpu::emulated
