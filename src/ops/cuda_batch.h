// What the kernels of a step need of its batch, brought to the card by one copy: tokens, positions,
// rows of the cache, pages. Everything has its place in one buffer, so that a recorded graph finds
// the next step's batch where it found this one's.
#pragma once
#include <span>

#include "gpu_kernels/attention.h"
#include "gpu_kernels/plain_attention.h"
#include "gpu_kernels/runtime.h"
#include "model/batch.h"

namespace tandem {

class CudaBatch {
 public:
  // Steps of up to max_tokens tokens, in sequences of up to max_pages pages.
  CudaBatch(int max_tokens, int max_pages);

  static int64_t bytes_for(int max_tokens, int max_pages) {
    return int64_t{max_tokens} * (max_pages + kLists) * int64_t{sizeof(int32_t)};
  }

  // Enqueues the copy. The batch may go once this has returned.
  void upload(const Batch& batch, gpu::Stream& stream);

  // The same numbers on the card as in a span of the batch that was uploaded last, or in part of
  // one.
  const int32_t* on_gpu(std::span<const int32_t> of_batch) const;
  // [tokens of that batch or of a part of it]
  const int32_t* rows_of_cache(const Batch& part) const {
    return at(rows_of_cache_) + part.first_row();
  }
  gpu::CachePages pages() const;
  // Consecutive sequences of the batch.
  gpu::PagedSequences sequences(std::span<const Sequence> of_batch) const;

 private:
  static constexpr int kLists = 9;  // of max_tokens numbers, beside the pages
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
  Place tokens_, positions_, logit_rows_, sequence_of_, rows_of_cache_;
  Place first_token_, n_tokens_, kv_length_, pages_;
  gpu::Buffer pinned_, on_gpu_;
  gpu::Event copied_;
  Batch batch_;  // spans of the last one, to be compared only
};

}  // namespace tandem
