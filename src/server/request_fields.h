// Reads the fields of a request's JSON object with checked types and ranges; an invalid field
// throws an ApiError that names it. Null counts as missing. Unknown fields are ignored, since
// clients send many.
#pragma once
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

class RequestFields {
 public:
  // `path` is put before the names of fields in messages, such as "sampling_params."; empty for the
  // request itself. Throws ApiError unless `object` is an object. It must outlive this.
  explicit RequestFields(const nlohmann::ordered_json& object, std::string path = {});

  // nullptr when missing or null.
  const nlohmann::ordered_json* find(const std::string& key) const;

  // `default_value` is returned for a missing field.
  double number(const std::string& key, double min, double max, double default_value) const;
  int64_t integer(const std::string& key, int64_t min, int64_t max, int64_t default_value) const;
  std::optional<int64_t> integer(const std::string& key, int64_t min, int64_t max) const;
  bool boolean(const std::string& key, bool default_value) const;
  std::string string(const std::string& key, const std::string& default_value) const;
  // A field that is one string or a list of at most max_count strings.
  std::vector<std::string> strings(const std::string& key, size_t max_count) const;
  std::vector<int32_t> ids(const std::string& key) const;
  // The fields of a nested object; an empty object when it is missing.
  RequestFields object(const std::string& key) const;

  // Throws ApiError 400 "KEY is VALUE: must be EXPECTED".
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;

 private:
  const nlohmann::ordered_json& object_;
  const std::string path_;
};

// The value as a token id; nullopt if it is not an integer from 0 to 2^31 - 1.
std::optional<int32_t> as_token_id(const nlohmann::ordered_json& value);

}  // namespace tandem
