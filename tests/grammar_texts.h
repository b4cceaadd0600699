// Makes grammars of schemas, tests whether a grammar accepts a text, and reads tiny-r1's tokenizer.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "text/grammar/schema_grammar.h"
#include "text/grammar/text_states.h"
#include "text/tokenizer.h"

namespace tandem::test {

inline const Tokenizer& tokenizer() {
  static const Tokenizer t = Tokenizer::from_directory(TANDEM_SOURCE_DIR "/models/tiny-r1");
  return t;
}

inline Grammar grammar_of(const nlohmann::ordered_json& schema) {
  Grammar grammar;
  const JsonRules json(grammar);
  grammar.finish(add_schema(grammar, json, schema));
  return grammar;
}

inline bool accepts(const Grammar& grammar, const std::string& text) {
  TextStates states(grammar);
  TextStates::State state = states.begin();
  for (const char c : text)
    if (state != TextStates::kDead) state = states.after(state, static_cast<uint8_t>(c));
  return state != TextStates::kDead && states.may_end(state);
}

}  // namespace tandem::test
