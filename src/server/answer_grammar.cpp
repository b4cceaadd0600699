#include "server/answer_grammar.h"

#include <algorithm>

#include "core/check.h"
#include "server/api_error.h"
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
bool writes_fences(const Tokenizer& tokenizer, const ChatFormat* chat) {
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
  const nlohmann::ordered_json key = {
      static_cast<int>(r.form.kind),   r.form.schema,    r.form.pattern,  r.form.choices,
      r.must_call ? r.tools : nullptr, r.must_call_name, r.may_call_many, after_thinking};
  return key.dump();
}

}  // namespace

AnswerGrammars::AnswerGrammars(const Tokenizer& tokenizer, const ChatFormat* chat)
    : tokenizer_(tokenizer),
      trie_(tokenizer),
      json_(json_tokens(trie_)),
      marks_(tokenizer.added_id(kKimiTools.section_begin) ? kKimiTools : kDeepSeekTools),
      fenced_(writes_fences(tokenizer, chat)) {}

std::shared_ptr<const GrammarTokens> AnswerGrammars::of(const GenerationRequest& request,
                                                        bool after_thinking) {
  const bool is_free = request.form.kind == AnswerForm::Kind::kFree && !request.must_call;
  if (is_free) return nullptr;
  std::string key = key_of(request, after_thinking);
  const auto known = [&] {
    const auto it = std::find_if(kept_.begin(), kept_.end(), [&](auto& k) { return k.key == key; });
    if (it != kept_.end()) kept_.splice(kept_.begin(), kept_, it);
    return it != kept_.end();
  };
  {
    const std::lock_guard lock(mutex_);
    if (known()) return kept_.front().tokens;
  }
  const auto tokens = std::make_shared<GrammarTokens>(build(request, after_thinking), trie_, json_);
  const std::lock_guard lock(mutex_);
  kept_.push_front({std::move(key), tokens});
  int n_nodes = 0;
  auto it = kept_.begin();
  for (size_t i = 0; it != kept_.end() && i < kMaxCachedGrammars; ++i, ++it) {
    n_nodes += it->tokens->grammar().n_nodes();
    if (n_nodes > kMaxCachedNodes && i > 0) break;
  }
  kept_.erase(it, kept_.end());
  return tokens;
}

Grammar AnswerGrammars::build(const GenerationRequest& request, bool after_thinking) const {
  Grammar g;
  const JsonRules json(g);
  const Rule root = g.add_rule();
  Node node = g.start(root);
  if (after_thinking) {
    const Node line = g.byte(node, '\n'), second = g.byte(line, '\n');
    g.skip(node, line);
    g.skip(line, second);
    node = second;
  }
  if (request.must_call) {
    g.call(node, calls_rule(g, json, request), g.end(root));
  } else {
    g.call(node, form_rule(g, json, request.form), g.end(root));
    // If tools are optional, calls take the place of the answer.
    if (!request.tools.is_null()) g.call(node, calls_rule(g, json, request), g.end(root));
  }
  try {
    g.finish(root);
  } catch (const Error& error) {
    refuse(request.must_call ? "tools" : request.form.field, error.what());
  }
  return g;
}

Grammar::Rule AnswerGrammars::form_rule(Grammar& g, const JsonRules& json,
                                        const AnswerForm& form) const {
  try {
    if (form.kind == AnswerForm::Kind::kSchema) return add_schema(g, json, form.schema);
    const Rule rule = g.add_rule();
    for (const std::string& choice : form.choices) g.text(g.start(rule), choice, g.end(rule));
    if (form.kind == AnswerForm::Kind::kPattern)
      add_pattern(g, g.start(rule), g.end(rule), form.pattern, Writing::kRaw);
    return rule;
  } catch (const Error& error) {
    refuse(form.field, error.what());
  }
}

// One or more calls between the marks of a section.
Grammar::Rule AnswerGrammars::calls_rule(Grammar& g, const JsonRules& json,
                                         const GenerationRequest& request) const {
  const Rule rule = g.add_rule();
  const Node begin = mark(g, g.start(rule), marks_.section_begin), end = g.add_node();
  for (size_t i = 0; i < request.tools.size(); ++i) {
    const auto& function = request.tools[i]["function"];
    const std::string name = function["name"];
    if (!request.must_call_name.empty() && name != request.must_call_name) continue;
    const auto schema = function.find("parameters");
    const bool any = schema == function.end() || schema->is_null() || schema->empty();
    try {
      g.skip(call(g, begin, name, any ? json.object : add_schema(g, json, *schema)), end);
    } catch (const Error& error) {
      refuse(fmt::format("tools[{}].function.parameters", i), error.what());
    }
  }
  if (request.may_call_many && request.must_call_name.empty()) {
    const bool apart = &marks_ == &kDeepSeekTools && fenced_;
    g.skip(apart ? g.byte(end, '\n') : end, begin);
  }
  g.skip(mark(g, end, marks_.section_end), g.end(rule));
  return rule;
}

Grammar::Node AnswerGrammars::call(Grammar& g, Node from, const std::string& name,
                                   Rule arguments) const {
  Node node = mark(g, from, marks_.call_begin);
  if (&marks_ == &kKimiTools) {
    constexpr int kNumberDigits = 4;
    const Node number = g.text(node, "functions." + name + ":");
    node = g.add_node();
    add_digits(g, number, node, kNumberDigits);
    node = g.called(mark(g, node, marks_.separator), arguments);
  } else if (fenced_) {
    node = mark(g, g.text(node, "function"), marks_.separator);
    node = g.called(g.text(node, name + "\n```json\n"), arguments);
    node = g.text(node, "\n```");
  } else {
    node = g.called(mark(g, g.text(node, name), marks_.separator), arguments);
  }
  return mark(g, node, marks_.call_end);
}

Grammar::Node AnswerGrammars::mark(Grammar& g, Node from, std::string_view text) const {
  const auto id = tokenizer_.added_id(text);
  if (!id) return g.text(from, text);
  const Node to = g.add_node();
  g.token(from, *id, to);
  return to;
}

}  // namespace tandem
