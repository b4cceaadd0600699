#include "server/answer_form.h"

#include <fmt/format.h>

#include "core/check.h"
#include "io/json.h"
#include "server/api_error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
using Kind = AnswerForm::Kind;

const Json kAnyObject = {{"type", "object"}};

[[noreturn]] void unsupported(const std::string& field, const std::string& what) {
  throw ApiError(400, fmt::format("{} is not supported", what), field, "unsupported");
}

// A field that holds a schema, or a string with the JSON of one, as in vLLM and SGLang.
AnswerForm schema_form(const RequestFields& fields, const std::string& key) {
  const Json& value = *fields.find(key);
  AnswerForm form{.kind = Kind::kSchema, .schema = value, .field = key};
  if (value.is_string()) {
    try {
      form.schema = parse_ordered_json(value.get<std::string>(), key);
    } catch (const Error& error) {
      throw ApiError(400, error.what(), key);
    }
  }
  if (!form.schema.is_object()) fields.refuse(key, "a JSON schema");
  return form;
}

AnswerForm pattern_form(const RequestFields& fields, const std::string& key) {
  return {.kind = Kind::kPattern, .pattern = fields.text(key, ""), .field = key};
}

AnswerForm choice_form(const RequestFields& fields, const std::string& key) {
  constexpr size_t kMaxChoices = 1000;
  AnswerForm form{.kind = Kind::kChoice, .choices = fields.texts(key, kMaxChoices), .field = key};
  bool any_empty = form.choices.empty();
  for (const std::string& choice : form.choices) any_empty = any_empty || choice.empty();
  if (any_empty) fields.refuse(key, "a list of texts, none of them empty");
  return form;
}

AnswerForm response_format(const RequestFields& request) {
  const std::string key = "response_format";
  const RequestFields format = request.object(key);
  const std::string type = format.text("type", "text");
  if (type == "text") return {};
  if (type == "json_object") return {.kind = Kind::kSchema, .schema = kAnyObject, .field = key};
  if (type != "json_schema") unsupported(key, "response_format " + shown(type));
  if (!format.find("json_schema")) format.refuse("json_schema", "an object with a schema");
  const RequestFields named = format.object("json_schema");
  named.text("name", "");
  named.boolean("strict", false);
  AnswerForm form{.kind = Kind::kSchema, .schema = kAnyObject, .field = key};
  if (!named.find("schema")) return form;
  form = schema_form(named, "schema");
  form.field = "response_format.json_schema.schema";
  return form;
}

void add(std::vector<AnswerForm>& forms, AnswerForm form, const std::string& prefix = {}) {
  if (form.kind == Kind::kFree) return;
  form.field = prefix + form.field;
  forms.push_back(std::move(form));
}

}  // namespace

AnswerForm read_answer_form(const RequestFields& request) {
  std::vector<AnswerForm> forms;
  add(forms, response_format(request));
  for (const char* key : {"guided_json", "json_schema"})
    if (request.find(key)) add(forms, schema_form(request, key));
  for (const char* key : {"guided_regex", "regex"})
    if (request.find(key)) add(forms, pattern_form(request, key));
  if (request.find("guided_choice")) add(forms, choice_form(request, "guided_choice"));
  for (const char* key : {"guided_grammar", "ebnf", "structural_tag"})
    if (request.find(key)) unsupported(key, key);

  const RequestFields outputs = request.object("structured_outputs");
  const std::string prefix = "structured_outputs.";
  if (outputs.find("json")) add(forms, schema_form(outputs, "json"), prefix);
  if (outputs.find("regex")) add(forms, pattern_form(outputs, "regex"), prefix);
  if (outputs.find("choice")) add(forms, choice_form(outputs, "choice"), prefix);
  if (outputs.boolean("json_object", false))
    add(forms, {.kind = Kind::kSchema, .schema = kAnyObject, .field = "json_object"}, prefix);
  for (const char* key : {"grammar", "structural_tag"})
    if (outputs.find(key)) unsupported(prefix + key, prefix + key);

  if (forms.size() > 1)
    throw ApiError(400,
                   fmt::format("{} and {} are asked for together: an answer has one form",
                               forms[0].field, forms[1].field),
                   forms[1].field);
  return forms.empty() ? AnswerForm() : std::move(forms.front());
}

}  // namespace tandem
