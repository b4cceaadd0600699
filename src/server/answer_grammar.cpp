#include "server/answer_grammar.h"

#include <algorithm>

#include "core/check.h"
#include "http/api_error.h"
#include "text/grammar/pattern_grammar.h"
#include "text/grammar/schema_grammar.h"

namespace tandem {
namespace {

constexpr size_t kMaxCachedGrammars = 32;
constexpr int kMaxCachedNodes = 500'000;  // a node takes about 400 bytes

std::shared_ptr<const GrammarTokens> json_tokens(const TokenTrie& trie) {
  Grammar grammar;
  const JsonRules json(grammar);
  grammar.finish(json.value);
  return std::make_shared<GrammarTokens>(std::move(grammar), trie);
}

// Whether the template writes the arguments of an assistant's call in a code block.
bool template_uses_code_blocks(const Tokenizer& tokenizer, const ChatFormat* chat) {
  if (!chat) return false;
  const nlohmann::ordered_json function = {{"name", "f"}, {"arguments", "{}"}};
  const nlohmann::ordered_json call = {{"type", "function"}, {"function", function}};
  const nlohmann::ordered_json messages = {
      {{"role", "user"}, {"content", "x"}},
      {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", {call}}}};
  try {
    ChatOptions options;
    options.add_generation_prompt = false;
    return tokenizer.decode(chat->prompt(messages, options)).find("```json") != std::string::npos;
  } catch (const Error&) {
    return false;
  }
}

[[noreturn]] void refuse(const std::string& field, const std::string& what) {
  throw ApiError(400, field + ": " + what, field, "unsupported");
}

std::string key_of(const GenerationRequest& r, bool after_thinking) {
  const nlohmann::ordered_json key = {static_cast<int>(r.response_format.kind),
                                      r.response_format.schema,
                                      r.response_format.pattern,
                                      r.response_format.choices,
                                      r.requires_tool_call ? r.tools : nullptr,
                                      r.required_tool,
                                      r.allows_parallel_calls,
                                      after_thinking};
  return key.dump();
}

}  // namespace

AnswerGrammars::AnswerGrammars(const Tokenizer& tokenizer, const ChatFormat* chat)
    : tokenizer_(tokenizer),
      trie_(tokenizer),
      json_(json_tokens(trie_)),
      markers_(tokenizer.added_id(kKimiMarkers.section_begin) ? kKimiMarkers : kDeepSeekMarkers),
      uses_code_blocks_(template_uses_code_blocks(tokenizer, chat)) {}

std::shared_ptr<const GrammarTokens> AnswerGrammars::get(const GenerationRequest& request,
                                                         bool after_thinking) {
  const bool is_unconstrained =
      request.response_format.kind == ResponseFormat::Kind::kText && !request.requires_tool_call;
  if (is_unconstrained) return nullptr;
  std::string key = key_of(request, after_thinking);
  const auto move_to_front = [&] {
    const auto it =
        std::find_if(cache_.begin(), cache_.end(), [&](auto& k) { return k.key == key; });
    if (it != cache_.end()) cache_.splice(cache_.begin(), cache_, it);
    return it != cache_.end();
  };
  {
    const std::lock_guard lock(mutex_);
    if (move_to_front()) return cache_.front().tokens;
  }
  const auto tokens = std::make_shared<GrammarTokens>(build(request, after_thinking), trie_, json_);
  const std::lock_guard lock(mutex_);
  cache_.push_front({std::move(key), tokens});
  int n_nodes = 0;
  auto it = cache_.begin();
  for (size_t i = 0; it != cache_.end() && i < kMaxCachedGrammars; ++i, ++it) {
    n_nodes += it->tokens->grammar().n_nodes();
    if (n_nodes > kMaxCachedNodes && i > 0) break;
  }
  cache_.erase(it, cache_.end());
  return tokens;
}

Grammar AnswerGrammars::build(const GenerationRequest& request, bool after_thinking) const {
  Grammar g;
  const JsonRules json(g);
  const Rule root = g.add_rule();
  Node node = g.start(root);
  if (after_thinking) {
    const Node line = g.add_byte(node, '\n'), second = g.add_byte(line, '\n');
    g.add_epsilon(node, line);
    g.add_epsilon(line, second);
    node = second;
  }
  if (request.requires_tool_call) {
    g.add_call(node, tool_calls_rule(g, json, request), g.end(root));
  } else {
    g.add_call(node, response_format_rule(g, json, request.response_format), g.end(root));
    // If tools are optional, calls take the place of the answer.
    if (!request.tools.is_null()) g.add_call(node, tool_calls_rule(g, json, request), g.end(root));
  }
  try {
    g.finish(root);
  } catch (const Error& error) {
    refuse(request.requires_tool_call ? "tools" : request.response_format.field, error.what());
  }
  return g;
}

Grammar::Rule AnswerGrammars::response_format_rule(Grammar& g, const JsonRules& json,
                                                   const ResponseFormat& format) const {
  try {
    if (format.kind == ResponseFormat::Kind::kSchema) return add_schema(g, json, format.schema);
    const Rule rule = g.add_rule();
    for (const std::string& choice : format.choices) g.add_text(g.start(rule), choice, g.end(rule));
    if (format.kind == ResponseFormat::Kind::kPattern)
      add_pattern(g, g.start(rule), g.end(rule), format.pattern, Escaping::kNone);
    return rule;
  } catch (const Error& error) {
    refuse(format.field, error.what());
  }
}

// One or more calls between the markers of a section.
Grammar::Rule AnswerGrammars::tool_calls_rule(Grammar& g, const JsonRules& json,
                                              const GenerationRequest& request) const {
  const Rule rule = g.add_rule();
  const Node begin = add_marker(g, g.start(rule), markers_.section_begin), end = g.add_node();
  for (size_t i = 0; i < request.tools.size(); ++i) {
    const auto& function = request.tools[i]["function"];
    const std::string name = function["name"];
    if (!request.required_tool.empty() && name != request.required_tool) continue;
    const auto schema = function.find("parameters");
    const bool any = schema == function.end() || schema->is_null() || schema->empty();
    try {
      g.add_epsilon(add_tool_call(g, begin, name, any ? json.object : add_schema(g, json, *schema)),
                    end);
    } catch (const Error& error) {
      refuse(fmt::format("tools[{}].function.parameters", i), error.what());
    }
  }
  if (request.allows_parallel_calls && request.required_tool.empty()) {
    const bool on_own_lines = &markers_ == &kDeepSeekMarkers && uses_code_blocks_;
    g.add_epsilon(on_own_lines ? g.add_byte(end, '\n') : end, begin);
  }
  g.add_epsilon(add_marker(g, end, markers_.section_end), g.end(rule));
  return rule;
}

Grammar::Node AnswerGrammars::add_tool_call(Grammar& g, Node from, const std::string& name,
                                            Rule arguments) const {
  Node node = add_marker(g, from, markers_.call_begin);
  if (&markers_ == &kKimiMarkers) {
    constexpr int kNumberDigits = 4;
    const Node number = g.add_text(node, "functions." + name + ":");
    node = g.add_node();
    add_digits(g, number, node, kNumberDigits);
    node = g.add_call(add_marker(g, node, markers_.separator), arguments);
  } else if (uses_code_blocks_) {
    node = add_marker(g, g.add_text(node, "function"), markers_.separator);
    node = g.add_call(g.add_text(node, name + "\n```json\n"), arguments);
    node = g.add_text(node, "\n```");
  } else {
    node = g.add_call(add_marker(g, g.add_text(node, name), markers_.separator), arguments);
  }
  return add_marker(g, node, markers_.call_end);
}

Grammar::Node AnswerGrammars::add_marker(Grammar& g, Node from, std::string_view text) const {
  const auto id = tokenizer_.added_id(text);
  if (!id) return g.add_text(from, text);
  const Node to = g.add_node();
  g.add_token(from, *id, to);
  return to;
}

}  // namespace tandem
