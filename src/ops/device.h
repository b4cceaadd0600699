// Where the verbs of Ops run: memory, copies, order, and recorded steps. Everything that is
// enqueued runs in the order of the calls.
#pragma once
#include <functional>
#include <memory>
#include <span>

#include "core/memory.h"
#include "core/tensor.h"

namespace tandem {

// How the token of a row of logits is drawn; engine/sampler.h says what each number means.
struct Draw {
  int32_t row;
  float temperature, top_p, min_p;
  int32_t top_k;
  double uniform;  // in [0, 1)
};

// Draws tokens where the logits are.
class DeviceSampler {
 public:
  virtual ~DeviceSampler() = default;
  // Draws a token for each, -1 where a logit of the row is not finite, and waits for them. Consumes
  // the rows of `logits` [rows, vocab].
  virtual void draw(TensorView logits, std::span<const Draw> how, std::span<int32_t> tokens) = 0;
};

// What the verbs of a decode step depend on, beside the memory that they name, which lives as long
// as the device, and the arrays that Ops::begin() uploads. Equal
// keys, equal verbs.
struct RecordKey {
  const void *activations, *cache;
  int n_tokens, n_logits;
  int n_first;  // tokens of the first micro-batch
  // clang 14 compares with a zero of its own.
  auto operator<=>(const RecordKey&) const = default;  // NOLINT(modernize-use-nullptr)
};

class Device {
 public:
  virtual ~Device() = default;

  // Memory for the matrices of the verbs, before the first step. Throws Error when too little is
  // left.
  virtual Buffer allocate(int64_t bytes) = 0;
  // Memory of the host for copy(), before the first step; empty where the device works in the
  // host's memory anyway. Throws Error when too little is left.
  virtual Buffer allocate_on_host(int64_t /*bytes*/) { return {}; }
  // Enqueues a copy within memory of allocate(), or between it and that of allocate_on_host().
  virtual void copy(const void* from, int64_t bytes, void* to) = 0;
  // Copies a matrix to the host and waits for it.
  virtual void to_host(TensorView x, TensorView out) = 0;
  // Returns when all that was enqueued is done.
  virtual void wait() {}

  // Runs enqueue(), which calls the verbs of a decode step, or replays what it enqueued when it was
  // called with this key before. True: a recording runs now, and nothing but the device follows it.
  virtual bool run_recorded(const RecordKey&, const std::function<void()>& enqueue) {
    enqueue();
    return false;
  }

  // For up to max_rows rows of logits of n_tokens tokens; those whose bit in `allowed` is set may
  // be drawn. Null: this device does not draw.
  virtual std::unique_ptr<DeviceSampler> make_sampler(std::span<const uint32_t> /*allowed*/,
                                                      int /*n_tokens*/, int /*max_rows*/) {
    return nullptr;
  }
};

}  // namespace tandem
