// Arbitrary bytes as a template and as messages render or throw Error.
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/check.h"
#include "text/chat_template.h"

namespace {

using Json = nlohmann::ordered_json;

const char* const kContext = R"({
  "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Größe </think> 🙂"},
               {"role": "assistant", "content": null,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
  "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, true]}}}],
  "add_generation_prompt": true, "bos_token": "<s>", "eos_token": "</s>",
  "n": 3, "x": 1.5, "s": "a b\nc", "xs": [3, 1, 2], "d": {"b": 1, "a": "z"}})";

const tandem::ChatTemplate kPrintsAll("{{ messages|tojson }}");

// Ranges must be as the tokenizer requires: ascending, disjoint, not empty, at character
// boundaries.
void check_ranges(const tandem::jinja::Template::Text& rendered) {
  size_t done = 0;
  for (const tandem::ByteRange& range : rendered.given) {
    if (range.begin < done || range.begin >= range.end || range.end > rendered.text.size())
      std::abort();
    const std::string_view part(rendered.text.data() + range.begin, range.end - range.begin);
    if (tandem::find_invalid_utf8(part) != part.npos) std::abort();
    done = range.end;
  }
}

}  // namespace

// The template ends at a zero byte; messages as JSON follow it.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find('\0');
  const std::string_view source = input.substr(0, end);
  const Json context = Json::parse(kContext);
  const tandem::jinja::Limits limits{.steps = 50'000, .bytes = 1 << 20};
  try {
    check_ranges(tandem::jinja::Template(source).render(context, Json::object(), limits));
  } catch (const tandem::Error&) {
  }
  if (end == std::string_view::npos) return 0;
  const Json messages = Json::parse(input.substr(end + 1), nullptr, false);
  try {
    tandem::render_chat(kPrintsAll, messages, {});
    tandem::render_chat(tandem::ChatTemplate(source), messages, {});
  } catch (const tandem::Error&) {
  }
  return 0;
}
