#include "server/request_fields.h"

#include <fmt/format.h>

#include <cmath>

#include "http/api_error.h"
#include "io/json.h"

namespace tandem {
namespace {

// The value as an integer, which 5.0 is as well; nullopt for any other value.
std::optional<int64_t> as_integer(const nlohmann::ordered_json& value) {
  if (value.is_number_unsigned()) {
    const auto v = value.get<uint64_t>();
    if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return {};
    return static_cast<int64_t>(v);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return {};
  const double v = value.get<double>();
  if (v != std::floor(v) || std::abs(v) > 1e15) return {};
  return static_cast<int64_t>(v);
}

const nlohmann::ordered_json& empty_object() {
  static const nlohmann::ordered_json empty = nlohmann::ordered_json::object();
  return empty;
}

}  // namespace

std::optional<int32_t> as_token_id(const nlohmann::ordered_json& value) {
  const auto id = as_integer(value);
  if (!id || *id < 0 || *id > std::numeric_limits<int32_t>::max()) return {};
  return static_cast<int32_t>(*id);
}

RequestFields::RequestFields(const nlohmann::ordered_json& object, std::string path)
    : object_(object), path_(std::move(path)) {
  if (object.is_object()) return;
  const std::string name = path_.substr(0, path_.size() - (path_.ends_with('.') ? 1 : 0));
  throw ApiError(400,
                 fmt::format("{} is {}: must be an object", name.empty() ? "the request" : name,
                             shown(object)),
                 name);
}

const nlohmann::ordered_json* RequestFields::find(const std::string& key) const {
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

double RequestFields::number(const std::string& key, double min, double max,
                             double default_value) const {
  const nlohmann::ordered_json* value = find(key);
  if (!value) return default_value;
  const double v = value->is_number() ? value->get<double>() : std::nan("");
  if (!(v >= min && v <= max)) refuse(key, fmt::format("a number between {} and {}", min, max));
  return v;
}

std::optional<int64_t> RequestFields::integer(const std::string& key, int64_t min,
                                              int64_t max) const {
  const nlohmann::ordered_json* value = find(key);
  if (!value) return {};
  const auto v = as_integer(*value);
  if (!v || *v < min || *v > max)
    refuse(key, fmt::format("an integer between {} and {}", min, max));
  return v;
}

int64_t RequestFields::integer(const std::string& key, int64_t min, int64_t max,
                               int64_t default_value) const {
  return integer(key, min, max).value_or(default_value);
}

bool RequestFields::boolean(const std::string& key, bool default_value) const {
  const nlohmann::ordered_json* value = find(key);
  if (!value) return default_value;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::string RequestFields::string(const std::string& key, const std::string& default_value) const {
  const nlohmann::ordered_json* value = find(key);
  if (!value) return default_value;
  if (!value->is_string()) refuse(key, "a string");
  return value->get<std::string>();
}

std::vector<std::string> RequestFields::strings(const std::string& key, size_t max_count) const {
  const nlohmann::ordered_json* value = find(key);
  if (!value) return {};
  if (value->is_string()) return {value->get<std::string>()};
  const std::string expected = fmt::format("a string or a list of at most {} strings", max_count);
  if (!value->is_array() || value->size() > max_count) refuse(key, expected);
  std::vector<std::string> strings;
  for (const nlohmann::ordered_json& item : *value) {
    if (!item.is_string()) refuse(key, expected);
    strings.push_back(item.get<std::string>());
  }
  return strings;
}

std::vector<int32_t> RequestFields::ids(const std::string& key) const {
  const nlohmann::ordered_json* value = find(key);
  if (!value) return {};
  if (!value->is_array()) refuse(key, "a list of token ids");
  std::vector<int32_t> ids;
  for (const nlohmann::ordered_json& id : *value) {
    const auto token = as_token_id(id);
    if (!token) refuse(key, "a list of token ids");
    ids.push_back(*token);
  }
  return ids;
}

RequestFields RequestFields::object(const std::string& key) const {
  const nlohmann::ordered_json* value = find(key);
  return RequestFields(value ? *value : empty_object(), path_ + key + ".");
}

void RequestFields::refuse(const std::string& key, const std::string& expected) const {
  const nlohmann::ordered_json* value = find(key);
  throw ApiError(400,
                 fmt::format("{}{} is {}: must be {}", path_, key,
                             value ? shown(*value) : "missing", expected),
                 path_ + key);
}

}  // namespace tandem
