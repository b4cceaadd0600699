// A checkpoint's folder, and strict JSON for its files and the requests of clients: whatever is
// broken becomes one Error of one line that names its source.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tandem {

// The whole file. Throws Error when it cannot be read or is longer than max_bytes.
std::string read_text_file(const std::string& path, int64_t max_bytes);

// Throws Error unless `path` is a folder that can be read and is not empty.
void require_folder(const std::string& path);

// Throws Error for a syntax error, a duplicate key, or nesting beyond 64 levels. `source` is named
// in the message.
nlohmann::json parse_json(std::string_view text, std::string_view source);
// The same with the keys of objects in their order. Such objects look for a key one by one: a text
// that would take long is refused.
nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source);

// The same piece by piece, for what is too large for a tree; depth and keys are up to `handler`,
// which is told of syntax errors.
void scan_json(std::string_view text, std::string_view source, nlohmann::json::json_sax_t& handler);

// What an exception of nlohmann::json says, without its prefix, on one line of bounded length.
std::string json_message(const nlohmann::json::exception& error);

// Untrusted text for a message: in double quotes, escaped, cut to about 100 characters.
std::string shown(std::string_view text);
inline std::string shown(const std::string& text) { return shown(std::string_view(text)); }
// The same for a JSON value.
std::string shown(const nlohmann::json& value);
std::string shown(const nlohmann::ordered_json& value);

}  // namespace tandem
