#include "bench/serving/answer_reader.h"

#include <optional>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

nlohmann::json parsed(std::string_view data) {
  nlohmann::json value = nlohmann::json::parse(data, nullptr, false);
  require(value.is_object(), "a line is no JSON object: {}", shown(data));
  return value;
}

const nlohmann::json& first_choice(const nlohmann::json& event, std::string_view data) {
  const auto choices = event.find("choices");
  require(choices != event.end() && choices->is_array() && !choices->empty() &&
              choices->front().is_object(),
          "a line has no choice: {}", shown(data));
  return choices->front();
}

// Empty where the field is missing, null or of another type: empty text is ignored anyway.
std::string text_in(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// A chat's reasoning counts as text like its content; servers use one of two names for it.
std::string chat_text_in(const nlohmann::json& message) {
  std::string reasoning = text_in(message, "reasoning_content");
  if (reasoning.empty()) reasoning = text_in(message, "reasoning");
  return reasoning + text_in(message, "content");
}

// The count `field` in the event's object `name`; both may be missing.
std::optional<int> count_in(const nlohmann::json& event, const char* name, const char* field) {
  const auto counts = event.find(name);
  if (counts == event.end() || !counts->is_object()) return {};
  const auto n = counts->find(field);
  if (n == counts->end() || !n->is_number_integer()) return {};
  return n->get<int>();
}

std::string_view stripped(std::string_view line) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  const size_t first = line.find_first_not_of(kSpace);
  if (first == line.npos) return {};
  return line.substr(first, line.find_last_not_of(kSpace) - first + 1);
}

}  // namespace

void AnswerReader::line(std::string_view line, double seconds) {
  std::string_view data = stripped(line);
  if (data.empty()) return;
  if (data.starts_with("data: ")) data.remove_prefix(6);
  any_ = true;
  output_.latency = seconds;
  if (data == "[DONE]") return;
  switch (api_) {
    case ServingApi::kCompletions:
      return completion(data, seconds);
    case ServingApi::kChat:
      return chat(data, seconds);
    case ServingApi::kGenerate:
      return generate(data, seconds);
  }
}

void AnswerReader::finish() {
  require(any_, "the answer is empty");
  output_.success = true;
}

void AnswerReader::completion(std::string_view data, double seconds) {
  const nlohmann::json event = parsed(data);
  take_prompt_tokens(event, "usage");
  const nlohmann::json& choice = first_choice(event, data);
  require(choice.contains("text"), "a line has no text: {}", shown(data));
  const std::string text = text_in(choice, "text");
  if (text.empty()) return;
  count_gap(seconds);
  output_.text += text;
  take_output_tokens(event);
}

void AnswerReader::chat(std::string_view data, double seconds) {
  const nlohmann::json event = parsed(data);
  take_output_tokens(event);
  take_prompt_tokens(event, "usage");
  if (!streams_) {
    const nlohmann::json& choice = first_choice(event, data);
    require(choice.contains("message"), "the answer has no message: {}", shown(data));
    output_.text = chat_text_in(choice["message"]);
    output_.ttft = seconds;
    return;
  }
  const auto choices = event.find("choices");
  if (choices == event.end() || choices->empty()) return;  // usage only
  const nlohmann::json& choice = first_choice(event, data);
  const auto delta = choice.find("delta");
  const std::string text = delta != choice.end() && delta->is_object() ? chat_text_in(*delta) : "";
  if (text.empty()) return;
  count_gap(seconds);
  output_.text += text;
}

// Every event repeats all text so far. Several tokens in one event share the gap equally.
void AnswerReader::generate(std::string_view data, double seconds) {
  const nlohmann::json event = parsed(data);
  take_prompt_tokens(event, "meta_info");
  std::string text = text_in(event, "text");
  if (text.empty()) return;
  const nlohmann::json about = event.value("meta_info", nlohmann::json::object());
  require(about.contains("completion_tokens") && about["completion_tokens"].is_number_integer(),
          "a line has no meta_info.completion_tokens: {}", shown(data));
  output_.output_tokens = about["completion_tokens"].get<int>();
  output_.text = std::move(text);
  const int n_new = output_.output_tokens - counted_tokens_;
  if (output_.ttft > 0 && n_new == 0) return;
  count_gap(seconds, n_new);
  counted_tokens_ = output_.output_tokens;
}

void AnswerReader::take_output_tokens(const nlohmann::json& event) {
  output_.output_tokens =
      count_in(event, "usage", "completion_tokens").value_or(output_.output_tokens);
}

void AnswerReader::take_prompt_tokens(const nlohmann::json& event, const char* name) {
  const int n = count_in(event, name, "prompt_tokens").value_or(0);
  if (n > 0) output_.server_prompt_tokens = n;
}

void AnswerReader::count_gap(double seconds, int n_tokens) {
  if (output_.ttft == 0) {
    output_.ttft = seconds;
  } else {
    for (int i = 0; i < n_tokens; ++i) output_.itls.push_back((seconds - last_) / n_tokens);
  }
  last_ = seconds;
}

}  // namespace tandem
