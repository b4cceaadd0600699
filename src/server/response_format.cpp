#include "server/response_format.h"

#include <fmt/format.h>

#include "core/check.h"
#include "http/api_error.h"
#include "io/json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
using Kind = ResponseFormat::Kind;

const Json kAnyObject = {{"type", "object"}};

[[noreturn]] void unsupported(const std::string& field, const std::string& what) {
  throw ApiError(400, fmt::format("{} is not supported", what), field, "unsupported");
}

// A field that holds a schema, or a string with the JSON of one, as in vLLM and SGLang.
ResponseFormat schema_format(const RequestFields& fields, const std::string& key) {
  const Json& value = *fields.find(key);
  ResponseFormat format{.kind = Kind::kSchema, .schema = value, .field = key};
  if (value.is_string()) {
    try {
      format.schema = parse_ordered_json(value.get<std::string>(), key);
    } catch (const Error& error) {
      throw ApiError(400, error.what(), key);
    }
  }
  if (!format.schema.is_object()) fields.refuse(key, "a JSON schema");
  return format;
}

ResponseFormat pattern_format(const RequestFields& fields, const std::string& key) {
  return {.kind = Kind::kPattern, .pattern = fields.string(key, ""), .field = key};
}

ResponseFormat choice_format(const RequestFields& fields, const std::string& key) {
  constexpr size_t kMaxChoices = 1000;
  ResponseFormat format{
      .kind = Kind::kChoice, .choices = fields.strings(key, kMaxChoices), .field = key};
  bool any_empty = format.choices.empty();
  for (const std::string& choice : format.choices) any_empty = any_empty || choice.empty();
  if (any_empty) fields.refuse(key, "a list of strings, none of them empty");
  return format;
}

ResponseFormat openai_format(const RequestFields& request) {
  const std::string key = "response_format";
  const RequestFields fields = request.object(key);
  const std::string type = fields.string("type", "text");
  if (type == "text") return {};
  if (type == "json_object") return {.kind = Kind::kSchema, .schema = kAnyObject, .field = key};
  if (type != "json_schema") unsupported(key, "response_format " + shown(type));
  if (!fields.find("json_schema")) fields.refuse("json_schema", "an object with a schema");
  const RequestFields named = fields.object("json_schema");
  named.string("name", "");
  named.boolean("strict", false);
  ResponseFormat format{.kind = Kind::kSchema, .schema = kAnyObject, .field = key};
  if (!named.find("schema")) return format;
  format = schema_format(named, "schema");
  format.field = "response_format.json_schema.schema";
  return format;
}

void add(std::vector<ResponseFormat>& formats, ResponseFormat format,
         const std::string& prefix = {}) {
  if (format.kind == Kind::kText) return;
  format.field = prefix + format.field;
  formats.push_back(std::move(format));
}

}  // namespace

ResponseFormat read_response_format(const RequestFields& request) {
  std::vector<ResponseFormat> formats;
  add(formats, openai_format(request));
  for (const char* key : {"guided_json", "json_schema"})
    if (request.find(key)) add(formats, schema_format(request, key));
  for (const char* key : {"guided_regex", "regex"})
    if (request.find(key)) add(formats, pattern_format(request, key));
  if (request.find("guided_choice")) add(formats, choice_format(request, "guided_choice"));
  for (const char* key : {"guided_grammar", "ebnf", "structural_tag"})
    if (request.find(key)) unsupported(key, key);

  const RequestFields outputs = request.object("structured_outputs");
  const std::string prefix = "structured_outputs.";
  if (outputs.find("json")) add(formats, schema_format(outputs, "json"), prefix);
  if (outputs.find("regex")) add(formats, pattern_format(outputs, "regex"), prefix);
  if (outputs.find("choice")) add(formats, choice_format(outputs, "choice"), prefix);
  if (outputs.boolean("json_object", false))
    add(formats, {.kind = Kind::kSchema, .schema = kAnyObject, .field = "json_object"}, prefix);
  for (const char* key : {"grammar", "structural_tag"})
    if (outputs.find(key)) unsupported(prefix + key, prefix + key);

  if (formats.size() > 1)
    throw ApiError(400,
                   fmt::format("{} and {} are both given: only one format is possible",
                               formats[0].field, formats[1].field),
                   formats[1].field);
  return formats.empty() ? ResponseFormat() : std::move(formats.front());
}

}  // namespace tandem
