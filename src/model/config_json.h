// Reads one object of a configuration file key by key, with checked types and ranges.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace tandem {

// Whether the value is a whole number min .. max; 4096.0 is one.
bool is_whole(const nlohmann::json& value, int min, int max);

// Every reader returns `missing` for a missing or null key; without it the key is required. All
// throw Error with file, key, value and what is expected.
class ConfigJson {
 public:
  // The whole text, which must be an object. `source` names the file in messages.
  ConfigJson(std::string_view text, std::string_view source);

  // Whether the key is present and not null.
  bool has(const std::string& key) const;
  // Whether the key is present, even if null.
  bool mentions(const std::string& key) const { return object_.contains(key); }
  // First key that starts with `prefix` and is not null; empty if there is none.
  std::string key_with_prefix(std::string_view prefix) const;

  int integer(const std::string& key, int min, int max, std::optional<int> missing = {}) const;
  double number(const std::string& key, double min, double max,
                std::optional<double> missing = {}) const;
  bool boolean(const std::string& key, bool missing) const;
  std::string text(const std::string& key, std::optional<std::string> missing = {}) const;
  const nlohmann::json& array(const std::string& key) const;
  ConfigJson object(const std::string& key) const;
  const nlohmann::json& value(const std::string& key) const { return object_.at(key); }

  // Throws Error "FILE: KEY is VALUE: `expected`".
  [[noreturn]] void refuse(const std::string& key, std::string_view expected) const;

 private:
  ConfigJson(nlohmann::json object, std::string source, std::string prefix)
      : object_(std::move(object)), source_(std::move(source)), prefix_(std::move(prefix)) {}
  nlohmann::json object_;
  std::string source_;
  std::string prefix_;  // "rope_scaling." inside that object
};

}  // namespace tandem
