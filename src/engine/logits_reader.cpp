#include "engine/logits_reader.h"

#include <algorithm>

namespace tandem {

LogitsReader::LogitsReader(Device& device, const DrawnVocabulary& vocabulary, int max_rows)
    : device_(device),
      allowed_(vocabulary.allowed.begin(), vocabulary.allowed.end()),
      n_tokens_(vocabulary.n_tokens),
      sampler_(device.make_sampler(vocabulary.allowed, vocabulary.n_tokens, max_rows)) {}

bool LogitsReader::draws_from(const DrawnVocabulary& vocabulary) const {
  return n_tokens_ == vocabulary.n_tokens && std::ranges::equal(allowed_, vocabulary.allowed);
}

// Adjacent rows are copied together.
void LogitsReader::read(TensorView logits, const LogitsWanted& wanted, std::span<int32_t> tokens,
                        TensorView rows) {
  const auto& [copied, draws] = wanted;
  for (size_t first = 0, end = 0; first < copied.size(); first = end) {
    while (end < copied.size() && copied[end] - copied[first] == static_cast<int32_t>(end - first))
      ++end;
    const auto n = static_cast<int64_t>(end - first);
    device_.to_host(logits.rows_from(copied[first], n),
                    rows.rows_from(static_cast<int64_t>(first), n));
  }
  if (!draws.empty()) sampler_->draw(logits, draws, tokens);
}

}  // namespace tandem
