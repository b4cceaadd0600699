// Configurations of models/configs, unchanged, edited and parsed, for tests.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/config.h"

namespace tandem {

nlohmann::json family(const std::string& name);

ModelConfig parse(const nlohmann::json& config);

// The family's configuration with keys replaced, removed, or changed within an object.
nlohmann::json with(const std::string& name, const nlohmann::json& changes);
nlohmann::json without(const std::string& name, const std::vector<std::string>& keys);
nlohmann::json with_inner(const std::string& name, const std::string& object,
                          const nlohmann::json& changes);

std::string message(const std::function<void()>& parse_it);
std::string message(const nlohmann::json& config);
std::string text_message(const std::string& text);

// The message is one line that names the file and contains all `parts`.
void expect_says(const std::string& text, const std::vector<std::string>& parts);

}  // namespace tandem
