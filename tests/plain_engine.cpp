#include "tests/plain_engine.h"

#include <algorithm>

namespace tandem::test {

Engine plain_engine(StepRunner& model, KvCache& cache) {
  return {model,
          cache,
          {model.config().vocab, {}},
          int64_t{cache.n_pages()} * kPageSize,
          {.keeps_pages = false}};
}

void score(StepRunner& model, KvCache& cache, std::span<const int32_t> tokens, int64_t first_row,
           const std::function<void(int64_t i, std::span<const float> logits)>& row) {
  Engine engine = plain_engine(model, cache);
  tandem::score(engine, tokens, first_row, row);
}

std::vector<int32_t> generated_alone(StepRunner& model, KvCache& cache,
                                     const Vocabulary& vocabulary, const Request& request,
                                     int64_t context) {
  const int vocab = model.config().vocab;
  std::vector<int32_t> pages(cache.n_pages()), tokens = request.prompt;
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
  Sampler sampler(request.sampling, vocabulary, request.prompt);
  std::vector<float> logits(vocab);
  int n_done = 0;
  while (std::ssize(tokens) < context &&
         tokens.size() < request.prompt.size() + request.max_new_tokens) {
    const auto n_tokens = static_cast<int32_t>(tokens.size());
    const int32_t n = std::min(n_tokens - n_done, model.limits().max_tokens);
    std::vector<int32_t> positions(n);
    for (int32_t i = 0; i < n; ++i) positions[i] = n_done + i;
    const std::vector<int32_t> last = {n - 1};
    const Sequence sequence{0, n, n_done + n, pages};
    model.forward({std::span(tokens).subspan(n_done, n), positions, {&sequence, 1}, last}, cache,
                  {logits.data(), 1, vocab, vocab, DType::kF32});
    n_done += n;
    if (n_done == n_tokens)
      tokens.push_back(sampler.next(std::span(logits).first(vocabulary.size)).token);
  }
  return {tokens.begin() + std::ssize(request.prompt), tokens.end()};
}

}  // namespace tandem::test
