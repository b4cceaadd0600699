// A forward pass as a coroutine, which suspends where its device would wait for another device and
// could compute something else meanwhile. The StepRunner resumes it.
#pragma once
#include <coroutine>
#include <cstddef>
#include <utility>

#include "core/check.h"
#include "core/rounding.h"

namespace tandem {

// Memory for the coroutines of a step, which allocate nothing else. Cleared before each step.
class PassMemory {
 public:
  void clear() { used_ = 0; }
  void* take(std::size_t bytes) {
    void* const memory = bytes_ + used_;
    used_ += round_up(bytes, kAlignment);
    check(used_ <= sizeof bytes_, "the coroutines of a step fit their memory");
    return memory;
  }

 private:
  static constexpr std::size_t kAlignment = alignof(std::max_align_t);
  alignas(kAlignment) std::byte bytes_[16384];
  std::size_t used_ = 0;
};

class Pass {
 public:
  // Matches a coroutine Pass Model::layers(range, step, cache, memory), and one without a cache.
  struct promise_type {
    template <class Model, class Range, class Step, class Cache>
    static void* operator new(std::size_t bytes, Model&, Range&, Step&, Cache&,
                              PassMemory& memory) {
      return memory.take(bytes);
    }
    template <class Model, class Range, class Step>
    static void* operator new(std::size_t bytes, Model&, Range&, Step&, PassMemory& memory) {
      return memory.take(bytes);
    }
    static void operator delete(void*, std::size_t) {}
    Pass get_return_object() {
      return Pass(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { throw; }  // leaves through resume()
  };

  Pass(Pass&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Pass& operator=(Pass&&) = delete;
  ~Pass() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return handle_.done(); }
  void resume() { handle_.resume(); }

 private:
  explicit Pass(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

// `co_await kOtherPass`: what follows waits for another device, so another pass may run now.
inline constexpr std::suspend_always kOtherPass;

}  // namespace tandem
