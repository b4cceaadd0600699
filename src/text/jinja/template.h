// A Jinja template from a checkpoint: parsed once, rendered with a JSON context in the environment
// of Hugging Face (trim_blocks, lstrip_blocks, loop controls, raise_exception, tojson without
// escapes for HTML, strftime_now).
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "text/jinja/value.h"

namespace tandem::jinja {

// Immutable and thread-safe.
class Template {
 public:
  // Throws Error "chat template line N: .." when the source cannot be parsed.
  explicit Template(std::string_view source);
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;
  ~Template();

  struct Text {
    std::string text;
    std::vector<ByteRange> given;  // ranges that come from the context: ascending, disjoint
  };
  // `context` and `constants` are objects whose members are the template's variables; the texts of
  // `constants` count as text of the template. Throws Error naming the line; when the template
  // calls raise_exception(text), the message ends with that text.
  Text render(const nlohmann::ordered_json& context,
              const nlohmann::ordered_json& constants = nlohmann::ordered_json::object(),
              const Limits& limits = {}) const;

 private:
  struct Parsed;
  std::unique_ptr<const Parsed> parsed_;
};

}  // namespace tandem::jinja
