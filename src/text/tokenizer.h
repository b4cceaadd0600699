// Converts text to token ids and back with the tokenizer of a checkpoint's directory.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/bpe.h"
#include "text/tokenizer_added.h"
#include "text/tokenizer_files.h"
#include "text/tokenizer_splits.h"
#include "text/utf8.h"

namespace tandem {

struct EncodeOptions {
  bool added_tokens = true;  // recognise added tokens written in the text
  // Ranges in which added tokens are not recognised, such as text of users. Ascending, disjoint. A
  // token that lies partly inside a range is not recognised either.
  std::span<const ByteRange> literal = {};
};

// Immutable and thread-safe.
class Tokenizer {
 public:
  // Reads tokenizer.json, or tiktoken.model if there is none, and, if they exist,
  // tokenizer_config.json, generation_config.json and config.json. Throws Error naming the file and
  // what is missing, invalid or not supported.
  static Tokenizer from_directory(const std::filesystem::path& directory);

  Tokenizer(TokenizerParts parts, TokenizerConfig config);

  // Adds no BOS or EOS. Throws Error with the byte offset when `text` is not well-formed UTF-8.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;

  // The text of `ids`; each maximal ill-formed UTF-8 sequence becomes one U+FFFD. Throws Error for
  // an id without a token.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // The bytes a token stands for, not always well-formed UTF-8; empty for an id without a token (a
  // hole or padding).
  std::string_view bytes_of(int32_t id) const;
  bool has_token(int32_t id) const { return !bytes_of(id).empty(); }
  bool is_special(int32_t id) const;
  // Whether `id` is an added token, such as "<think>", which byte-pair merges do not produce.
  bool is_added(int32_t id) const { return added_index_.count(id) > 0; }

  // One more than the largest id. Ids below it may have no token; the model's embedding may have
  // more rows.
  int32_t vocab_size() const { return vocab_size_; }
  // Ids below vocab_size() without a token, ascending.
  const std::vector<int32_t>& holes() const { return holes_; }

  // The id of an added token by its text, such as "</think>".
  std::optional<int32_t> added_id(std::string_view text) const;

  const TokenizerConfig& config() const { return config_; }
  bool add_bos() const { return config_.add_bos_token; }  // before a raw completion
  std::optional<int32_t> bos() const { return bos_; }
  std::optional<int32_t> eos() const { return eos_; }
  // Ids that end a generation, ascending: eos(), eos_token_id of generation_config.json and
  // config.json, and <|im_end|>.
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }

 private:
  std::optional<int32_t> id_of(const std::optional<std::string>& token) const;
  void add_stop_ids(const nlohmann::json& config);
  void add_stop_id(int32_t id);
  std::vector<AddedTokenTrie::Found> find_added_tokens(std::string_view text,
                                                       const EncodeOptions& options) const;
  void encode_plain(std::string_view text, std::vector<int32_t>& out) const;

  Bpe bpe_;
  PreTokenizer pre_tokenizer_;
  std::vector<AddedToken> added_tokens_;
  std::unordered_map<int32_t, size_t> added_index_;  // id -> index in added_tokens_
  AddedTokenTrie exact_tokens_, normalized_tokens_;
  TokenizerConfig config_;
  int32_t vocab_size_ = 0;
  std::vector<int32_t> holes_;
  std::optional<int32_t> bos_, eos_;
  std::vector<int32_t> stop_ids_;
};

// Decodes the ids of one sequence as they arrive and emits complete characters only. The tokenizer
// must outlive it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}

  // Returns the text completed by `id`, which may be empty. An id without a token adds nothing.
  std::string push(int32_t id);
  // Ends the text: an incomplete character becomes one U+FFFD.
  std::string flush() { return stream_.flush(); }

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_;
  Utf8Stream stream_;
};

}  // namespace tandem
