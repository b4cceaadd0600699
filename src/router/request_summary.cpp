#include "router/request_summary.h"

#include "core/check.h"
#include "io/json.h"
#include "text/prefix_table.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

void append_text(const Json& value, std::string& text) {
  text += value.is_string() ? value.get_ref<const std::string&>()
                            : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  text += '\0';
}

// The text that a prompt begins with; chat templates put tools before messages.
std::string prompt_text(const Json& json) {
  std::string text;
  for (const char* field : {"tools", "messages", "prompt", "text", "input_ids"}) {
    const auto found = json.find(field);
    if (found == json.end() || found->is_null()) continue;
    if (!found->is_array()) {
      append_text(*found, text);
      continue;
    }
    for (const Json& item : *found) append_text(item, text);
  }
  return text;
}

}  // namespace

RequestSummary summary_of(const std::string& body) {
  RequestSummary summary;
  Json json;
  try {
    json = parse_ordered_json(body, "the request's body");
  } catch (const Error&) {
    return summary;
  }
  if (!json.is_object()) return summary;
  const auto model = json.find("model");
  if (model != json.end() && model->is_string()) summary.model = *model;
  const std::string text = prompt_text(json);
  summary.prompt_bytes = static_cast<int64_t>(text.size());
  summary.prefixes = prefix_hashes(text);
  return summary;
}

}  // namespace tandem
