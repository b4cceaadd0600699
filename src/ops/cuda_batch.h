// Copies what a step's kernels need of its batch to the GPU at once: tokens, positions, rows of the
// cache, pages. Everything has a fixed address in one buffer, so that a recorded graph finds the
// next step's batch at the same place.
#pragma once
#include <span>

#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/plain_attention.h"
#include "gpu_kernels/runtime.h"
#include "model/batch.h"

namespace tandem {

class CudaBatch {
 public:
  // For steps of up to max_tokens tokens, in sequences of up to max_pages pages.
  CudaBatch(int max_tokens, int max_pages);

  static int64_t bytes_for(int max_tokens, int max_pages) {
    return int64_t{max_tokens} * (max_pages + kLists) * int64_t{sizeof(int32_t)};
  }

  // Enqueues the copy. The batch may be destroyed once this returns.
  void upload(const Batch& batch, gpu::Stream& stream);

  // Address on the GPU of a span of the last uploaded batch, or of a part of one.
  const int32_t* on_gpu(std::span<const int32_t> of_batch) const;
  // Rows of the cache for the tokens of that batch or a part of it, [tokens].
  const int32_t* rows_of_cache(const Batch& part) const {
    return at(rows_of_cache_) + part.first_row();
  }
  gpu::CachePages pages() const;
  // Consecutive sequences of the batch, on the GPU.
  gpu::PagedSequences sequences(std::span<const Sequence> of_batch) const;

 private:
  static constexpr int kLists = 11;  // lists of max_tokens numbers, beside the pages
  // A list of numbers in the buffer.
  struct Place {
    int64_t first, size;
  };
  Place reserve(int64_t size);
  const int32_t* at(Place place) const { return on_gpu_.as<int32_t>() + place.first; }
  std::span<int32_t> on_host(Place place) const;
  void check_fits(const Batch& batch) const;

  const int max_tokens_, max_pages_;
  int64_t size_ = 0;
  Place tokens_, positions_, logit_rows_, hidden_rows_, sequence_of_, rows_of_cache_;
  Place places_;  // of the tokens in their sequences' pages
  Place first_token_, n_tokens_, kv_length_, pages_;
  gpu::Buffer pinned_, on_gpu_;
  gpu::Event copied_;
  Batch batch_;  // the last batch; its spans are compared, not read
};

}  // namespace tandem
