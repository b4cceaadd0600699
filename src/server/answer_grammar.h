// The grammar of an answer: the form that its client asked for, calls of tools as the model writes
// them, or either.
#pragma once
#include <list>
#include <mutex>

#include "io/chat_format.h"
#include "io/grammar/grammar_tokens.h"
#include "io/grammar/json_rules.h"
#include "server/generation_request.h"
#include "server/tool_calls.h"

namespace tandem {

// Thread-safe. Grammars are kept for the next requests that want the same.
class AnswerGrammars {
 public:
  // `chat` is null when there are no chats. The tokenizer outlives this.
  AnswerGrammars(const Tokenizer& tokenizer, const ChatFormat* chat);

  // Null when the answer is free. After thinking, new lines may come before it. Throws ApiError
  // naming the field and what in it cannot be had.
  std::shared_ptr<const GrammarTokens> of(const GenerationRequest& request, bool after_thinking);

 private:
  using Node = Grammar::Node;
  using Rule = Grammar::Rule;

  Grammar build(const GenerationRequest& request, bool after_thinking) const;
  Rule form_rule(Grammar& grammar, const JsonRules& json, const AnswerForm& form) const;
  Rule calls_rule(Grammar& grammar, const JsonRules& json, const GenerationRequest& request) const;
  Node call(Grammar& grammar, Node from, const std::string& name, Rule arguments) const;
  Node mark(Grammar& grammar, Node from, std::string_view text) const;

  const Tokenizer& tokenizer_;
  const TokenTrie trie_;
  const std::shared_ptr<const GrammarTokens> json_;
  const ToolMarks& marks_;
  bool fenced_ = false;  // V3's and R1's calls: "function", and the arguments in a block of code

  struct Kept {
    std::string key;
    std::shared_ptr<const GrammarTokens> tokens;
  };
  std::mutex mutex_;
  std::list<Kept> kept_;  // the last used first
};

}  // namespace tandem
