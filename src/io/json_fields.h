// Reads the fields of one JSON object that may be written by hand, with checked types and ranges.
// Fields that were not read are refused as likely typing errors.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace tandem {

// Every reader returns `missing` for a missing or null key; without it the key is required. All
// throw Error with file, path of the key, value and what is expected. `object` must outlive this.
class JsonFields {
 public:
  // `path` is the beginning of messages: "machine.json: nodes[1]". Throws Error unless `object` is
  // an object.
  JsonFields(const nlohmann::json& object, std::string path);

  bool has(const std::string& key);
  int integer(const std::string& key, int min, int max, std::optional<int> missing = {});
  int64_t whole(const std::string& key, int64_t min, int64_t max,
                std::optional<int64_t> missing = {});
  // A number above 0 and at most `max`.
  double positive(const std::string& key, double max, std::optional<double> missing = {});
  std::string text(const std::string& key, std::optional<std::string> missing = {});
  bool boolean(const std::string& key, std::optional<bool> missing = {});
  const nlohmann::json& list(const std::string& key, size_t max);  // may be empty
  JsonFields object(const std::string& key);
  void ignore(const std::string& key) { known_.insert(key); }

  // Throws Error for a key that no reader was called for.
  void refuse_others() const;
  // Throws Error "PATH: KEY is VALUE: expected".
  [[noreturn]] void refuse(const std::string& key, std::string_view expected) const;
  const std::string& path() const { return path_; }

 private:
  const nlohmann::json* find(const std::string& key);
  const nlohmann::json& object_;
  std::string path_;
  std::set<std::string> known_;
};

}  // namespace tandem
