// Where the operations of Ops run: memory, copies, order, and recorded steps. Everything that is
// enqueued runs in the order of the calls.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <span>

#include "core/memory.h"
#include "core/tensor.h"
#include "model/batch.h"

namespace tandem {

// How to draw the token of a row of logits. The numbers are those of SamplingParams in
// scheduling/sampler.h.
struct Draw {
  int32_t row;
  float temperature, top_p, min_p;
  int32_t top_k;
  double uniform;  // in [0, 1)
};

// Draws tokens in the memory of the device.
class DeviceSampler {
 public:
  virtual ~DeviceSampler() = default;
  // Draws a token for each of `how`, -1 where a logit of the row is not finite, and waits for them.
  // Overwrites the rows of `logits` [rows, vocab].
  virtual void draw(TensorView logits, std::span<const Draw> how, std::span<int32_t> tokens) = 0;
};

// What the operations of a decode step depend on, beside memory that lives as long as the device
// and the arrays that Ops::begin() uploads. Equal keys mean equal operations.
struct RecordKey {
  struct Part {  // a micro-batch
    int n_tokens = 0, n_sequences = 0;
    int longest = 0;                                // tokens of the sequence with the most
    auto operator<=>(const Part&) const = default;  // NOLINT(modernize-use-nullptr)
  };
  const void *activations, *cache;
  int first_layer, variant;  // of layers, and of their operations
  int n_logits;
  std::array<Part, kMaxMicroBatches> parts = {};
  int n_parts = 1;           // also where this rank has no tokens in them
  int n_tokens = 0;          // of the step, or of the replica with the most
  uint64_t of_replicas = 0;  // what all replicas compute, as a checksum; 0: there is one
  // The comparison of clang 14 uses a literal zero.
  auto operator<=>(const RecordKey&) const = default;  // NOLINT(modernize-use-nullptr)
};

class Device {
 public:
  virtual ~Device() = default;

  // Allocates memory for the matrices of operations, before the first step. Throws Error when too
  // little is left.
  virtual Buffer allocate(int64_t bytes) = 0;
  // Allocates host memory for copy(), before the first step; empty if the device works in host
  // memory. Throws Error when too little is left.
  virtual Buffer allocate_on_host(int64_t /*bytes*/) { return {}; }
  // Enqueues a copy within memory of allocate(), or between it and that of allocate_on_host().
  virtual void copy(const void* from, int64_t bytes, void* to) = 0;
  // Copies a matrix to the host and waits for it.
  virtual void to_host(TensorView x, TensorView out) = 0;
  // Returns when all enqueued work is done.
  virtual void wait() {}

  // Runs enqueue(), which calls the operations of a decode step, or replays what it enqueued when
  // it was called with this key before. While a replay runs, calls follow(), which does the host's
  // part of the step and enqueues nothing. Returns whether it had to record first.
  virtual bool run_recorded(const RecordKey&, const std::function<void()>& enqueue,
                            const std::function<void()>& /*follow*/) {
    enqueue();
    return false;
  }

  // A sampler for up to max_rows rows of n_tokens logits, which draws only tokens with a set bit in
  // `allowed`. Null: this device does not draw tokens.
  virtual std::unique_ptr<DeviceSampler> make_sampler(std::span<const uint32_t> /*allowed*/,
                                                      int /*n_tokens*/, int /*max_rows*/) {
    return nullptr;
  }
};

}  // namespace tandem
