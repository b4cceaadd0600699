#include "engine/score.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tandem {

void score(DeepSeek& model, KvCache& cache, std::span<const int32_t> tokens, int64_t first_row,
           const std::function<void(int64_t, std::span<const float>)>& row) {
  const auto n = static_cast<int64_t>(tokens.size());
  const int vocab = model.config().vocab;
  require(n > 0, "no tokens were given: give at least one");
  require(pages_for(n) <= cache.n_free_pages(), "{} tokens do not fit the cache of {}: raise --ctx",
          n, int64_t{cache.n_free_pages()} * kPageSize);
  for (const int32_t token : tokens)
    require(token >= 0 && token < vocab, "token {} is not in the model's vocabulary of {}", token,
            vocab);

  const int64_t max_logits = model.limits().max_logits;
  Arena arena(Arena::padded_bytes(max_logits * vocab * size_of(DType::kF32)));
  const TensorView logits = arena.matrix(max_logits, vocab, DType::kF32);
  std::vector<int32_t> pages, positions, rows;
  for (int i = 0; i < pages_for(n); ++i) pages.push_back(cache.take_page());

  for (int64_t done = 0; done < n;) {
    const bool wants_logits = done >= first_row;
    const int64_t room =
        std::min<int64_t>(model.limits().max_tokens, wants_logits ? max_logits : first_row - done);
    const auto count = static_cast<int32_t>(std::min(room, n - done));
    positions.resize(count);
    std::iota(positions.begin(), positions.end(), static_cast<int32_t>(done));
    rows.resize(wants_logits ? count : 0);
    std::iota(rows.begin(), rows.end(), 0);
    const Sequence sequence{0, count, static_cast<int32_t>(done) + count, pages};
    model.forward({tokens.subspan(done, count), positions, {&sequence, 1}, rows}, cache, logits);
    for (const int32_t r : rows) row(done + r, {logits.row<float>(r), static_cast<size_t>(vocab)});
    done += count;
  }
  cache.give_back(pages);
}

}  // namespace tandem
