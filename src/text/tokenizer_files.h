// Parses the files of a tokenizer into plain data. Errors name the key.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"
#include "text/tokenizer_added.h"
#include "text/tokenizer_splits.h"

namespace tandem {

// The parts of a tokenizer, from tokenizer.json or tiktoken.model.
struct TokenizerParts {
  BpeVocabulary vocabulary;
  std::vector<SplitRule> splits;
  std::vector<AddedToken> added_tokens;
};

// The members of tokenizer_config.json that concern token ids. All are empty when the file does not
// exist.
struct TokenizerConfig {
  bool add_bos_token = false;
  std::optional<std::string> bos_token, eos_token, pad_token, unk_token;
  std::vector<AddedToken> added_tokens;  // from added_tokens_decoder
};

// tokenizer.json of Hugging Face: byte-level BPE behind Split, Digits and ByteLevel pre-tokenizers.
// Throws Error naming what is missing or not supported.
TokenizerParts parse_tokenizer_json(const nlohmann::json& file);

// tiktoken.model: lines "base64(bytes) rank". The split pattern and the reserved tokens are not in
// the file; they are those of Kimi-K2 and Moonlight. `named` are the added tokens of
// tokenizer_config.json.
TokenizerParts parse_tiktoken(std::string_view file, const std::vector<AddedToken>& named);

TokenizerConfig parse_tokenizer_config(const nlohmann::json& file);

// Member `key` of `object`, or null when it is absent. Throws Error when `object` is not an object.
const nlohmann::json& member(const nlohmann::json& object, const char* key);
// Members of a given type. Throw Error naming the key, the expected type and the actual type.
const std::string& string_member(const nlohmann::json& object, const char* key);
const nlohmann::json& array_member(const nlohmann::json& object, const char* key);
const nlohmann::json& object_member(const nlohmann::json& object, const char* key);
bool bool_member(const nlohmann::json& object, const char* key, bool default_value);
// A token id: a number from 0 to kMaxTokenIds - 1. `of` names the token in the message.
int32_t token_id(const nlohmann::json& value, std::string_view of);
// One entry of tokenizer.json's added_tokens or tokenizer_config.json's added_tokens_decoder.
AddedToken parse_added_token(const nlohmann::json& entry, int32_t id);

}  // namespace tandem
