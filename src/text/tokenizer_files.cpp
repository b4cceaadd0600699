#include "text/tokenizer_files.h"

#include <charconv>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

std::optional<std::string> token_text(const nlohmann::json& file, const char* key);

}  // namespace

TokenizerConfig parse_tokenizer_config(const nlohmann::json& file) {
  TokenizerConfig config;
  config.add_bos_token = bool_member(file, "add_bos_token", false);
  config.bos_token = token_text(file, "bos_token");
  config.eos_token = token_text(file, "eos_token");
  config.pad_token = token_text(file, "pad_token");
  config.unk_token = token_text(file, "unk_token");
  if (member(file, "added_tokens_decoder").is_null()) return config;
  for (const auto& [key, entry] : object_member(file, "added_tokens_decoder").items()) {
    int64_t number = -1;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), number);
    require(parsed.ec == std::errc() && parsed.ptr == key.data() + key.size(),
            "the key {} of \"added_tokens_decoder\" is not a token id", shown(key));
    config.added_tokens.push_back(parse_added_token(entry, token_id(number, key)));
  }
  return config;
}

AddedToken parse_added_token(const nlohmann::json& entry, int32_t id) {
  AddedToken token;
  token.id = id;
  token.text = string_member(entry, "content");
  token.special = bool_member(entry, "special", false);
  token.normalized = bool_member(entry, "normalized", false);
  require(!token.text.empty(), "the added token {} is empty", id);
  for (const char* flag : {"lstrip", "rstrip", "single_word"})
    if (bool_member(entry, flag, false))
      fail("the added token {} {} has \"{}\", which is not supported", id, shown(token.text), flag);
  return token;
}

const nlohmann::json& member(const nlohmann::json& object, const char* key) {
  static const nlohmann::json kNull;
  require(object.is_object(), "an object with \"{}\" is expected, not {}", key, object.type_name());
  const auto at = object.find(key);
  return at == object.end() ? kNull : *at;
}

const std::string& string_member(const nlohmann::json& object, const char* key) {
  const nlohmann::json& value = member(object, key);
  require(value.is_string(), "\"{}\" must be a string, not {}", key, value.type_name());
  return value.get_ref<const std::string&>();
}

const nlohmann::json& array_member(const nlohmann::json& object, const char* key) {
  const nlohmann::json& value = member(object, key);
  require(value.is_array(), "\"{}\" must be an array, not {}", key, value.type_name());
  return value;
}

const nlohmann::json& object_member(const nlohmann::json& object, const char* key) {
  const nlohmann::json& value = member(object, key);
  require(value.is_object(), "\"{}\" must be an object, not {}", key, value.type_name());
  return value;
}

bool bool_member(const nlohmann::json& object, const char* key, bool default_value) {
  const nlohmann::json& value = member(object, key);
  if (value.is_null()) return default_value;
  require(value.is_boolean(), "\"{}\" must be true or false, not {}", key, value.type_name());
  return value.get<bool>();
}

int32_t token_id(const nlohmann::json& value, std::string_view of) {
  const bool fits = value.is_number_integer() && value >= 0 && value < kMaxTokenIds;
  if (!fits)
    fail("the id of the token {} must be a number from 0 to {}, not {}", shown(of),
         kMaxTokenIds - 1, shown(value));
  return value.get<int32_t>();
}

namespace {

// "bos_token": a string, an object with "content", or null.
std::optional<std::string> token_text(const nlohmann::json& file, const char* key) {
  const nlohmann::json& value = member(file, key);
  if (value.is_null()) return std::nullopt;
  if (value.is_string()) return value.get<std::string>();
  require(value.is_object(), "\"{}\" must be a string or an object, not {}", key,
          value.type_name());
  return string_member(value, "content");
}

}  // namespace
}  // namespace tandem
