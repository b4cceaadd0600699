#include "text/bpe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <queue>
#include <unordered_map>

#include "core/check.h"
#include "text/utf8.h"

namespace tandem {

namespace {

// Up to this many bytes a linear scan for the lowest rank beats a heap.
constexpr size_t kShortPieceBytes = 128;

// Pieces of at most this many bytes are their own key in the table of whole pieces.
constexpr size_t kInlineKeyBytes = 11;

uint64_t hash_bytes(std::string_view bytes);
uint64_t load_up_to_8(const char* bytes, size_t n);
size_t hash_key(uint64_t head, uint32_t tail);
size_t hash_pair(uint64_t pair);
uint64_t pair_key(int32_t left, int32_t right);
bool occurs_in_utf8(unsigned byte);

}  // namespace

Bpe::Bpe(BpeVocabulary vocabulary)
    : tokens_(std::move(vocabulary.tokens)),
      byte_tokens_(256, -1),
      boundary_filter_(tokens_.size()),
      ignore_merges_(vocabulary.ignore_merges) {
  check(tokens_.size() <= kMaxTokenIds, "ids of 20 bits");
  for (size_t id = 0; id < tokens_.size(); ++id)
    if (tokens_[id].size() == 1)
      byte_tokens_[static_cast<unsigned char>(tokens_[id][0])] = static_cast<int32_t>(id);
  for (unsigned byte = 0; byte < 256; ++byte)
    require(byte_tokens_[byte] >= 0 || !occurs_in_utf8(byte),
            "the vocabulary has no token for the single byte {:#04x}, so some text could not be "
            "encoded: the tokenizer file is incomplete",
            byte);
  index_merges(vocabulary.merges);
  index_tokens();
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& out) const {
  if (piece.empty()) return;
  if (const int32_t id = find_token(piece, !ignore_merges_); id >= 0) {
    out.push_back(id);
    return;
  }
  const auto encode_part = [&](std::string_view part) {
    if (const int32_t id = find_token(part, true); id >= 0)
      out.push_back(id);
    else
      merge(part, out);
  };
  CodePoint left = decode_utf8(piece, 0);
  size_t done = 0;
  for (size_t at = left.n_bytes; at < piece.size();) {
    const CodePoint right = decode_utf8(piece, at);
    if (!boundary_filter_.may_merge(left.value, right.value,
                                    static_cast<unsigned char>(piece[at]))) {
      encode_part(piece.substr(done, at - done));
      done = at;
    }
    left = right;
    at += right.n_bytes;
  }
  done == 0 ? merge(piece, out) : encode_part(piece.substr(done));
}

void Bpe::merge(std::string_view part, std::vector<int32_t>& out) const {
  part.size() <= kShortPieceBytes ? merge_short(part, out) : merge_long(part, out);
}

void Bpe::merge_short(std::string_view piece, std::vector<int32_t>& out) const {
  std::array<int32_t, kShortPieceBytes> ids;
  std::array<uint32_t, kShortPieceBytes> ranks;  // of the pair of symbols i and i + 1
  size_t n = piece.size();
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(piece[i]); };
  for (size_t i = 0; i < n; ++i) ids[i] = byte_tokens_[byte(i)];
  for (size_t i = 0; i + 1 < n; ++i) ranks[i] = byte_pairs_[byte(i) * 256u + byte(i + 1)];
  while (n > 1) {
    size_t at = 0;
    uint32_t least = ranks[0];
    for (size_t i = 1; i + 1 < n; ++i) {
      const bool less = ranks[i] < least;
      least = less ? ranks[i] : least;
      at = less ? i : at;
    }
    if (least == kNoMerge) break;
    ids[at] = results_[least];
    --n;
    std::memmove(&ids[at + 1], &ids[at + 2], (n - at - 1) * sizeof ids[0]);
    if (at + 1 < n) {
      std::memmove(&ranks[at], &ranks[at + 1], (n - at - 1) * sizeof ranks[0]);
      ranks[at] = find_merge(ids[at], ids[at + 1]);
    }
    if (at > 0) ranks[at - 1] = find_merge(ids[at - 1], ids[at]);
  }
  out.insert(out.end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n));
}

void Bpe::merge_long(std::string_view piece, std::vector<int32_t>& out) const {
  struct Symbol {
    int32_t id;  // -1: merged into the symbol on its left
    uint32_t previous, next;
  };
  struct Candidate {
    uint32_t rank, at;
    int32_t left, right;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  check(piece.size() < UINT32_MAX, "a pre-token below 4 GiB");
  const auto n = static_cast<uint32_t>(piece.size());
  std::vector<Symbol> symbols(n);
  for (uint32_t i = 0; i < n; ++i)
    symbols[i] = {byte_tokens_[static_cast<unsigned char>(piece[i])], i - 1, i + 1};

  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto push_candidate = [&](uint32_t at) {
    const int32_t left = symbols[at].id, right = symbols[symbols[at].next].id;
    const uint32_t rank = find_merge(left, right);
    if (rank != kNoMerge) queue.push({rank, at, left, right});
  };
  for (uint32_t i = 0; i + 1 < n; ++i) push_candidate(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& symbol = symbols[best.at];
    // A candidate is stale when either side has been merged with something else since. (If the left
    // side has not, it still has the neighbour that it had.)
    if (symbol.id != best.left || symbols[symbol.next].id != best.right) continue;
    symbols[symbol.next].id = -1;
    symbol.id = results_[best.rank];
    symbol.next = symbols[symbol.next].next;
    if (symbol.next < n) {
      symbols[symbol.next].previous = best.at;
      push_candidate(best.at);
    }
    if (best.at > 0) push_candidate(symbol.previous);
  }
  for (const Symbol& symbol : symbols)
    if (symbol.id >= 0) out.push_back(symbol.id);
}

uint32_t Bpe::find_merge(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  const size_t hash = hash_pair(pair);
  const size_t bit = hash >> 32 & (64 * pair_filter_.size() - 1);
  if ((pair_filter_[bit / 64] >> bit % 64 & 1) == 0) return kNoMerge;
  const size_t mask = pairs_.size() - 1;
  for (size_t slot = hash & mask; pairs_[slot] != kEmptySlot; slot = (slot + 1) & mask)
    if (pairs_[slot] >> 24 == pair) return static_cast<uint32_t>(pairs_[slot] & 0xFFFFFF);
  return kNoMerge;
}

int32_t Bpe::find_token(std::string_view piece, bool must_be_canonical) const {
  const PieceKey key = piece_key(piece);
  const size_t mask = token_table_.size() - 1;
  for (size_t at = hash_key(key.head, key.tail) & mask; token_table_[at].tail != 0;
       at = (at + 1) & mask) {
    const PieceSlot& slot = token_table_[at];
    if (slot.head != key.head || slot.tail != key.tail) continue;
    const auto id = static_cast<int32_t>(slot.token / 2);
    if (piece.size() > kInlineKeyBytes && bytes(id) != piece) continue;
    return slot.token % 2 == 1 || !must_be_canonical ? id : -1;
  }
  return -1;
}

Bpe::PieceKey Bpe::piece_key(std::string_view piece) {
  if (piece.size() > kInlineKeyBytes) return {hash_bytes(piece), UINT32_MAX};
  const size_t n_head = std::min<size_t>(piece.size(), 8);
  const uint64_t tail = load_up_to_8(piece.data() + n_head, piece.size() - n_head);
  return {load_up_to_8(piece.data(), n_head), static_cast<uint32_t>(tail | piece.size() << 24)};
}

void Bpe::index_merges(const std::vector<BpeMerge>& merges) {
  pairs_.resize(std::bit_ceil(2 * merges.size() + 2), kEmptySlot);
  pair_filter_.resize(std::bit_ceil(16 * merges.size() / 64 + 1));
  const size_t mask = pairs_.size() - 1;
  for (const BpeMerge& merge : merges) {
    require(merge.rank < 0xFFFFFF, "{} merges are more than the {} that are supported", merge.rank,
            0xFFFFFF);
    if (merge.rank >= results_.size()) results_.resize(merge.rank + 1, -1);
    results_[merge.rank] = merge.result;
    const uint64_t pair = pair_key(merge.left, merge.right);
    const size_t hash = hash_pair(pair);
    const size_t bit = hash >> 32 & (64 * pair_filter_.size() - 1);
    pair_filter_[bit / 64] |= uint64_t{1} << bit % 64;
    size_t slot = hash & mask;
    while (pairs_[slot] != kEmptySlot && pairs_[slot] >> 24 != pair) slot = (slot + 1) & mask;
    pairs_[slot] = pair << 24 | merge.rank;
  }
  byte_pairs_.resize(256 * 256, kNoMerge);
  for (size_t left = 0; left < 256; ++left)
    for (size_t right = 0; right < 256; ++right)
      if (byte_tokens_[left] >= 0 && byte_tokens_[right] >= 0)
        byte_pairs_[left * 256 + right] = find_merge(byte_tokens_[left], byte_tokens_[right]);
}

// Most pre-tokens of ordinary text are one token. Looking up a whole pre-token gives the same ids
// as merging only if merging the token's bytes results in that token; this is tested here for every
// token.
void Bpe::index_tokens() {
  token_table_.resize(std::bit_ceil(2 * tokens_.size() + 2));
  const size_t mask = token_table_.size() - 1;
  std::vector<int32_t> merged;
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string& token = tokens_[id];
    if (token.empty()) continue;
    boundary_filter_.add(token);
    merged.clear();
    if (std::all_of(token.begin(), token.end(),
                    [&](char c) { return byte_tokens_[static_cast<unsigned char>(c)] >= 0; }))
      merge(token, merged);
    const PieceKey key = piece_key(token);
    size_t slot = hash_key(key.head, key.tail) & mask;
    while (token_table_[slot].tail != 0) slot = (slot + 1) & mask;
    const uint32_t is_canonical = merged.size() == 1 && merged[0] == static_cast<int32_t>(id);
    token_table_[slot] = {key.head, key.tail, static_cast<uint32_t>(2 * id) + is_canonical};
  }
}

std::vector<BpeMerge> merges_by_rank(const std::vector<std::string>& tokens) {
  std::unordered_map<std::string_view, int32_t> ids(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id)
    if (!tokens[id].empty()) ids.emplace(tokens[id], static_cast<int32_t>(id));
  std::vector<BpeMerge> merges;
  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string_view token = tokens[id];
    for (size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ids.find(token.substr(0, cut));
      if (left == ids.end()) continue;
      const auto right = ids.find(token.substr(cut));
      if (right == ids.end()) continue;
      merges.push_back(
          {left->second, right->second, static_cast<int32_t>(id), static_cast<uint32_t>(id)});
    }
  }
  return merges;
}

namespace {

uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0x9E3779B97F4A7C15u;
  return x ^ x >> 29;
}

template <class Word>
uint64_t load(const char* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// Loads n <= 8 bytes and sets the rest of the word to 0. Overlapping reads replace a loop.
uint64_t load_up_to_8(const char* bytes, size_t n) {
  if (n >= 4) return load<uint32_t>(bytes) | load<uint32_t>(bytes + n - 4) << 8 * (n - 4);
  if (n >= 2) return load<uint16_t>(bytes) | load<uint16_t>(bytes + n - 2) << 8 * (n - 2);
  return n == 1 ? static_cast<unsigned char>(*bytes) : 0;
}

uint64_t hash_bytes(std::string_view bytes) {
  uint64_t hash = bytes.size();
  for (; bytes.size() > 8; bytes.remove_prefix(8)) hash = mix(hash ^ load<uint64_t>(bytes.data()));
  return mix(hash ^ load_up_to_8(bytes.data(), bytes.size()));
}

size_t hash_key(uint64_t head, uint32_t tail) {
  return mix((head ^ tail * 0xA0761D6478BD642Fu) * 0xD6E8FEB86659FD93u);
}

size_t hash_pair(uint64_t pair) { return mix(pair * 0xD6E8FEB86659FD93u); }

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << 20 | static_cast<uint64_t>(right);
}

bool occurs_in_utf8(unsigned byte) { return byte != 0xC0 && byte != 0xC1 && byte < 0xF5; }

// Placeholders for characters of which a token contains only the last bytes (kTail) or only the
// first bytes (kHead + lead byte). Larger than any code point.
constexpr char32_t kTail = 0x110000;
constexpr char32_t kHead = 0x110100;

bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

}  // namespace

BpeBoundaryFilter::BpeBoundaryFilter(size_t n_tokens) : bits_(std::bit_ceil(n_tokens / 8 + 1)) {}

void BpeBoundaryFilter::add(std::string_view token) {
  char32_t left = 0;  // unused before the first character is read
  for (size_t at = 0; at < token.size();) {
    size_t end = at + 1;
    while (end < token.size() && continues(token[end])) ++end;
    const std::string_view character = token.substr(at, end - at);
    const bool whole = find_invalid_utf8(character) == std::string_view::npos;
    const char32_t right = whole ? decode_utf8(character, 0).value
                                 : kHead + static_cast<unsigned char>(character.front());
    if (at > 0) insert(left, right);
    left = whole ? right : kTail;
    at = end;
  }
}

bool BpeBoundaryFilter::may_merge(char32_t left, char32_t right, unsigned char right_lead) const {
  return may_contain(left, right) || may_contain(left, kHead + right_lead) ||
         may_contain(kTail, right) || may_contain(kTail, kHead + right_lead);
}

void BpeBoundaryFilter::insert(char32_t left, char32_t right) {
  const size_t b = bit(left, right);
  bits_[b / 64] |= uint64_t{1} << b % 64;
}

bool BpeBoundaryFilter::may_contain(char32_t left, char32_t right) const {
  const size_t b = bit(left, right);
  return (bits_[b / 64] >> b % 64 & 1) != 0;
}

size_t BpeBoundaryFilter::bit(char32_t left, char32_t right) const {
  const uint64_t hash = (uint64_t{left} << 21 ^ right) * 0x9E3779B97F4A7C15u;
  return hash >> 32 & (64 * bits_.size() - 1);
}

}  // namespace tandem
