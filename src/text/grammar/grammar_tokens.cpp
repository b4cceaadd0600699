#include "text/grammar/grammar_tokens.h"

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

void set(std::span<uint64_t> bits, int32_t id) { bits[id / 64] |= uint64_t{1} << id % 64; }

}  // namespace

GrammarTokens::GrammarTokens(Grammar grammar, const TokenTrie& trie,
                             std::shared_ptr<const GrammarTokens> base)
    : grammar_(std::move(grammar)),
      trie_(trie),
      base_(std::move(base)),
      known_(grammar_.n_nodes()) {}

void GrammarTokens::add_allowed(TextStates& states, TextStates::State state,
                                std::span<uint64_t> bits) const {
  const std::vector<TextStates::Frame> frames = states.frames(state);
  for (const TextStates::Frame& frame : frames) {
    for (const Grammar::TokenEdge& edge : grammar_.token_edges(frame.node)) set(bits, edge.id);
    const NodeTokens& tokens = tokens_at(frame.node);
    for (const int32_t id : tokens.few) set(bits, id);
    for (size_t i = 0; i < tokens.bits.size(); ++i) bits[i] |= tokens.bits[i];
    if (tokens.exits.empty()) continue;
    const TextStates::State back = states.back(frame.callers);
    for (const int32_t exit : tokens.exits)
      walk(trie_, exit, states, back, [&](int32_t i, TextStates::State) {
        for (const int32_t id : trie_.tokens(i)) set(bits, id);
      });
  }
}

const GrammarTokens::NodeTokens& GrammarTokens::tokens_at(Grammar::Node node) const {
  if (base_ && node < base_->grammar_.n_nodes()) return base_->tokens_at(node);
  {
    const std::lock_guard lock(mutex_);
    if (known_[node]) return *known_[node];
  }
  auto found = find_tokens(node);  // slow, so without the lock; two threads may do it twice
  const std::lock_guard lock(mutex_);
  if (!known_[node]) known_[node] = std::move(found);
  return *known_[node];
}

std::unique_ptr<const GrammarTokens::NodeTokens> GrammarTokens::find_tokens(
    Grammar::Node node) const {
  auto tokens = std::make_unique<NodeTokens>();
  TextStates states(grammar_);
  walk(trie_, TokenTrie::kRoot, states, states.at_reader(node),
       [&](int32_t i, TextStates::State state) {
         const auto ids = trie_.tokens(i);
         tokens->few.insert(tokens->few.end(), ids.begin(), ids.end());
         const bool has_children = trie_.node(i).end > i + 1;
         if (states.returned(state) && has_children) tokens->exits.push_back(i);
       });
  const size_t n_words = mask_words(vocab_size());
  if (tokens->few.size() <= 2 * n_words) return tokens;
  tokens->bits.resize(n_words);
  for (const int32_t id : tokens->few) set(tokens->bits, id);
  tokens->few = {};
  return tokens;
}

}  // namespace tandem
