#include "tests/config_families.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "io/json.h"

namespace tandem {

nlohmann::json family(const std::string& name) {
  const std::string path = TANDEM_SOURCE_DIR "/models/configs/" + name + ".json";
  return nlohmann::json::parse(read_text_file(path, 1 << 20));
}

ModelConfig parse(const nlohmann::json& config) {
  return ModelConfig::from_json(config.dump(), "config.json");
}

nlohmann::json with(const std::string& name, const nlohmann::json& changes) {
  nlohmann::json config = family(name);
  for (const auto& [key, value] : changes.items()) config[key] = value;
  return config;
}

nlohmann::json without(const std::string& name, const std::vector<std::string>& keys) {
  nlohmann::json config = family(name);
  for (const std::string& key : keys) config.erase(key);
  return config;
}

nlohmann::json with_inner(const std::string& name, const std::string& object,
                          const nlohmann::json& changes) {
  nlohmann::json config = family(name);
  for (const auto& [key, value] : changes.items()) config[object][key] = value;
  return config;
}

std::string message(const std::function<void()>& parse_it) {
  try {
    parse_it();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

std::string message(const nlohmann::json& config) {
  return message([&] { parse(config); });
}

std::string text_message(const std::string& text) {
  return message([&] { ModelConfig::from_json(text, "config.json"); });
}

void expect_says(const std::string& text, const std::vector<std::string>& parts) {
  EXPECT_EQ(text.find('\n'), text.npos) << text;
  EXPECT_EQ(text.rfind("config.json: ", 0), 0u) << text;
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), text.npos) << part << "\n" << text;
}

}  // namespace tandem
