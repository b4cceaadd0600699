#include "text/tokenizer.h"

#include <algorithm>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxFileBytes = int64_t{1} << 28;

std::string read(const fs::path& path) { return read_text_file(path.string(), kMaxFileBytes); }

nlohmann::json read_json(const fs::path& path) { return parse_json(read(path), path.string()); }

bool has_file(const fs::path& path) {
  std::error_code unreadable;
  return fs::exists(path, unreadable);
}

// Calls `act` and puts the file's name before the message of an Error.
template <class Act>
auto with_file_name(const fs::path& path, const Act& act) {
  try {
    return act();
  } catch (const Error& error) {
    fail("{}: {}", path.string(), error.what());
  }
}

}  // namespace

Tokenizer Tokenizer::from_directory(const fs::path& directory) {
  require_folder(directory.string());
  const fs::path hugging_face = directory / "tokenizer.json";
  const fs::path tiktoken = directory / "tiktoken.model";
  const fs::path config_file = directory / "tokenizer_config.json";
  TokenizerConfig config;
  if (has_file(config_file)) {
    const nlohmann::json json = read_json(config_file);
    config = with_file_name(config_file, [&] { return parse_tokenizer_config(json); });
  }
  const bool is_hugging_face = has_file(hugging_face);
  require(
      is_hugging_face || has_file(tiktoken),
      "{} has no tokenizer.json and no tiktoken.model: copy the checkpoint's tokenizer files there",
      directory.string());
  const nlohmann::json json = is_hugging_face ? read_json(hugging_face) : nullptr;
  const std::string ranks = is_hugging_face ? "" : read(tiktoken);
  Tokenizer tokenizer = with_file_name(is_hugging_face ? hugging_face : tiktoken, [&] {
    return Tokenizer(
        is_hugging_face ? parse_tokenizer_json(json) : parse_tiktoken(ranks, config.added_tokens),
        config);
  });
  for (const char* name : {"generation_config.json", "config.json"}) {
    const fs::path path = directory / name;
    if (!has_file(path)) continue;
    const nlohmann::json ends = read_json(path);
    with_file_name(path, [&] { tokenizer.add_stop_ids(ends); });
  }
  return tokenizer;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  const size_t invalid = find_invalid_utf8(text);
  require(invalid == std::string_view::npos,
          "the text is not valid UTF-8 at byte {} of {}: convert it to UTF-8", invalid,
          text.size());
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 1);
  size_t done = 0;
  for (const AddedTokenTrie::Found& token : find_added_tokens(text, options)) {
    encode_plain(text.substr(done, token.begin - done), ids);
    ids.push_back(token.id);
    done = token.end;
  }
  encode_plain(text.substr(done), ids);
  return ids;
}

void Tokenizer::encode_plain(std::string_view text, std::vector<int32_t>& out) const {
  if (text.empty()) return;
  pre_tokenizer_.split(text, [&](std::string_view piece) { bpe_.encode(piece, out); });
}

namespace {

using Found = AddedTokenTrie::Found;

std::vector<ByteRange> complement(std::span<const ByteRange> ranges, size_t size) {
  std::vector<ByteRange> gaps;
  size_t begin = 0;
  for (const ByteRange& range : ranges) {
    check(begin <= range.begin && range.begin <= range.end && range.end <= size,
          "ascending, disjoint byte ranges");
    if (begin < range.begin) gaps.push_back({begin, range.begin});
    begin = range.end;
  }
  if (begin < size) gaps.push_back({begin, size});
  return gaps;
}

// Appends the tokens that `trie` finds inside `ranges` to `found` and cuts them out of `ranges`.
void extract_tokens(std::string_view text, const AddedTokenTrie& trie,
                    std::vector<ByteRange>& ranges, std::vector<Found>& found) {
  std::vector<ByteRange> rest;
  for (ByteRange range : ranges) {
    const std::string_view visible = text.substr(0, range.end);
    for (Found token = trie.find(visible, range.begin); token.id >= 0;
         token = trie.find(visible, range.begin)) {
      if (range.begin < token.begin) rest.push_back({range.begin, token.begin});
      found.push_back(token);
      range.begin = token.end;
    }
    if (range.begin < range.end) rest.push_back(range);
  }
  ranges = std::move(rest);
}

}  // namespace

std::vector<Found> Tokenizer::find_added_tokens(std::string_view text,
                                                const EncodeOptions& options) const {
  std::vector<Found> found;
  if (!options.added_tokens) return found;
  std::vector<ByteRange> ranges = complement(options.literal, text.size());
  extract_tokens(text, exact_tokens_, ranges, found);
  extract_tokens(text, normalized_tokens_, ranges, found);
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return a.begin < b.begin; });
  return found;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  StreamDecoder decoder(*this, skip_special);
  std::string text;
  for (const int32_t id : ids) {
    require(has_token(id), "the id {} is not a token; ids are 0 to {}, not all of them used", id,
            vocab_size_ - 1);
    text += decoder.push(id);
  }
  return text + decoder.flush();
}

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_.is_special(id)) return "";
  return stream_.push(tokenizer_.bytes_of(id));
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  if (const auto added = added_index_.find(id); added != added_index_.end())
    return added_tokens_[added->second].text;
  return id >= 0 && id < bpe_.n_tokens() ? bpe_.bytes(id) : std::string_view();
}

bool Tokenizer::is_special(int32_t id) const {
  const auto added = added_index_.find(id);
  return added != added_index_.end() && added_tokens_[added->second].special;
}

std::optional<int32_t> Tokenizer::added_id(std::string_view text) const {
  for (const AddedToken& token : added_tokens_)
    if (token.text == text) return token.id;
  return std::nullopt;
}

Tokenizer::Tokenizer(TokenizerParts parts, TokenizerConfig config)
    : bpe_(std::move(parts.vocabulary)),
      pre_tokenizer_(parts.splits),
      added_tokens_(std::move(parts.added_tokens)),
      config_(std::move(config)),
      vocab_size_(bpe_.n_tokens()) {
  for (size_t i = 0; i < added_tokens_.size(); ++i) {
    const AddedToken& token = added_tokens_[i];
    added_index_[token.id] = i;
    (token.normalized ? normalized_tokens_ : exact_tokens_).insert(token.text, token.id);
    vocab_size_ = std::max(vocab_size_, token.id + 1);
  }
  for (int32_t id = 0; id < vocab_size_; ++id)
    if (!has_token(id)) holes_.push_back(id);
  bos_ = id_of(config_.bos_token);
  eos_ = id_of(config_.eos_token);
  if (eos_) add_stop_id(*eos_);
  if (const auto end_of_message = added_id("<|im_end|>")) add_stop_id(*end_of_message);
}

std::optional<int32_t> Tokenizer::id_of(const std::optional<std::string>& token) const {
  if (!token) return std::nullopt;
  const std::optional<int32_t> id = added_id(*token);
  if (!id)
    fail("tokenizer_config.json names the token {}, which is not among the added tokens",
         shown(*token));
  return id;
}

void Tokenizer::add_stop_ids(const nlohmann::json& config) {
  const nlohmann::json& value = member(config, "eos_token_id");
  if (value.is_number())
    add_stop_id(token_id(value, "eos_token_id"));
  else if (value.is_array())
    for (const nlohmann::json& id : value) add_stop_id(token_id(id, "eos_token_id"));
}

void Tokenizer::add_stop_id(int32_t id) {
  const auto at = std::lower_bound(stop_ids_.begin(), stop_ids_.end(), id);
  if (at == stop_ids_.end() || *at != id) stop_ids_.insert(at, id);
}

}  // namespace tandem
