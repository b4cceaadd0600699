#include "model/config_json.h"

#include <cmath>

#include "core/check.h"
#include "io/json.h"

namespace tandem {

using nlohmann::json;

bool is_whole(const json& value, int min, int max) {
  if (!value.is_number()) return false;
  const double number = value.get<double>();
  return number >= min && number <= max && number == std::floor(number);
}

ConfigJson::ConfigJson(std::string_view text, std::string_view source)
    : object_(parse_json(text, source)), source_(source) {
  require(object_.is_object(), "{}: expected a JSON object, found {}", source, shown(object_));
}

bool ConfigJson::has(const std::string& key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

std::string ConfigJson::key_with_prefix(std::string_view prefix) const {
  for (const auto& [key, value] : object_.items())
    if (key.starts_with(prefix) && !value.is_null()) return key;
  return {};
}

int ConfigJson::integer(const std::string& key, int min, int max,
                        std::optional<int> missing) const {
  if (missing && !has(key)) return *missing;
  if (!has(key) || !is_whole(object_[key], min, max))
    refuse(key, fmt::format("expected a whole number {} .. {}", min, max));
  return object_[key].get<int>();
}

double ConfigJson::number(const std::string& key, double min, double max,
                          std::optional<double> missing) const {
  if (missing && !has(key)) return *missing;
  const auto expected = [&] { return fmt::format("expected a number {} .. {}", min, max); };
  if (!has(key) || !object_[key].is_number()) refuse(key, expected());
  const double value = object_[key].get<double>();
  if (!(value >= min && value <= max)) refuse(key, expected());
  return value;
}

bool ConfigJson::boolean(const std::string& key, bool missing) const {
  if (!has(key)) return missing;
  if (!object_[key].is_boolean()) refuse(key, "expected true or false");
  return object_[key].get<bool>();
}

std::string ConfigJson::text(const std::string& key, std::optional<std::string> missing) const {
  if (missing && !has(key)) return *missing;
  if (!has(key) || !object_[key].is_string()) refuse(key, "expected a string");
  return object_[key].get<std::string>();
}

const json& ConfigJson::array(const std::string& key) const {
  if (!has(key) || !object_[key].is_array() || object_[key].empty())
    refuse(key, "expected a list of one or more values");
  return object_[key];
}

ConfigJson ConfigJson::object(const std::string& key) const {
  if (!has(key) || !object_[key].is_object()) refuse(key, "expected an object");
  return ConfigJson(object_[key], source_, prefix_ + key + ".");
}

void ConfigJson::refuse(const std::string& key, std::string_view expected) const {
  const auto found = object_.find(key);
  if (found == object_.end()) fail("{}: {}{} is missing: {}", source_, prefix_, key, expected);
  fail("{}: {}{} is {}: {}", source_, prefix_, key, shown(*found), expected);
}

}  // namespace tandem
