// The files of a tokenizer as plain data, with errors that name the key.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/bpe.h"
#include "io/tokenizer_added.h"
#include "io/tokenizer_splits.h"

namespace tandem {

// What a tokenizer is made of, whichever file it came from.
struct TokenizerParts {
  BpeVocabulary vocabulary;
  std::vector<SplitRule> splits;
  std::vector<AddedToken> added_tokens;
};

// The members of tokenizer_config.json that concern token ids. All empty when there is no such
// file.
struct TokenizerConfig {
  bool add_bos_token = false;
  std::optional<std::string> bos_token, eos_token, pad_token, unk_token;
  std::vector<AddedToken> added_tokens;  // of added_tokens_decoder
};

// tokenizer.json of Hugging Face: byte-level BPE behind Split, Digits and ByteLevel pre-tokenizers.
// Throws Error for every other kind, naming what is not supported or missing.
TokenizerParts parse_tokenizer_json(const nlohmann::json& file);

// tiktoken.model: lines "base64(bytes) rank". The split pattern and the reserved tokens are not in
// the file; they are those of Kimi-K2 and Moonlight. `named` are the added tokens of
// tokenizer_config.json.
TokenizerParts parse_tiktoken(std::string_view file, const std::vector<AddedToken>& named);

TokenizerConfig parse_tokenizer_config(const nlohmann::json& file);

// Member `key` of `object`; null when it is absent. Throws Error when `object` is not an object.
const nlohmann::json& member(const nlohmann::json& object, const char* key);
// Typed members. Throw Error naming the key, the type wanted and the type found.
const std::string& string_member(const nlohmann::json& object, const char* key);
const nlohmann::json& array_member(const nlohmann::json& object, const char* key);
const nlohmann::json& object_member(const nlohmann::json& object, const char* key);
bool bool_member(const nlohmann::json& object, const char* key, bool if_absent);
// A token id: a number from 0 to kMaxTokenIds - 1. `of` is for the message.
int32_t token_id(const nlohmann::json& value, std::string_view of);
// One entry of tokenizer.json's added_tokens or tokenizer_config.json's added_tokens_decoder.
AddedToken parse_added_token(const nlohmann::json& entry, int32_t id);

}  // namespace tandem
