// Grammars: every text that a mask of tokens allows fits the schema, every value that fits is
// allowed, and the mask equals the result of reading each token by itself.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "io/json.h"
#include "tests/error_of.h"
#include "tests/grammar_texts.h"
#include "tests/json_validator.h"
#include "text/grammar/grammar_tokens.h"
#include "text/grammar/pattern_grammar.h"
#include "text/grammar/schema_grammar.h"
#include "text/grammar/text_automaton.h"

namespace tandem::test {
namespace {

using Json = nlohmann::ordered_json;
using Random = std::mt19937;

const TokenTrie& trie() {
  static const TokenTrie t(tokenizer());
  return t;
}

Grammar pattern_grammar(const std::string& pattern) {
  Grammar grammar;
  const Grammar::Rule root = grammar.add_rule();
  add_pattern(grammar, grammar.start(root), grammar.end(root), pattern, Escaping::kNone);
  grammar.finish(root);
  return grammar;
}

bool schema_accepts(const std::string& schema, const std::string& text) {
  return accepts(grammar_of(Json::parse(schema)), text);
}

// "aa" is a text, and the beginning of one that ends with "c".
TEST(Grammar, ARuleMayEndForTheTextAndForItsCaller) {
  Grammar grammar;
  const Grammar::Rule root = grammar.add_rule();
  const Grammar::Node a = grammar.add_byte(grammar.start(root), 'a');
  grammar.add_byte(grammar.start(root), 'a', grammar.end(root));
  grammar.add_byte(a, 'a', grammar.end(root));
  grammar.add_byte(grammar.add_call(a, root), 'c', grammar.end(root));
  grammar.finish(root);
  for (const char* text : {"a", "aa", "aac", "aaac", "aaacc"})
    EXPECT_TRUE(accepts(grammar, text)) << text;
  for (const char* text : {"", "c", "ac", "aaa", "aacc"})
    EXPECT_FALSE(accepts(grammar, text)) << text;
}

TEST(Grammar, RulesMustNotBeginWithThemselves) {
  Grammar grammar;
  const Grammar::Rule root = grammar.add_rule();
  grammar.add_byte(grammar.start(root), 'a', grammar.end(root));
  grammar.add_byte(grammar.add_call(grammar.start(root), root), 'b', grammar.end(root));
  EXPECT_EQ(error_of([&] { grammar.finish(root); }), "a rule consists only of itself");
}

// At both ends of ranges of one to four bytes, which are written as products of ranges of bytes.
TEST(Grammar, CharactersAreThoseOfTheirRange) {
  const CharacterSet ranges = {{0x21, 0x21},       {0x7F, 0x80},       {0x7FF, 0x800},
                               {0x900, 0x9FF},     {0x1000, 0x1FFF},   {0x2345, 0x3456},
                               {0xD7FF, 0xD7FF},   {0xE000, 0xE03F},   {0xFFFF, 0x10000},
                               {0x12345, 0x43210}, {0x80000, 0xFFFFF}, {0x10FFFF, 0x10FFFF}};
  Grammar grammar;
  const Grammar::Rule root = grammar.add_rule();
  CharacterWriter(grammar, Escaping::kNone).write(grammar.start(root), grammar.end(root), ranges);
  grammar.finish(root);
  const auto expect = [&](char32_t c, bool within) {
    if (c > kLastCharacter || (c >= 0xD800 && c < 0xE000)) return;
    std::string text;
    append_utf8(text, c);
    EXPECT_EQ(accepts(grammar, text), within) << static_cast<uint32_t>(c);
  };
  for (const CharacterRange& range : ranges) {
    expect(range.first - 1, false);
    expect(range.first, true);
    expect((range.first + range.last) / 2, true);
    expect(range.last, true);
    expect(range.last + 1, false);
  }
}

int below(Random& random, int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

// A random schema of supported keywords with bounded depth.
Json random_schema(Random& random, int depth) {
  const auto chance = [&](int n) { return below(random, n) == 0; };
  const auto inner = [&] { return random_schema(random, depth - 1); };
  if (depth > 0 && chance(6)) {
    Json any = Json::array();
    for (int i = 1 + below(random, 3); i > 0; --i) any.push_back(inner());
    return {{"anyOf", any}};
  }
  switch (below(random, depth > 0 ? 12 : 9)) {
    case 0: {
      Json s = {{"type", "string"}};
      if (chance(2)) s["minLength"] = below(random, 3);
      if (chance(2)) s["maxLength"] = 3 + below(random, 3);
      return s;
    }
    case 1: {
      const char* patterns[] = {"^[a-c]{2,4}$", "x+y?",      "^(ab|c\\d)*$",
                                "\\w-[^a-z]$",  "^\"\\\\.$", "^é{1,2}[\\u4e00-\\u4e10]$"};
      return {{"type", "string"}, {"pattern", patterns[below(random, 6)]}};
    }
    case 2:
    case 3: {
      Json s = {{"type", below(random, 2) ? "integer" : "number"}};
      const int low = below(random, 300) - 150;
      if (chance(2)) s[chance(2) ? "minimum" : "exclusiveMinimum"] = low;
      if (chance(2)) s[chance(2) ? "maximum" : "exclusiveMaximum"] = low + 2 + below(random, 200);
      return s;
    }
    case 4:
      return {{"enum", {"red", "gr\"een", 7, -1.5, nullptr, "ß\n"}}};
    case 5:
      return {{"const", chance(2) ? Json("fixed") : Json(12)}};
    case 6:
      return {{"type", {"boolean", "null"}}};
    case 7:
      return {{"$ref", "#/$defs/leaf"}};
    case 8:
      return chance(3) ? Json(true) : Json{{"type", "integer"}, {"nullable", true}};
    case 9: {
      Json s = {{"type", "array"}, {"items", inner()}};
      if (chance(2)) s["minItems"] = below(random, 3);
      if (chance(2)) s["maxItems"] = 2 + below(random, 2);
      if (chance(4)) s["prefixItems"] = {inner(), inner()};
      return s;
    }
    default: {
      Json s = {{"type", "object"}, {"properties", Json::object()}, {"required", Json::array()}};
      for (const char* name : {"a", "ab", "\"q\"", "long name", "é"}) {
        if (chance(2)) continue;
        s["properties"][name] = inner();
        if (chance(2)) s["required"].push_back(name);
      }
      if (chance(3)) s["additionalProperties"] = chance(2) ? inner() : Json(chance(2));
      return s;
    }
  }
}

Json random_root(Random& random) {
  Json schema = random_schema(random, 3);
  if (schema.is_boolean()) schema = Json::object();
  schema["$defs"]["leaf"] = {{"type", "object"},
                             {"properties", {{"next", {{"$ref", "#/$defs/leaf"}}}, {"v", true}}},
                             {"additionalProperties", false}};
  return schema;
}

// A random text of allowed tokens that prefers tokens which close a value; nothing if it does not
// end.
std::optional<std::string> random_text(const GrammarTokens& tokens, Random& random) {
  TextStates states(tokens.grammar());
  TextStates::State state = states.begin();
  std::string text;
  for (int step = 0; step < 1000; ++step) {
    if (states.may_end(state) && (states.frames(state).empty() || below(random, 3) == 0))
      return text;
    std::vector<uint64_t> bits(mask_words(tokens.vocab_size()));
    tokens.add_allowed(states, state, bits);
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < tokens.vocab_size(); ++id)
      if (bits[id / 64] >> id % 64 & 1) allowed.push_back(id);
    if (allowed.empty()) return text + " .. and nothing may follow";
    int32_t id = allowed[random() % allowed.size()];
    std::vector<int32_t> closing;
    for (const int32_t other : allowed) {
      const std::string_view bytes = tokenizer().bytes_of(other);
      if (bytes == "\"" || bytes == "}" || bytes == "]") closing.push_back(other);
    }
    if (step > 40 && !closing.empty()) id = closing[random() % closing.size()];
    for (const char c : tokenizer().bytes_of(id)) {
      state = states.after(state, static_cast<uint8_t>(c));
      if (state == TextStates::kDead) return text + " .. a token was let through that is wrong";
    }
    text += tokenizer().bytes_of(id);
  }
  return {};
}

TEST(SchemaGrammar, WhatTheMaskLetsThroughFits) {
  constexpr int kSchemas = 400, kTexts = 5;
  Random random(1);
  int n = 0;
  for (int i = 0; i < kSchemas; ++i) {
    const Json schema = random_root(random);
    const GrammarTokens tokens(grammar_of(schema), trie());
    const JsonValidator validator(schema);
    for (int k = 0; k < kTexts; ++k) {
      const auto text = random_text(tokens, random);
      if (!text) continue;
      const Json value = Json::parse(*text, nullptr, false);
      ASSERT_FALSE(value.is_discarded()) << schema << "\n" << *text;
      ASSERT_TRUE(validator.fits(value)) << schema << "\n" << *text;
      ++n;
    }
  }
  EXPECT_GT(n, kSchemas * kTexts * 9 / 10);
}

std::string random_string(Random& random, int min, int max) {
  const char* characters[] = {"a", "b", "Z", "0", " ", "\"", "\\", "\n", "é", "世", "😀", "/"};
  std::string text;
  for (int n = min + below(random, max - min + 1); n > 0; --n)
    text += characters[below(random, 12)];
  return text;
}

// A random value that fits the schema, with properties in the schema's order; nothing if none was
// found.
std::optional<Json> random_value(const Json& root, const Json& s, Random& random, int depth) {
  const auto chance = [&](int n) { return below(random, n) == 0; };
  if (depth > 12) return {};
  if (s == true)
    return random_value(root, {{"type", "array"}, {"items", {{"type", "null"}}}}, random, depth);
  if (s.value("nullable", false) && chance(3)) return Json();
  if (s.contains("$ref"))
    return random_value(root, root.at(Json::json_pointer(s["$ref"].get<std::string>().substr(1))),
                        random, depth + 1);
  if (s.contains("const")) return s["const"];
  if (s.contains("enum")) return s["enum"][below(random, static_cast<int>(s["enum"].size()))];
  if (s.contains("anyOf"))
    return random_value(root, s["anyOf"][below(random, static_cast<int>(s["anyOf"].size()))],
                        random, depth + 1);
  const Json type = s.value("type", Json("null"));
  if (type.is_array()) return chance(2) ? Json() : Json(chance(2));
  if (type == "string") {
    if (s.contains("pattern")) return {};
    const int min = s.value("minLength", 0);
    return random_string(random, min, s.value("maxLength", min + 4));
  }
  if (type == "integer" || type == "number") {
    int low = s.value("minimum", s.value("exclusiveMinimum", -2000) + 1);
    const int high = s.value("maximum", s.value("exclusiveMaximum", std::max(low, 0) + 2000) - 1);
    low = std::min(low, high);
    const int whole = low + below(random, high - low + 1);
    if (type == "number" && whole < high && whole >= 0) return whole + below(random, 100) / 128.0;
    return whole;
  }
  if (type == "array") {
    Json value = Json::array();
    const int min = s.value("minItems", 0),
              n = min + below(random, s.value("maxItems", min + 2) - min + 1);
    for (int i = 0; i < n; ++i) {
      const bool first = s.contains("prefixItems") && i < static_cast<int>(s["prefixItems"].size());
      const auto item =
          random_value(root, first ? s["prefixItems"][i] : s["items"], random, depth + 1);
      if (!item) return {};
      value.push_back(*item);
    }
    return value;
  }
  if (type != "object") return Json();
  Json value = Json::object();
  for (const auto& [name, property] : s["properties"].items()) {
    const Json required = s.value("required", Json::array());
    const bool must = std::find(required.begin(), required.end(), name) != required.end();
    if (!must && chance(2)) continue;
    const auto one = random_value(root, property, random, depth + 1);
    if (!one && must) return {};
    if (one) value[name] = *one;
  }
  const Json more = s.value("additionalProperties", Json(false));
  if (more != false)
    for (const char* name : {"other", "abc", "b", "lo"})
      if (const auto one = random_value(root, more, random, depth + 1); one && chance(2))
        value[name] = *one;
  return value;
}

TEST(SchemaGrammar, WhatFitsIsAccepted) {
  Random random(2);
  int n = 0;
  for (int i = 0; i < 600; ++i) {
    const Json schema = random_root(random);
    const Grammar grammar = grammar_of(schema);
    for (int k = 0; k < 8; ++k) {
      const auto value = random_value(schema, schema, random, 0);
      if (!value) continue;
      ASSERT_TRUE(JsonValidator(schema).fits(*value)) << schema << "\n" << *value;
      for (const std::string& text : {value->dump(), value->dump(1, '\t'), value->dump(4)})
        ASSERT_TRUE(accepts(grammar, text)) << schema << "\n" << text;
      ++n;
    }
  }
  EXPECT_GT(n, 2000);
}

// The shared base grammar and the token tree do not change the mask.
TEST(GrammarTokens, AMaskIsWhatEveryTokenByItselfGives) {
  Random random(3);
  Grammar base_grammar;
  const JsonRules json(base_grammar);
  base_grammar.finish(json.value);
  const auto base = std::make_shared<GrammarTokens>(base_grammar, trie());
  for (int i = 0; i < 150; ++i) {
    const Json schema = random_root(random);
    const GrammarTokens tokens(grammar_of(schema), trie(), base);
    TextStates states(tokens.grammar());
    TextStates::State state = states.begin();
    for (int step = 0; step < 60 && !states.frames(state).empty(); ++step) {
      std::vector<uint64_t> bits(mask_words(tokens.vocab_size()));
      tokens.add_allowed(states, state, bits);
      std::vector<TextStates::State> next;
      for (int32_t id = 0; id < tokens.vocab_size(); ++id) {
        TextStates::State after = state;
        for (const char c : tokenizer().bytes_of(id))
          if (after != TextStates::kDead) after = states.after(after, static_cast<uint8_t>(c));
        const bool takes = tokenizer().has_token(id) && !tokenizer().is_added(id) && after >= 0;
        ASSERT_EQ(takes, bits[id / 64] >> id % 64 & 1) << schema << tokenizer().bytes_of(id);
        if (takes) next.push_back(after);
      }
      ASSERT_FALSE(next.empty());
      state = next[random() % next.size()];
    }
  }
}

TEST(SchemaGrammar, TextsWrittenByHand) {
  const struct {
    std::string schema;
    std::vector<std::string> good, bad;
  } cases[] = {
      {"{}",
       {"1", "-0.5e+9", "\"\\ud83d\\ude00\"", "[ ]", "{\"a\":\n  [1, {}]}", "null"},
       {"", "01", "1.", "+1", "\"\\ud83d\"", "\"\n\"", "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "[1,]",
        "{\"a\"}", "nul", "[  1]", "1 ", "1e100", "1234567890123456789", "tru e", "\"\\x\""}},
      {R"({"type":"object"})", {"{}", "{ }", "{\"b\": {}}"}, {"[]", "{\"a\": 1,}"}},
      {R"({"properties":{"a":{"type":"integer"},"b":{}},"required":["b"]})",
       {"{\"a\":1,\"b\":[]}", "{\"b\":1}"},
       {"{}", "{\"a\":1}", "{\"b\":1,\"a\":1}", "{\"a\":\"x\",\"b\":1}", "{\"b\":1,\"c\":1}"}},
      {R"({"properties":{"ab":{"type":"integer"}},"additionalProperties":{"type":"null"}})",
       {"{}", "{\"ab\":1}", "{\"a\":null}", "{\"ab\":1,\"abc\":null,\"\":null}", "{\"x\":null}"},
       {"{\"ab\":null}", "{\"a\":null,\"ab\":1}", "{\"\\u0061b\":null}", "{\"x\":1}"}},
      {R"({"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":2})",
       {"[true]", "[true, false]"},
       {"[]", "[true,true,true]", "[1]"}},
      {R"({"type":"array","prefixItems":[{"type":"null"},{"const":1}],"items":false})",
       {"[]", "[null]", "[null,1]"},
       {"[1]", "[null,1,1]"}},
      {R"({"type":"integer","minimum":-12,"exclusiveMaximum":105})",
       {"-12", "-1", "0", "9", "99", "100", "104"},
       {"-13", "-0", "105", "1000", "007", "1.5", "1e1"}},
      {R"({"type":"number","exclusiveMinimum":0,"maximum":1})",
       {"0.001", "1", "1.00", "0.5"},
       {"0", "0.0", "-0.5", "1.01", "2"}},
      {R"({"type":"number","minimum":-3,"exclusiveMaximum":-1})",
       {"-3", "-3.0", "-2.9", "-1.01"},
       {"-1", "-1.0", "-3.01", "-0.5", "2"}},
      {R"({"type":"string","minLength":2,"maxLength":3})",
       {"\"é世\"", "\"a\\\"\\u00e9\""},
       {"\"a\"", "\"abcd\""}},
      {R"({"type":"string","format":"date"})",
       {"\"2024-02-28\"", "\"2024-02-29\"", "\"2000-02-29\""},
       {"\"2024-13-01\"", "\"2023-02-29\"", "\"1900-02-29\"", "\"2024-04-31\"", "\"x2024-01-01\""}},
      {R"({"type":"string","format":"password"})", {"\"anything\""}, {"1"}},
      {R"({"enum":[{"k":[1,"é"]}]})", {"{\"k\":[1,\"é\"]}"}, {"{\"k\":[1]}"}},
      {R"({"enum":["a",1,null],"type":["string","null"]})", {"\"a\"", "null"}, {"1", "\"b\""}},
      {R"({"oneOf":[{"type":"object","properties":{"k":{"const":"a"},"x":{"type":"integer"}},"required":["k","x"]},{"type":"object","properties":{"k":{"const":"b"}},"required":["k"]}]})",
       {R"({"k":"a","x":1})", R"({"k":"b"})"},
       {R"({"k":"a"})", R"({"k":"b","x":1})"}},
      {R"({"$ref":"#/$defs/n","$defs":{"n":{"anyOf":[{"type":"null"},{"type":"object","properties":{"n":{"$ref":"#/$defs/n"}},"required":["n"]}]}}})",
       {"null", "{\"n\":{\"n\":null}}"},
       {"{}", "{\"n\":1}"}},
      {R"({"type":"string","pattern":"^a.c$","description":"d","default":1})",
       {"\"abc\"", "\"a\\\"c\""},
       {"\"a\\nc\"", "\"abcd\""}},
      {R"({"allOf":[{"$ref":"#/$defs/x"}],"$defs":{"x":{"type":"string","nullable":true}}})",
       {"null", "\"\""},
       {"1"}},
      {R"({"type":"object","required":["z"],"additionalProperties":true})",
       {"{\"z\":1}", "{\"z\":1,\"y\":2}"},
       {"{}", "{\"y\":2}"}},
  };
  for (const auto& c : cases) {
    for (const std::string& text : c.good)
      EXPECT_TRUE(schema_accepts(c.schema, text)) << c.schema << text;
    for (const std::string& text : c.bad)
      EXPECT_FALSE(schema_accepts(c.schema, text)) << c.schema << text;
  }
}

TEST(SchemaGrammar, WhatIsNotUnderstoodIsNamed) {
  const struct {
    std::string schema, words;
  } cases[] = {
      {R"({"properties":{"a":{"unevaluatedItems":false}}})",
       "#/properties/a: \"unevaluatedItems\" is not supported"},
      {R"({"anyOf":[{"$dynamicRef":"#x"},{}]})", "#/anyOf/0: \"$dynamicRef\""},
      {R"({"fractional":true})", "\"fractional\" is not supported"},
      {R"({"allOf":[{"$id":"x"}]})", "#/allOf/0: \"$id\" is only supported"},
      {R"({"not":{"nullable":true}})", "\"nullable\" within \"not\""},
      {R"({"type":"array","items":{"type":"string"},"uniqueItems":true})", "\"uniqueItems\" is"},
      {R"({"type":"array","items":{"type":"integer","minimum":0,"maximum":999999999},"uniqueItems":true})",
       "\"uniqueItems\" is"},
      {R"({"type":"array","items":{"enum":[1,2]},"uniqueItems":true,"contains":{}})", "beside"},
      {R"({"type":"array","items":{"enum":[1,2]},"uniqueItems":true,"minItems":3})",
       "2 constants are fewer than 3 different items"},
      {R"({"$ref":"https://example.com/x"})", "only references within the schema"},
      {R"({"$ref":"#/$defs/x"})", "does not exist"},
      {R"({"$ref":"#"})", "refers only to itself"},
      {R"({"not":{"$ref":"#"}})", "refers only to itself"},
      {R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})", "refers only to itself"},
      {R"({"anyOf":[{"$ref":"#/$defs/a"},{"type":"null"}],
           "$defs":{"a":{"anyOf":[{"$ref":"#"},{"const":1}]}}})",
       "refers only to itself"},
      {R"({"$ref":"#/$defs/a","$defs":{"a":{"not":{"$ref":"#/$defs/b"}},
           "b":{"$ref":"#/$defs/c"},"c":{"$ref":"#/$defs/b"}}})",
       "refers only to itself"},
      {R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})",
       "no value matches: #: its constraints contradict each other"},
      {R"({"type":"object","properties":{"a":{"type":"integer","minimum":5,"maximum":4}},
           "required":["a"]})",
       "no value matches: #/properties/a: no such number is between its bounds"},
      {R"({"type":"strange"})", "\"strange\" is not a type"},
      {R"({"type":[]})", "\"type\" is an empty"},
      {R"({"enum":[]})", "none of its constants"},
      {R"({"enum":["a"],"type":"integer"})", "none of its constants"},
      {R"({"enum":5})", "enum is 5"},
      {R"({"anyOf":[]})", "anyOf is []"},
      {"false", "no value matches"},
      {R"({"not":{}})", "no value matches"},
      {R"({"allOf":[{"type":"string"},{"type":"null"}]})", "#/allOf/1: no type is possible"},
      {"7", "must be a schema"},
      {R"({"properties":[]})", "properties is []"},
      {R"({"required":["a"],"additionalProperties":false})", "\"a\" is required"},
      {R"({"type":"object","minProperties":2})", "minProperties exceeds"},
      {R"({"type":"array","minItems":3,"maxItems":2})", "no array has"},
      {R"({"type":"array","minItems":-1})", "minItems"},
      {R"({"type":"array","minItems":1.5})", "minItems"},
      {R"({"type":"integer","minimum":5,"maximum":4})", "between its bounds"},
      {R"({"type":"number","minimum":1e300})", "between its bounds"},
      {R"({"type":"number","minimum":"0"})", "must be a number"},
      {R"({"type":"integer","multipleOf":0})", "multipleOf is 0"},
      {R"({"type":"integer","multipleOf":1001})", "more than 1000"},
      {R"({"type":"string","pattern":"(?=a)b"})", "(?= and (?! only after ^"},
      {R"({"type":"string","pattern":"a(b"})", "not closed"},
      {R"({"type":"string","pattern":"\\p{L}"})", "\\\\p{L}"},
      {R"({"type":"string","pattern":"a{3,1}"})", "not a count"},
      {R"({"type":"string","pattern":"[z-a]"})", "range"},
      {R"({"type":"string","pattern":"((a{1000}){1000}){9}"})", "too large"},
      {R"({"type":"string","pattern":"^a{5}$","maxLength":3})", "no text fits its patterns"},
  };
  for (const auto& c : cases) {
    const std::string error = error_of([&] { grammar_of(Json::parse(c.schema)); });
    EXPECT_TRUE(says(error, c.words)) << c.schema << "\n" << error;
  }
}

TEST(PatternGrammar, MatchesWhatTheStandardLibraryMatches) {
  Random random(4);
  const char* pieces[] = {"a",      "b",     ".", "[ab]", "[^a]", "\\d",
                          "(a|bc)", "(?:b)", "c", "1",    "\\w",  "\\\\"};
  const char* counts[] = {"", "", "", "*", "+", "?", "{2}", "{1,2}", "{2,}"};
  for (int i = 0; i < 300; ++i) {
    std::string pattern = "a";
    for (int n = 1 + below(random, 4); n > 0; --n) {
      pattern += std::string(pieces[below(random, 12)]) + counts[below(random, 9)];
      if (below(random, 6) == 0) pattern += "|b";
    }
    const Grammar grammar = pattern_grammar(pattern);
    const std::regex expected(pattern);
    for (int k = 0; k < 200; ++k) {
      std::string text = "a";
      for (int n = below(random, 6); n > 0; --n) text += "abc1\\"[below(random, 5)];
      ASSERT_EQ(accepts(grammar, text), std::regex_match(text, expected)) << pattern << " " << text;
    }
  }
}

// Each limit is reached, and one more is too many.
TEST(GrammarLimits, OfNodes) {
  Grammar g;
  for (int i = 0; i < 100'000; ++i) g.add_node();
  EXPECT_EQ(error_of([&] { g.add_node(); }), "too large: more than 100000 states");
  EXPECT_EQ(g.n_nodes(), 100'000);
}

// A chain of n optional parts counts the nodes behind each: n + .. + 1, and the end of the rule n
// times. The two nodes of the rule and those that are alone count once.
TEST(GrammarLimits, OfOptionalParts) {
  constexpr int kChain = 1998, kCounted = 2 + kChain * (kChain + 1) / 2 + kChain;
  for (const int more : {0, 1}) {
    Grammar g;
    const Grammar::Rule root = g.add_rule();
    Grammar::Node node = g.add_byte(g.start(root), 'a');
    for (int i = 1; i < kChain; ++i) {
      const Grammar::Node next = g.add_node();
      g.add_epsilon(node, next);
      node = next;
    }
    g.add_epsilon(node, g.end(root));
    for (int i = kCounted; i < 2'000'000 + more; ++i) g.add_node();
    EXPECT_EQ(error_of([&] { g.finish(root); }),
              more == 0 ? "no error" : "too large: too many optional parts");
  }
}

TEST(GrammarLimits, OfAutomata) {
  const auto text = [](int n) { return texts_in({std::string(n, 'a')}); };
  EXPECT_EQ(text(19'999).states.size(), 20'000u);
  EXPECT_EQ(error_of([&] { text(20'000); }), "too large: its strings are too long");
  EXPECT_EQ(union_of(text(9'998), text(9'998)).states.size(), 19'999u);
  EXPECT_EQ(error_of([&] { union_of(text(9'998), text(9'999)); }), "too large");
  EXPECT_EQ(with_length(every_text(), 19'999, kNoLimit).states.size(), 20'000u);
  EXPECT_EQ(error_of([] { with_length(every_text(), 20'000, kNoLimit); }),
            "too large: more than 20000 states of strings");
  TextAutomaton ten;
  for (char32_t c = '0'; c <= '9'; ++c) ten.states[0].edges.push_back({{{c, c}}, 0});
  ten.states[0].accepts = true;
  EXPECT_EQ(with_length(ten, 10'000, 10'000).states.size(), 10'001u);
  EXPECT_EQ(error_of([&] { with_length(ten, 10'001, 10'001); }),
            "too large: more than 100000 edges of strings");
}

TEST(GrammarLimits, OfPatterns) {
  const auto nested = [](int n) { return std::string(n, '(') + "a" + std::string(n, ')'); };
  EXPECT_TRUE(accepts(pattern_grammar(nested(63)), "a"));
  EXPECT_EQ(error_of([&] { pattern_grammar(nested(64)); }),
            "groups are nested deeper than 64 levels");
  EXPECT_TRUE(accepts(pattern_grammar("b{10000}"), std::string(10'000, 'b')));
  EXPECT_FALSE(accepts(pattern_grammar("b{10000}"), std::string(9'999, 'b')));
  for (const char* count : {"{10001}", "{0,10001}", "{2,1}", "{x}", "{,2}"})
    EXPECT_TRUE(says(error_of([&] { pattern_grammar(std::string("b") + count); }),
                     " is not a count between 0 and 10000"))
        << count;
}

// Long texts end where the automaton would become too large: after 2,500 states, but not before the
// least length.
TEST(GrammarLimits, OfLengths) {
  const auto lengths = [](int min, int max) {
    const TextAutomaton automaton = with_length(every_text(), min, max);
    std::string accepted;
    for (const int n : {0, 1, 2, 3, 2500, 2501, 2502, 2999, 3000, 3001})
      if (matches(automaton, std::string(n, 'x'))) accepted += fmt::format("{} ", n);
    return accepted;
  };
  EXPECT_EQ(lengths(1, 2), "1 2 ");
  EXPECT_EQ(lengths(0, 5000), "0 1 2 3 2500 2501 ");
  EXPECT_EQ(lengths(3000, 5000), "3000 ");
  EXPECT_EQ(lengths(2, kNoLimit), "2 3 2500 2501 2502 2999 3000 3001 ");
}

// Ambiguous parses share their suffixes; otherwise their number would double at each level.
TEST(TextStates, AmbiguityDoesNotExplode) {
  const Grammar grammar = grammar_of(Json::parse(
      R"({"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[
          {"type":"array","items":{"$ref":"#/$defs/a"}},
          {"type":"array","items":{"anyOf":[{"$ref":"#/$defs/a"},{"const":1}]}},
          {"type":"array","items":{"anyOf":[{"$ref":"#/$defs/a"},{"const":2}]}}]}}})"));
  TextStates states(grammar);
  TextStates::State state = states.begin();
  const auto read = [&](char c, int n) {
    for (; n > 0; --n) {
      state = states.after(state, static_cast<uint8_t>(c));
      ASSERT_NE(state, TextStates::kDead);
      ASSERT_LT(states.frames(state).size(), 200u);
    }
  };
  read('[', 1000);
  read('2', 1);
  read(']', 1000);
  EXPECT_TRUE(states.may_end(state));
}

}  // namespace
}  // namespace tandem::test
