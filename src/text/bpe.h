// Byte-pair encoding of one pre-token: bytes in, token ids out. Pre-tokenisation and added tokens
// are handled by the callers (tokenizer.h).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

// Pairs of adjacent characters that occur together in some token. Text may be cut between any other
// pair before it is encoded.
// A merge across a character boundary makes a token that contains both characters. If no
// token of the vocabulary contains the two characters next to each other, nothing merges across the
// boundary, and the two sides can be encoded separately with the same result. This holds for some
// 40 % of the boundaries in Chinese text and cuts runs of dozens of characters into words.
class BpeBoundaryFilter {
 public:
  // `n_tokens` sets the size of the table: at least 8 bits per token. (DeepSeek-V3 has 36,000 pairs
  // in 128,000 tokens.)
  explicit BpeBoundaryFilter(size_t n_tokens);

  // `token` may begin and end inside a character.
  void add(std::string_view token);

  // Whether some token may contain `left` followed by `right`. Never a false negative, rarely a
  // false positive. `right_lead` is the first byte of `right`.
  bool may_merge(char32_t left, char32_t right, unsigned char right_lead) const;

 private:
  size_t bit(char32_t left, char32_t right) const;
  void insert(char32_t left, char32_t right);
  bool may_contain(char32_t left, char32_t right) const;

  std::vector<uint64_t> bits_;  // Bloom filter of pairs; its size is a power of two
};

// One more than the largest token id allowed: several times the largest vocabulary known.
inline constexpr int32_t kMaxTokenIds = 1 << 20;

// Two adjacent tokens that may become one. Lower ranks go first; merges of equal rank have the same
// result.
struct BpeMerge {
  int32_t left, right, result;  // token ids
  uint32_t rank;
};

struct BpeVocabulary {
  std::vector<std::string> tokens;  // [vocab] the bytes of each id; empty: not a BPE token
  std::vector<BpeMerge> merges;
  bool ignore_merges = false;  // a piece that is a token as a whole is encoded as that token
};

// The merges of a vocabulary ranked by id (tiktoken): any two tokens whose concatenation is a token
// merge into it, and the id of the result is the rank.
std::vector<BpeMerge> merges_by_rank(const std::vector<std::string>& tokens);

class Bpe {
 public:
  // Throws Error when a byte that occurs in UTF-8 has no token of its own, since some text could
  // not be encoded.
  explicit Bpe(BpeVocabulary vocabulary);

  // Appends the ids of `piece` (well-formed UTF-8) to `out`: repeatedly merges the adjacent pair of
  // lowest rank, the leftmost of equals. O(n log n) in the bytes of the piece. Thread-safe.
  void encode(std::string_view piece, std::vector<int32_t>& out) const;

  // Bytes of a token; empty for an id that is not a BPE token. 0 <= id < n_tokens().
  std::string_view bytes(int32_t id) const { return tokens_[static_cast<size_t>(id)]; }
  int32_t n_tokens() const { return static_cast<int32_t>(tokens_.size()); }

 private:
  static constexpr uint32_t kNoMerge = UINT32_MAX;
  static constexpr uint64_t kEmptySlot = UINT64_MAX;
  // Identifies a piece: its bytes and length up to 11 bytes, the hash of a longer piece.
  struct PieceKey {
    uint64_t head;
    uint32_t tail;
  };
  struct PieceSlot {  // 16 bytes, so that most look-ups touch one cache line
    uint64_t head = 0;
    uint32_t tail = 0;   // 0: an empty slot
    uint32_t token = 0;  // 2 * id + 1 if merging the token's bytes gives the token, else 2 * id
  };

  void index_merges(const std::vector<BpeMerge>& merges);
  void index_tokens();
  uint32_t find_merge(int32_t left, int32_t right) const;  // the rank, or kNoMerge
  static PieceKey piece_key(std::string_view piece);
  int32_t find_token(std::string_view piece, bool must_be_canonical) const;  // the id, or -1
  void merge(std::string_view part, std::vector<int32_t>& out) const;
  void merge_short(std::string_view piece, std::vector<int32_t>& out) const;
  void merge_long(std::string_view piece, std::vector<int32_t>& out) const;

  std::vector<std::string> tokens_;
  std::vector<int32_t>
      byte_tokens_;  // [256] -1: a byte that never occurs in UTF-8 and has no token
  std::vector<uint32_t> byte_pairs_;  // [256 * 256] find_merge of the tokens of two bytes
  std::vector<int32_t> results_;      // [rank] the id of the merged token
  std::vector<uint64_t>
      pair_filter_;  // Bloom filter, 16 bits per merge; a clear bit: the pair does not merge
  // Hash tables with open addressing; the number of slots is a power of two, at most half are used.
  std::vector<uint64_t> pairs_;  // left (20 bits), right (20), rank (24)
  std::vector<PieceSlot>
      token_table_;  // all tokens by their bytes, to encode a piece that is one token
  BpeBoundaryFilter boundary_filter_;
  bool ignore_merges_;
};

}  // namespace tandem
