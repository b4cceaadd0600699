// Reads a checkpoint's text files, and strict JSON from them and from clients' requests. Every
// failure is one Error of one line that names its source.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tandem {

// Returns the whole file. Throws Error when it cannot be read or is longer than max_bytes.
std::string read_text_file(const std::string& path, int64_t max_bytes);

// Throws Error unless `path` is a folder that can be read and is not empty.
void require_folder(const std::string& path);

// Throws Error for a syntax error, a duplicate key, or nesting beyond 64 levels. `source` is named
// in the message.
nlohmann::json parse_json(std::string_view text, std::string_view source);
// Like parse_json(), but keeps the order of keys. Such objects are searched linearly, so a text
// with so many keys that parsing would take long is refused with an Error.
nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source);

// Parses event by event, for texts too large for a tree. `handler` is called for syntax errors and
// must itself check depth and duplicate keys.
void scan_json(std::string_view text, std::string_view source, nlohmann::json::json_sax_t& handler);

// The message of an exception of nlohmann::json, without its prefix, as one line of bounded length.
std::string json_message(const nlohmann::json::exception& error);

// Quotes untrusted text for a message: in double quotes, escaped, cut to about 100 characters.
std::string shown(std::string_view text);
inline std::string shown(const std::string& text) { return shown(std::string_view(text)); }
// A JSON value as text for a message, escaped and cut in the same way.
std::string shown(const nlohmann::json& value);
std::string shown(const nlohmann::ordered_json& value);

// The value, or null if empty.
template <class T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

// Characters that must be escaped inside JSON strings.
// True for quotation marks, backslashes and characters below 0x20.
bool needs_json_escape(char32_t c);
// The escape sequence of a character below 0x10000: the short form, such as "\n", if JSON has one,
// else the form "\u001f".
std::string json_escape(char32_t c);
// Replaces the escapes of a URL or of a JSON pointer in one, such as "%2F", by their bytes.
std::string percent_decoded(std::string_view text);

}  // namespace tandem
