// The fields of a request's JSON object: each with its type and range, or an ApiError that names
// it. A missing field and null are the same; fields that nobody asks for are left alone, as clients
// send many.
#pragma once
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

class RequestFields {
 public:
  // `path` leads the names of fields in messages, such as "sampling_params."; empty for the request
  // itself. Throws ApiError when `object` is none. It outlives this.
  explicit RequestFields(const nlohmann::ordered_json& object, std::string path = {});

  // nullptr when missing.
  const nlohmann::ordered_json* find(const std::string& key) const;

  double number(const std::string& key, double min, double max, double missing) const;
  int64_t integer(const std::string& key, int64_t min, int64_t max, int64_t missing) const;
  std::optional<int64_t> integer(const std::string& key, int64_t min, int64_t max) const;
  bool boolean(const std::string& key, bool missing) const;
  std::string text(const std::string& key, const std::string& missing) const;
  // One text or a list of at most `most`.
  std::vector<std::string> texts(const std::string& key, size_t most) const;
  std::vector<int32_t> ids(const std::string& key) const;
  // Fields of an object in here; of an empty one when it is missing.
  RequestFields object(const std::string& key) const;

  // Throws ApiError 400 "KEY is VALUE: must be EXPECTED".
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;

 private:
  const nlohmann::ordered_json& object_;
  const std::string path_;
};

// A token id; nothing for anything else.
std::optional<int32_t> id_in(const nlohmann::ordered_json& value);

}  // namespace tandem
