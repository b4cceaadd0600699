#include "engine/step_message.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace tandem {
namespace {

// A message is a Header, the sizes of all items, and then their arrays.
struct Header {
  int32_t n_numbers;  // of the message
  StepOrder order;
  int32_t n_batches, n_logits, n_vocabulary, n_changes;  // items
};
struct BatchSizes {
  int32_t n_tokens, n_sequences, n_logit_rows, n_hidden_rows;
};
struct SequenceSizes {
  int32_t first_token, n_tokens, kv_length, n_pages;
};
struct LogitsSizes {
  int32_t n_copied, n_draws;
};
struct VocabularySizes {
  int32_t n_tokens, n_words;
};
struct ChangeSizes {
  int32_t layer, expert, n_ranks;
};

template <class T>
constexpr size_t kNumbers = sizeof(T) / sizeof(int32_t);

// Appends items of plain numbers.
template <class T>
void append(std::vector<int32_t>& to, std::span<const T> items) {
  static_assert(sizeof(T) % sizeof(int32_t) == 0);
  const size_t before = to.size();
  to.resize(before + items.size() * kNumbers<T>);
  if (!items.empty()) std::memcpy(to.data() + before, items.data(), items.size_bytes());
}

template <class T>
void append_one(std::vector<int32_t>& to, const T& item) {
  append(to, std::span(&item, 1));
}

// Takes what was appended, in the same order.
class Taker {
 public:
  explicit Taker(std::span<const int32_t> numbers) : left_(numbers) {}
  std::span<const int32_t> numbers(size_t n) {
    check(n <= left_.size(), "numbers of a message");
    const auto part = left_.first(n);
    left_ = left_.subspan(n);
    return part;
  }
  template <class T>
  T one() {
    std::array<int32_t, kNumbers<T>> item;
    std::ranges::copy(numbers(item.size()), item.begin());
    return std::bit_cast<T>(item);
  }

 private:
  std::span<const int32_t> left_;
};

// Part i of `all`, which begins at first[i] and ends where the next one begins.
template <class T>
std::span<const T> part_of(const std::vector<T>& all, const std::vector<size_t>& first, size_t i) {
  return std::span(all).subspan(first[i], first[i + 1] - first[i]);
}

}  // namespace

void write_message(const StepMessage& message, std::vector<int32_t>& numbers) {
  const auto& [order, batches, logits, vocabulary, changes] = message;
  const int32_t n_vocabulary = order.kind == StepOrder::Kind::kVocabulary;
  numbers.clear();
  append_one(numbers, Header{0, order, static_cast<int32_t>(batches.size()),
                             static_cast<int32_t>(logits.size()), n_vocabulary,
                             static_cast<int32_t>(changes.size())});
  for (const Batch& b : batches) {
    append_one(numbers, BatchSizes{b.n(), static_cast<int32_t>(b.sequences.size()),
                                   static_cast<int32_t>(b.logit_rows.size()),
                                   static_cast<int32_t>(b.hidden_rows.size())});
    for (const auto array : {b.tokens, b.positions, b.logit_rows, b.hidden_rows})
      append(numbers, array);
    for (const Sequence& s : b.sequences) {
      append_one(numbers, SequenceSizes{s.first_token, s.n_tokens, s.kv_length,
                                        static_cast<int32_t>(s.kv_pages.size())});
      append(numbers, s.kv_pages);
    }
  }
  for (const LogitsWanted& l : logits) {
    append_one(numbers, LogitsSizes{static_cast<int32_t>(l.copied.size()),
                                    static_cast<int32_t>(l.draws.size())});
    append(numbers, l.copied);
    append(numbers, l.draws);
  }
  if (n_vocabulary > 0) {
    append_one(numbers, VocabularySizes{vocabulary.n_tokens,
                                        static_cast<int32_t>(vocabulary.allowed.size())});
    append(numbers, vocabulary.allowed);
  }
  for (const ExpertChange& c : changes) {
    append_one(numbers, ChangeSizes{c.layer, c.expert, static_cast<int32_t>(c.ranks.size())});
    append(numbers, std::span<const int32_t>(c.ranks));
  }
  numbers[0] = static_cast<int32_t>(numbers.size());
}

StepMessage StepMessageReader::read(std::span<const int32_t> numbers) {
  Taker taker(numbers);
  const auto header = taker.one<Header>();
  StepMessage message{.order = header.order};
  batches_.resize(header.n_batches);
  sequences_.clear();
  std::vector<size_t> first_sequence;
  for (Batch& b : batches_) {
    const auto sizes = taker.one<BatchSizes>();
    b.tokens = taker.numbers(sizes.n_tokens);
    b.positions = taker.numbers(sizes.n_tokens);
    b.logit_rows = taker.numbers(sizes.n_logit_rows);
    b.hidden_rows = taker.numbers(sizes.n_hidden_rows);
    first_sequence.push_back(sequences_.size());
    for (int32_t i = 0; i < sizes.n_sequences; ++i) {
      const auto s = taker.one<SequenceSizes>();
      sequences_.push_back({s.first_token, s.n_tokens, s.kv_length, taker.numbers(s.n_pages)});
    }
  }
  first_sequence.push_back(sequences_.size());
  for (size_t i = 0; i < batches_.size(); ++i)
    batches_[i].sequences = part_of(sequences_, first_sequence, i);
  message.batches = batches_;

  logits_.resize(header.n_logits);
  draws_.clear();
  std::vector<size_t> first_draw;
  for (LogitsWanted& l : logits_) {
    const auto sizes = taker.one<LogitsSizes>();
    l.copied = taker.numbers(sizes.n_copied);
    first_draw.push_back(draws_.size());
    for (int32_t i = 0; i < sizes.n_draws; ++i) draws_.push_back(taker.one<Draw>());
  }
  first_draw.push_back(draws_.size());
  for (size_t i = 0; i < logits_.size(); ++i) logits_[i].draws = part_of(draws_, first_draw, i);
  message.logits = logits_;

  if (header.n_vocabulary > 0) {
    const auto sizes = taker.one<VocabularySizes>();
    const std::span<const int32_t> words = taker.numbers(sizes.n_words);
    message.vocabulary = {{reinterpret_cast<const uint32_t*>(words.data()), words.size()},
                          sizes.n_tokens};
  }

  changes_.resize(header.n_changes);
  for (ExpertChange& change : changes_) {
    const auto sizes = taker.one<ChangeSizes>();
    const std::span<const int32_t> ranks = taker.numbers(sizes.n_ranks);
    change = {sizes.layer, sizes.expert, {ranks.begin(), ranks.end()}};
  }
  message.changes = changes_;
  return message;
}

}  // namespace tandem
