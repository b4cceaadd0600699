// The grammar of an answer: the format that the client requested, tool calls in the model's syntax,
// or either.
#pragma once
#include <list>
#include <mutex>

#include "server/generation_request.h"
#include "server/tool_calls.h"
#include "text/chat_format.h"
#include "text/grammar/grammar_tokens.h"
#include "text/grammar/json_rules.h"

namespace tandem {

// Thread-safe. Caches grammars for later requests with the same format and tools.
class AnswerGrammars {
 public:
  // `chat` is null when the model has no chat template. The tokenizer must outlive this object.
  AnswerGrammars(const Tokenizer& tokenizer, const ChatFormat* chat);

  // Returns null when the answer is unconstrained. If `after_thinking`, up to two line breaks may
  // precede the answer. Throws ApiError naming the field and what in it is not supported.
  std::shared_ptr<const GrammarTokens> get(const GenerationRequest& request, bool after_thinking);

 private:
  using Node = Grammar::Node;
  using Rule = Grammar::Rule;

  Grammar build(const GenerationRequest& request, bool after_thinking) const;
  Rule response_format_rule(Grammar& grammar, const JsonRules& json,
                            const ResponseFormat& format) const;
  Rule tool_calls_rule(Grammar& grammar, const JsonRules& json,
                       const GenerationRequest& request) const;
  Node add_tool_call(Grammar& grammar, Node from, const std::string& name, Rule arguments) const;
  Node add_marker(Grammar& grammar, Node from, std::string_view text) const;

  const Tokenizer& tokenizer_;
  const TokenTrie trie_;
  const std::shared_ptr<const GrammarTokens> json_;
  const ToolCallMarkers& markers_;
  bool uses_code_blocks_ =
      false;  // calls as in V3 and R1: "function", and arguments in a code block

  struct CachedGrammar {
    std::string key;
    std::shared_ptr<const GrammarTokens> tokens;
  };
  std::mutex mutex_;
  std::list<CachedGrammar> cache_;  // most recently used first
};

}  // namespace tandem
