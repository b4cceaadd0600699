#include "io/json_fields.h"

#include <cmath>

#include "core/check.h"
#include "io/json.h"

namespace tandem {

using nlohmann::json;

JsonFields::JsonFields(const json& object, std::string path)
    : object_(object), path_(std::move(path)) {
  require(object.is_object(), "{}: expected a JSON object, found {}", path_, shown(object));
}

const json* JsonFields::find(const std::string& key) {
  known_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonFields::has(const std::string& key) { return find(key) != nullptr; }

int JsonFields::integer(const std::string& key, int min, int max, std::optional<int> missing) {
  return static_cast<int>(whole(key, min, max, missing));
}

int64_t JsonFields::whole(const std::string& key, int64_t min, int64_t max,
                          std::optional<int64_t> missing) {
  const json* value = find(key);
  if (!value && missing) return *missing;
  const double number = value && value->is_number() ? value->get<double>() : std::nan("");
  if (!(number >= static_cast<double>(min) && number <= static_cast<double>(max)) ||
      number != std::floor(number))
    refuse(key, fmt::format("expected a whole number {} .. {}", min, max));
  return value->is_number_integer() ? value->get<int64_t>() : static_cast<int64_t>(number);
}

double JsonFields::positive(const std::string& key, double max, std::optional<double> missing) {
  const json* value = find(key);
  if (!value && missing) return *missing;
  const double number = value && value->is_number() ? value->get<double>() : std::nan("");
  if (!(number > 0 && number <= max))
    refuse(key, fmt::format("expected a number above 0 and at most {:g}", max));
  return number;
}

std::string JsonFields::text(const std::string& key, std::optional<std::string> missing) {
  const json* value = find(key);
  if (!value && missing) return *missing;
  if (!value || !value->is_string()) refuse(key, "expected a string");
  return value->get<std::string>();
}

bool JsonFields::boolean(const std::string& key, std::optional<bool> missing) {
  const json* value = find(key);
  if (!value && missing) return *missing;
  if (!value || !value->is_boolean()) refuse(key, "expected true or false");
  return value->get<bool>();
}

const json& JsonFields::list(const std::string& key, size_t max) {
  const json* value = find(key);
  if (!value || !value->is_array()) refuse(key, "expected a list");
  if (value->size() > max) refuse(key, fmt::format("expected a list of at most {} values", max));
  return *value;
}

JsonFields JsonFields::object(const std::string& key) {
  const json* value = find(key);
  if (!value || !value->is_object()) refuse(key, "expected an object");
  return {*value, path_ + ": " + key};
}

void JsonFields::refuse_others() const {
  for (const auto& [key, value] : object_.items())
    require(known_.contains(key), "{}: {} is no known field: remove or correct it", path_,
            shown(key));
}

void JsonFields::refuse(const std::string& key, std::string_view expected) const {
  const auto found = object_.find(key);
  if (found == object_.end()) fail("{}: {} is missing: {}", path_, key, expected);
  fail("{}: {} is {}: {}", path_, key, shown(*found), expected);
}

}  // namespace tandem
