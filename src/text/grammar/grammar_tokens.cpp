#include "text/grammar/grammar_tokens.h"

#include <algorithm>

namespace tandem {

namespace {

// Calls found(trie node, state) for every trie node below `root` that a text in `state` may reach.
template <class Found>
void walk(const TokenTrie& trie, int32_t root, TextStates& states, TextStates::State state,
          Found found) {
  const int base = trie.node(root).depth;
  std::vector<TextStates::State> path = {state};  // [depth - base]
  const int32_t end = trie.node(root).end;
  for (int32_t i = root + 1; i < end;) {
    const TokenTrie::Node& node = trie.node(i);
    const size_t depth = node.depth - base;
    const TextStates::State next = states.after(path[depth - 1], node.byte);
    if (next == TextStates::kDead) {
      i = node.end;
      continue;
    }
    path.resize(depth);
    path.push_back(next);
    found(i, next);
    ++i;
  }
}

void set_bit(std::span<uint64_t> bits, int32_t id) { bits[id / 64] |= uint64_t{1} << id % 64; }

}  // namespace

GrammarTokens::GrammarTokens(Grammar grammar, const TokenTrie& trie,
                             std::shared_ptr<const GrammarTokens> base)
    : grammar_(std::move(grammar)),
      trie_(trie),
      base_(std::move(base)),
      cache_(grammar_.n_nodes()) {}

void GrammarTokens::add_allowed(TextStates& states, TextStates::State state,
                                std::span<uint64_t> bits) const {
  const std::vector<TextStates::Frame> frames = states.frames(state);
  for (const TextStates::Frame& frame : frames) {
    for (const Grammar::TokenEdge& edge : grammar_.token_edges(frame.node)) set_bit(bits, edge.id);
    const NodeTokens& tokens = tokens_at(frame.node);
    for (const int32_t id : tokens.ids) set_bit(bits, id);
    for (size_t i = 0; i < tokens.bits.size(); ++i) bits[i] |= tokens.bits[i];
    if (tokens.exits.empty()) continue;
    const TextStates::State back = states.after_return(frame.callers);
    for (const int32_t exit : tokens.exits)
      walk(trie_, exit, states, back, [&](int32_t i, TextStates::State) {
        for (const int32_t id : trie_.tokens(i)) set_bit(bits, id);
      });
  }
}

const GrammarTokens::NodeTokens& GrammarTokens::tokens_at(Grammar::Node node) const {
  if (base_ && node < base_->grammar_.n_nodes()) return base_->tokens_at(node);
  {
    const std::lock_guard lock(mutex_);
    if (cache_[node]) return *cache_[node];
  }
  auto found = compute_tokens(node);  // slow, so without the lock; two threads may do it twice
  const std::lock_guard lock(mutex_);
  if (!cache_[node]) cache_[node] = std::move(found);
  return *cache_[node];
}

std::unique_ptr<const GrammarTokens::NodeTokens> GrammarTokens::compute_tokens(
    Grammar::Node node) const {
  auto tokens = std::make_unique<NodeTokens>();
  TextStates states(grammar_);
  walk(trie_, TokenTrie::kRoot, states, states.at_node(node),
       [&](int32_t i, TextStates::State state) {
         const auto ids = trie_.tokens(i);
         tokens->ids.insert(tokens->ids.end(), ids.begin(), ids.end());
         const bool has_children = trie_.node(i).end > i + 1;
         if (states.returned(state) && has_children) tokens->exits.push_back(i);
       });
  const size_t n_words = mask_words(vocab_size());
  if (tokens->ids.size() <= 2 * n_words) return tokens;
  tokens->bits.resize(n_words);
  for (const int32_t id : tokens->ids) set_bit(tokens->bits, id);
  tokens->ids = {};
  return tokens;
}

TokenTrie::TokenTrie(const Tokenizer& tokenizer) : vocab_size_(tokenizer.vocab_size()) {
  std::vector<std::pair<std::string_view, int32_t>> sorted;
  for (int32_t id = 0; id < vocab_size_; ++id)
    if (tokenizer.has_token(id) && !tokenizer.is_added(id))
      sorted.emplace_back(tokenizer.bytes_of(id), id);
  std::sort(sorted.begin(), sorted.end());

  nodes_.push_back({.end = 0, .first_token = 0, .depth = 0, .byte = 0});
  std::vector<int32_t> path = {kRoot};
  std::string_view last;
  const auto close = [&](size_t depth) {
    for (; path.size() > depth + 1; path.pop_back())
      nodes_[path.back()].end = static_cast<int32_t>(nodes_.size());
  };
  for (const auto& [bytes, id] : sorted) {
    const auto differs = std::mismatch(last.begin(), last.end(), bytes.begin(), bytes.end());
    close(static_cast<size_t>(differs.first - last.begin()));
    for (size_t depth = path.size() - 1; depth < bytes.size(); ++depth) {
      path.push_back(static_cast<int32_t>(nodes_.size()));
      nodes_.push_back({.end = 0,
                        .first_token = static_cast<int32_t>(tokens_.size()),
                        .depth = static_cast<uint16_t>(depth + 1),
                        .byte = static_cast<uint8_t>(bytes[depth])});
    }
    tokens_.push_back(id);
    last = bytes;
  }
  close(0);
  nodes_[kRoot].end = static_cast<int32_t>(nodes_.size());
  nodes_.push_back({.end = nodes_[kRoot].end,
                    .first_token = static_cast<int32_t>(tokens_.size()),
                    .depth = 0,
                    .byte = 0});
}

std::span<const int32_t> TokenTrie::tokens(int32_t i) const {
  const int32_t first = nodes_[i].first_token;
  return std::span(tokens_).subspan(first, nodes_[i + 1].first_token - first);
}

}  // namespace tandem
