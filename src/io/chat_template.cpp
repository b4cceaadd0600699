#include "io/chat_template.h"

#include <optional>

#include "core/check.h"
#include "io/jinja/characters.h"
#include "io/utf8.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Around contents: characters for private use (no letters, no spaces, never escaped by tojson)
// that the conversation does not hold.
struct Marks {
  std::string open, close;
};

void check_content(const Json& content, size_t index) {
  if (content.is_null() || content.is_string()) return;
  require(content.is_array(), "message {}: the content must be a text, null or a list of parts",
          index);
  for (const Json& part : content)
    require(part.is_object() && part.contains("type") && part["type"] == "text" &&
                part.contains("text") && part["text"].is_string(),
            "message {}: a part of the content must be {{\"type\": \"text\", \"text\": ..}}; "
            "other types are not supported",
            index);
}

void check_messages(const Json& messages) {
  require(messages.is_array(), "messages must be a list of objects with a role and a content");
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    require(message.is_object() && message.contains("role") && message["role"].is_string(),
            "message {} must be an object with a role such as \"user\"", i);
    if (message.contains("content")) check_content(message["content"], i);
  }
}

Json context_of(const Json& messages, const ChatOptions& options) {
  require(options.tools.is_null() || options.tools.is_array(), "tools must be a list");
  require(options.extra.is_object(), "arguments for the chat template must be an object");
  Json context = {
      {"messages", messages},           {"tools", options.tools},
      {"documents", nullptr},           {"add_generation_prompt", options.add_generation_prompt},
      {"bos_token", options.bos_token}, {"eos_token", options.eos_token}};
  for (const auto& [name, value] : options.extra.items()) context[name] = value;
  return context;
}

// Any two unused characters of plane 16, so that no one can spoil the marks by typing them.
std::optional<Marks> unused_marks(std::string_view text) {
  constexpr char32_t kFirst = 0x100000, kLast = 0x10FFFD;
  std::vector<bool> used(kLast - kFirst + 1, false);
  for (size_t at = text.find('\xF4'); at != text.npos; at = text.find('\xF4', at + 1))
    if (const char32_t c = decode_utf8(text, at).value; c <= kLast) used[c - kFirst] = true;
  Marks marks;
  for (char32_t c = kFirst; c <= kLast && marks.close.empty(); ++c)
    if (!used[c - kFirst]) append_utf8(marks.open.empty() ? marks.open : marks.close, c);
  if (marks.close.empty()) return {};
  return marks;
}

// White space stays outside, so that a template that trims contents trims them as before.
void mark(Json& text, const Marks& marks) {
  if (!text.is_string()) return;
  const std::string& whole = text.get_ref<const std::string&>();
  const std::string_view core = jinja::strip(whole, jinja::Side::kBoth);
  if (core.empty()) return;
  const auto begin = static_cast<size_t>(core.data() - whole.data());
  std::string marked = whole.substr(0, begin);
  marked += marks.open;
  marked += core;
  marked += marks.close;
  marked += whole.substr(begin + core.size());
  text = std::move(marked);
}

Json with_marks(Json messages, const Marks& marks) {
  for (Json& message : messages) {
    if (message["role"] == "assistant" || !message.contains("content")) continue;
    Json& content = message["content"];
    if (content.is_array())
      for (Json& part : content) mark(part["text"], marks);
    else
      mark(content, marks);
  }
  return messages;
}

// The text without marks and where they were, unless they are not in pairs.
std::optional<RenderedChat> take_marks(std::string_view marked, const Marks& marks) {
  RenderedChat chat;
  bool open = false;
  size_t begin = 0;
  for (size_t at = 0; at < marked.size();) {
    const std::string_view rest = marked.substr(at);
    const bool opens = rest.starts_with(marks.open), closes = rest.starts_with(marks.close);
    if (!opens && !closes) {
      chat.text += marked[at++];
      continue;
    }
    if (opens == open) return {};
    if (opens)
      begin = chat.text.size();
    else
      chat.content_ranges.push_back({begin, chat.text.size()});
    open = opens;
    at += marks.open.size();
  }
  if (open) return {};
  return chat;
}

std::optional<RenderedChat> render_marked(const ChatTemplate& chat_template, const Json& messages,
                                          const ChatOptions& options, const Marks& marks) {
  try {
    const Json context = context_of(with_marks(messages, marks), options);
    return take_marks(chat_template.render(context), marks);
  } catch (const Error&) {  // a template may refuse a marked content that it takes unmarked
    return {};
  }
}

}  // namespace

std::string render_chat(const ChatTemplate& chat_template, const Json& messages,
                        const ChatOptions& options) {
  check_messages(messages);
  return chat_template.render(context_of(messages, options));
}

RenderedChat render_chat_with_ranges(const ChatTemplate& chat_template, const Json& messages,
                                     const ChatOptions& options) {
  std::string text = render_chat(chat_template, messages, options);
  if (const std::optional<Marks> marks = unused_marks(text + messages.dump()))
    if (auto marked = render_marked(chat_template, messages, options, *marks))
      if (marked->text == text) return *std::move(marked);
  return {.text = std::move(text), .content_ranges = {}, .has_ranges = false};
}

}  // namespace tandem
