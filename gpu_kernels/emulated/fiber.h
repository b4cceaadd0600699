// Stacks that take turns on one CPU thread. The sanitizers are told of every switch;
// ThreadSanitizer is told that a switch orders no memory, so that it sees the GPU's threads as what
// they are.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tandem::gpu::emulated {

// A stack, where it was left, and what the sanitizers must know of it.
struct Context {
  void* stack_pointer = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* asan = nullptr;
  void* tsan = nullptr;
};

constexpr int kMaxThreads = 1024;  // of a block

// Room for the stacks of one block, each above a page that faults; pages become real when touched.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  // The stack of thread i, at whose first switch `main` begins; `main` never returns.
  Context make(int i, void (*main)());

 private:
  std::byte* memory_ = nullptr;
};

// The context of the caller, to switch back to.
Context this_context();
void destroy(Context& context);

void switch_to(Context& from, Context& to);
// The first statement on a new stack, and of each return to one.
void arrived(Context& here, Context* first_from);

bool under_thread_sanitizer();
// Order memory between fibers in the eyes of ThreadSanitizer.
void publish(void* mark);
void observe(void* mark);

}  // namespace tandem::gpu::emulated
