// tokenizer.json of Hugging Face's tokenizers library.
#include <array>
#include <unordered_map>

#include "core/check.h"
#include "io/json.h"
#include "text/tokenizer_files.h"
#include "text/utf8.h"

namespace tandem {
namespace {

using nlohmann::json;

// The Digits pre-tokenizer uses Rust's standard library, which in tokenizers 0.23 implements
// Unicode 17. Its category N has 13 more characters than our table, which has the Unicode version
// of that library's regular expressions.
constexpr std::string_view kNumeric = R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])";

void parse_vocabulary(const json& model, const std::vector<AddedToken>& added, BpeVocabulary& out);
void parse_merges(const json& model, BpeVocabulary& out);
void parse_pre_tokenizer(const json& step, bool is_last, std::vector<SplitRule>& out);
void require_supported_model(const json& file);

}  // namespace

TokenizerParts parse_tokenizer_json(const json& file) {
  require_supported_model(file);
  TokenizerParts parts;
  if (!member(file, "added_tokens").is_null())
    for (const json& entry : array_member(file, "added_tokens"))
      parts.added_tokens.push_back(
          parse_added_token(entry, token_id(member(entry, "id"), string_member(entry, "content"))));
  const json& model = object_member(file, "model");
  parse_vocabulary(model, parts.added_tokens, parts.vocabulary);
  parse_merges(model, parts.vocabulary);
  parts.vocabulary.ignore_merges = bool_member(model, "ignore_merges", false);
  const json& pre_tokenizer = object_member(file, "pre_tokenizer");
  if (string_member(pre_tokenizer, "type") != "Sequence") {
    parse_pre_tokenizer(pre_tokenizer, true, parts.splits);
    return parts;
  }
  const json& steps = array_member(pre_tokenizer, "pretokenizers");
  require(!steps.empty(), "\"pre_tokenizer\" is an empty sequence; a ByteLevel step is expected");
  for (size_t i = 0; i < steps.size(); ++i)
    parse_pre_tokenizer(steps[i], i + 1 == steps.size(), parts.splits);
  return parts;
}

namespace {

// The byte that each character of a byte-level token stands for: printable Latin-1 stands for
// itself, the other 68 bytes in increasing order for U+0100, U+0101, ...
class ByteAlphabet {
 public:
  ByteAlphabet() {
    bytes_.fill(-1);
    size_t n_others = 0;
    for (size_t byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      bytes_[printable ? byte : 256 + n_others++] = static_cast<int16_t>(byte);
    }
  }

  // The bytes of a token, or nothing when it has a character outside the alphabet.
  std::optional<std::string> bytes_of(std::string_view token) const {
    std::string bytes;
    for (size_t at = 0; at < token.size();) {
      const CodePoint c = decode_utf8(token, at);
      if (c.value >= bytes_.size() || bytes_[c.value] < 0) return std::nullopt;
      bytes += static_cast<char>(bytes_[c.value]);
      at += c.n_bytes;
    }
    return bytes;
  }

 private:
  std::array<int16_t, 256 + 68> bytes_;  // [code point] -1: none
};

void parse_vocabulary(const json& model, const std::vector<AddedToken>& added, BpeVocabulary& out) {
  std::unordered_map<int32_t, std::string_view> added_texts;
  for (const AddedToken& token : added) {
    const auto [at, is_new] = added_texts.emplace(token.id, token.text);
    if (!is_new)
      fail("the added tokens {} and {} have the same id {}", shown(at->second), shown(token.text),
           token.id);
  }
  const ByteAlphabet alphabet;
  const json& vocab = object_member(model, "vocab");
  std::vector<bool> used;
  for (const auto& [token, value] : vocab.get_ref<const json::object_t&>()) {
    const int32_t id = token_id(value, token);
    const auto index = static_cast<size_t>(id);
    if (index >= used.size()) {
      used.resize(index + 1);
      out.tokens.resize(index + 1);
    }
    if (used[index]) fail("two tokens have the id {}; one is {}", id, shown(token));
    used[index] = true;
    const auto added_text = added_texts.find(id);
    const bool is_added = added_text != added_texts.end();
    if (is_added && added_text->second != token)
      fail("the id {} is {} in the vocabulary but {} in the added tokens", id, shown(token),
           shown(added_text->second));
    if (std::optional<std::string> bytes = alphabet.bytes_of(token))
      out.tokens[index] = std::move(*bytes);
    else if (!is_added)
      fail("the token {} {} is not in the byte-level alphabet; only byte-level BPE is supported",
           id, shown(token));
  }
}

void parse_merges(const json& model, BpeVocabulary& out) {
  std::unordered_map<std::string_view, int32_t> ids;
  for (const auto& [token, id] : object_member(model, "vocab").get_ref<const json::object_t&>())
    ids.emplace(token, id.get<int32_t>());
  const json& merges = array_member(model, "merges");
  out.merges.reserve(merges.size());
  const auto id_of = [&](std::string_view token, size_t rank) {
    const auto at = ids.find(token);
    if (at == ids.end())
      fail("merge {} needs the token {}, which is not in the vocabulary", rank, shown(token));
    return at->second;
  };
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const json& merge = merges[rank];
    std::string left, right;
    if (merge.is_string()) {
      const auto& both = merge.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      if (space == std::string::npos || both.find(' ', space + 1) != std::string::npos)
        fail("merge {} {} must be two tokens with a space between", rank, shown(merge));
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else {
      require(merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string(),
              "merge {} must be a string or two strings", rank);
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    }
    out.merges.push_back({id_of(left, rank), id_of(right, rank), id_of(left + right, rank),
                          static_cast<uint32_t>(rank)});
  }
}

void parse_pre_tokenizer(const json& step, bool is_last, std::vector<SplitRule>& out) {
  const std::string& type = string_member(step, "type");
  require((type == "ByteLevel") == is_last,
          "the last step of \"pre_tokenizer\", and no other, must be ByteLevel; this one is {}",
          shown(type));
  if (type == "ByteLevel") {
    for (const char* option : {"add_prefix_space", "use_regex"})
      require(!bool_member(step, option, true),
              "the pre-tokenizer ByteLevel with \"{}\" is not supported", option);
  } else if (type == "Digits") {
    out.push_back(
        {std::string(kNumeric) + (bool_member(step, "individual_digits", false) ? "" : "+")});
  } else if (type == "Split") {
    const std::string& behavior = string_member(step, "behavior");
    require(behavior == "Isolated" || behavior == "Removed",
            "the pre-tokenizer Split with behavior {} is not supported; Isolated and Removed are",
            shown(behavior));
    require(!bool_member(step, "invert", false),
            "the pre-tokenizer Split with \"invert\" is not supported");
    out.push_back({string_member(object_member(step, "pattern"), "Regex"), behavior == "Removed"});
  } else {
    fail("the pre-tokenizer {} is not supported; Split, Digits and ByteLevel are", shown(type));
  }
}

void require_supported_model(const json& file) {
  const json& model = object_member(file, "model");
  const json& type = member(model, "type");
  require(type.is_null() || type == "BPE", "the model type {} is not supported; BPE is",
          shown(type));
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json& value = member(model, affix);
    require(value.is_null() || value == "", "BPE with \"{}\" {} is not supported", affix,
            shown(value));
  }
  const json& dropout = member(model, "dropout");
  require(dropout.is_null() || dropout == 0.0, "BPE with \"dropout\" {} is not supported",
          shown(dropout));
  require(!bool_member(model, "byte_fallback", false),
          "BPE with \"byte_fallback\" is not supported");

  const json& normalizer = member(file, "normalizer");
  const bool empty = normalizer.is_null() || (string_member(normalizer, "type") == "Sequence" &&
                                              array_member(normalizer, "normalizers").empty());
  require(empty, "the normalizer {} is not supported; it must be null or empty", shown(normalizer));
  const std::string& decoder = string_member(object_member(file, "decoder"), "type");
  require(decoder == "ByteLevel", "the decoder {} is not supported; ByteLevel is", shown(decoder));
}

}  // namespace
}  // namespace tandem
