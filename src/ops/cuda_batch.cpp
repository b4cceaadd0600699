#include "ops/cuda_batch.h"

#include <algorithm>
#include <functional>

#include "core/rounding.h"
#include "ops/ops.h"

namespace tandem {

CudaBatch::CudaBatch(int max_tokens, int max_pages)
    : max_tokens_(max_tokens),
      max_pages_(max_pages),
      tokens_(reserve(max_tokens)),
      positions_(reserve(max_tokens)),
      logit_rows_(reserve(max_tokens)),
      hidden_rows_(reserve(max_tokens)),
      sequence_of_(reserve(max_tokens)),
      rows_of_cache_(reserve(max_tokens)),
      places_(reserve(max_tokens)),
      first_token_(reserve(max_tokens)),
      n_tokens_(reserve(max_tokens)),
      kv_length_(reserve(max_tokens)),
      pages_(reserve(int64_t{max_tokens} * max_pages)),  // last: often only partly used
      pinned_(size_ * int64_t{sizeof(int32_t)}, gpu::Site::kMapped),
      on_gpu_(pinned_.bytes(), gpu::Site::kDevice) {}

CudaBatch::Place CudaBatch::reserve(int64_t size) {
  const Place place = {size_, size};
  size_ += (size + 3) / 4 * 4;  // aligned to 16 bytes
  return place;
}

std::span<int32_t> CudaBatch::on_host(Place place) const {
  return {pinned_.as<int32_t>() + place.first, static_cast<size_t>(place.size)};
}

void CudaBatch::upload(const Batch& batch, gpu::Stream& stream) {
  check_fits(batch);
  batch_ = batch;
  copied_.wait();  // the copy of the step before has finished long ago
  std::copy(batch.tokens.begin(), batch.tokens.end(), on_host(tokens_).begin());
  std::copy(batch.positions.begin(), batch.positions.end(), on_host(positions_).begin());
  std::copy(batch.logit_rows.begin(), batch.logit_rows.end(), on_host(logit_rows_).begin());
  std::copy(batch.hidden_rows.begin(), batch.hidden_rows.end(), on_host(hidden_rows_).begin());
  int32_t* pages = on_host(pages_).data();
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const Sequence& s = batch.sequences[i];
    const int n_pages = ceil_div(s.kv_length, kPageSize);
    on_host(first_token_)[i] = s.first_token;
    on_host(n_tokens_)[i] = s.n_tokens;
    on_host(kv_length_)[i] = s.kv_length;
    std::copy_n(s.kv_pages.begin(), n_pages, pages);
    pages += max_pages_;
    for (int t = s.first_token; t < s.first_token + s.n_tokens; ++t) {
      const int32_t place = s.kv_length - s.n_tokens + t - s.first_token;
      on_host(sequence_of_)[t] = static_cast<int32_t>(i);
      on_host(places_)[t] = place;
      on_host(rows_of_cache_)[t] = s.kv_pages[place / kPageSize] * kPageSize + place % kPageSize;
    }
  }
  const int64_t used = pages - pinned_.as<int32_t>();
  stream.copy(pinned_.as<int32_t>(), used * int64_t{sizeof(int32_t)}, on_gpu_.as<int32_t>());
  stream.record(copied_);
}

void CudaBatch::check_fits(const Batch& batch) const {
  check(batch.n() <= max_tokens_ && std::ssize(batch.logit_rows) <= max_tokens_ &&
            std::ssize(batch.hidden_rows) <= max_tokens_ &&
            std::ssize(batch.sequences) <= max_tokens_,
        "a step has at most max_tokens tokens");
  for (const Sequence& s : batch.sequences)
    check(s.kv_length <= int64_t{max_pages_} * kPageSize, "a sequence is within the context");
}

const int32_t* CudaBatch::on_gpu(std::span<const int32_t> of_batch) const {
  const auto within = [&](std::span<const int32_t> list) {
    return std::less_equal<>()(list.data(), of_batch.data()) &&
           std::less<>()(of_batch.data(), list.data() + list.size());
  };
  if (within(batch_.positions)) return at(positions_) + (of_batch.data() - batch_.positions.data());
  if (within(batch_.tokens)) return at(tokens_) + (of_batch.data() - batch_.tokens.data());
  if (within(batch_.hidden_rows))
    return at(hidden_rows_) + (of_batch.data() - batch_.hidden_rows.data());
  check(within(batch_.logit_rows), "only lists of the step's batch are on the GPU");
  return at(logit_rows_) + (of_batch.data() - batch_.logit_rows.data());
}

gpu::PagedSequences CudaBatch::sequences(std::span<const Sequence> of_batch) const {
  const int64_t first = of_batch.data() - batch_.sequences.data();
  check(first >= 0 && first + std::ssize(of_batch) <= std::ssize(batch_.sequences),
        "sequences are those of the step's batch");
  int max_tokens = 0;
  for (const Sequence& s : of_batch) max_tokens = std::max(max_tokens, s.n_tokens);
  return {.first_token = at(first_token_) + first,
          .n_tokens = at(n_tokens_) + first,
          .kv_length = at(kv_length_) + first,
          .pages = at(pages_) + first * max_pages_,
          .n = static_cast<int>(of_batch.size()),
          .max_pages = max_pages_,
          .max_tokens = max_tokens};
}

gpu::CachePages CudaBatch::pages() const {
  return {.sequence_of = at(sequence_of_),
          .places = at(places_),
          .pages = at(pages_),
          .pages_stride = max_pages_,
          .page_size = kPageSize};
}

}  // namespace tandem
