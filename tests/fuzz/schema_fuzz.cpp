// JSON schemas as grammars: every schema is compiled or refused by an Error, and no text that
// follows the grammar reaches a dead end. The text comes after the first zero byte of the input.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "io/json.h"
#include "text/grammar/schema_grammar.h"
#include "text/grammar/text_states.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = std::min(input.find('\0'), input.size());
  Grammar grammar;
  try {
    const JsonRules json(grammar);
    grammar.finish(add_schema(grammar, json, parse_ordered_json(input.substr(0, zero), "schema")));
  } catch (const Error&) {
    return 0;
  }
  TextStates states(grammar);
  TextStates::State state = states.begin();
  for (const char c : input.substr(std::min(zero + 1, input.size()))) {
    if (states.frames(state).empty() && !states.may_end(state)) std::abort();
    // A byte that cannot follow is replaced by the first one that can.
    TextStates::State next = states.after(state, static_cast<uint8_t>(c));
    for (int b = 0; b < 256 && next == TextStates::kDead; ++b)
      next = states.after(state, static_cast<uint8_t>(b));
    if (next == TextStates::kDead) break;
    state = next;
  }
  return 0;
}
