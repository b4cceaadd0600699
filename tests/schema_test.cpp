// Schemas with combined keywords: on a small set of values the grammar accepts the same values as a
// validator that shares no code with it. Also tests schemas that are expensive to compile.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "tests/error_of.h"
#include "tests/grammar_texts.h"
#include "tests/json_validator.h"
#include "text/grammar/grammar_tokens.h"
#include "text/grammar/schema_grammar.h"

namespace tandem::test {
namespace {

using Json = nlohmann::ordered_json;

// Tries all orders of properties, because a grammar accepts only one.
bool accepts_in_some_order(const Grammar& grammar, const Json& value) {
  if (!value.is_object()) return accepts(grammar, value.dump());
  std::vector<std::string> names;
  for (const auto& [name, property] : value.items()) names.push_back(name);
  std::sort(names.begin(), names.end());
  do {
    Json ordered = Json::object();
    for (const std::string& name : names) ordered[name] = value[name];
    if (accepts(grammar, ordered.dump())) return true;
  } while (std::next_permutation(names.begin(), names.end()));
  return false;
}

// A set of values of all types. Few keywords accept all of them or none.
std::vector<Json> small_world() {
  std::vector<Json> world = {nullptr, true, false, -2, -1, 0,   1,   2,    3,     4,     6,
                             0.5,     1.5,  2.5,   7,  "", "a", "b", "ab", "aab", "abc", "1"};
  const std::vector<Json> items = {1, 2, "a", nullptr};
  world.push_back(Json::array());
  for (const Json& a : items) {
    world.push_back(Json::array({a}));
    for (const Json& b : items) {
      world.push_back(Json::array({a, b}));
      world.push_back(Json::array({a, b, 1}));
    }
  }
  world.push_back(Json::object());
  for (const char* first : {"a", "b", "ab"})
    for (const Json& a : items) {
      world.push_back({{first, a}});
      for (const Json& b : items) {
        world.push_back({{first, a}, {"c", b}});
        if (first != std::string("b")) world.push_back({{first, a}, {"b", b}, {"x", 1}});
      }
    }
  return world;
}

// Makes random schemas of a few keywords that distinguish these values.
class SchemaMaker {
 public:
  explicit SchemaMaker(unsigned seed) : random_(seed) {}

  // The schema allows further properties and any type unless a keyword restricts them: what a
  // grammar omits where a schema says nothing is not compared here.
  Json root() {
    Json schema = {{"type", {"null", "boolean", "number", "string", "array", "object"}},
                   {"additionalProperties", true},
                   {"allOf", Json::array({combined(3, false)})},
                   {"$defs", {{"r", combined(1, true)}}}};
    if (below(2) == 0) schema["allOf"].push_back(combined(2, false));
    return schema;
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return *(list.begin() + below(static_cast<int>(list.size())));
  }

  // negated: uses only keywords whose negation a grammar supports.
  Json combined(int depth, bool negated) {
    const int n = depth > 0 ? below(10) : 9;
    const auto inner = [&](bool opposite) { return combined(depth - 1, opposite); };
    switch (n) {
      case 0:
        return {{"not", inner(true)}};
      case 1:
        return {{"anyOf", Json::array({inner(negated), inner(negated)})}};
      case 2:
        return {{"allOf", Json::array({inner(negated), inner(negated)})}};
      case 3:
        return {{"oneOf", Json::array({inner(true), inner(true)})}};
      case 4:
        return {{"if", inner(true)}, {"then", inner(true)}, {"else", inner(true)}};
      case 5:
        if (depth > 1) return {{"$ref", "#/$defs/r"}};
        [[fallthrough]];
      default: {
        Json schema = Json::object();
        for (int i = 1 + below(2); i > 0; --i) schema.update(keywords(negated));
        if (negated && schema.contains("prefixItems")) schema.erase("items");
        return schema;
      }
    }
  }

  // A schema for a property or an item.
  Json scalar() {
    Json schema = {{"type", {"null", "boolean", "number", "string", "array", "object"}}};
    if (below(2) == 0) schema["type"] = one_of<const char*>({"integer", "string", "null"});
    schema.update(one_of<Json>({{{"minimum", 2}},
                                {{"enum", {1, "a"}}},
                                {{"const", 2}},
                                {{"not", {{"type", "string"}}}},
                                Json::object()}));
    return schema;
  }

  Json keywords(bool negated) {
    const Json bound = one_of<Json>({-1, 0, 0.5, 1, 2, 2.5, 3});
    switch (below(negated ? 20 : 25)) {
      case 0:
        return {{"type", one_of<const char*>({"integer", "number", "string", "object", "array"})}};
      case 1:
        return {{"type", {"integer", "null", "object"}}};
      case 2:
        return {{one_of({"minimum", "exclusiveMinimum"}), bound}};
      case 3:
        return {{one_of({"maximum", "exclusiveMaximum"}), bound}};
      case 4:
        return {{one_of({"minLength", "maxLength"}), below(4)}};
      case 5:
        return {{"pattern", one_of({"^a", "b$", "^[ab]*$", "^(?!ab)", "^(?=.*b)a", "1|b{2}"})}};
      case 6:
        return {{"enum", {1, "a", nullptr, 2.5}}};
      case 7:
        return {{"const", one_of<Json>({1, "ab", true, 0.5})}};
      case 8:
        return {{one_of({"minItems", "maxItems"}), below(4)}};
      case 9:
        return {{"items", scalar()}};
      case 10:
        return {{"prefixItems", Json::array({scalar()})}};
      case 11:
        return {{"contains", scalar()}};
      case 12:
      case 13:
        return {{"properties", {{"a", scalar()}, {"b", scalar()}}}};
      case 14:
        return {{"required",
                 one_of<Json>({Json::array({"a"}), Json::array({"b", "c"}), Json::array()})}};
      case 15:
        return {{"properties", {{"a", true}, {"c", scalar()}}}, {"additionalProperties", false}};
      case 16:
        return {{"properties", {{"b", true}}}, {"additionalProperties", scalar()}};
      case 17:
        return {{"minProperties", 1}};
      case 18:
        return {{"dependentRequired", {{"a", Json::array({"c"})}}}};
      case 19:
        return {{"dependentSchemas", {{"b", {{"required", Json::array({"x"})}}}}}};
      case 20:
        return {{"multipleOf", one_of<Json>({0.5, 1, 2, 3})}};
      case 21:
        return {{"propertyNames", one_of<Json>({{{"maxLength", 1}}, {{"enum", {"a", "b"}}}})}};
      case 22:
        return {{"patternProperties", {{"^[ab]", scalar()}, {"b$", scalar()}}},
                {"additionalProperties", scalar()}};
      case 23:
        return {{"contains", scalar()}, {"minContains", below(3)}, {"maxContains", 1 + below(2)}};
      default:
        return {{"maxProperties", below(4)}};
    }
  }

  std::mt19937 random_;
};

TEST(Schema, AcceptsWhatTheValidatorAccepts) {
  constexpr int kSchemas = 300;
  const std::vector<Json> world = small_world();
  SchemaMaker maker(5);
  int n_in = 0, n_out = 0, n_nothing = 0;
  for (int i = 0; i < kSchemas; ++i) {
    const Json schema = maker.root();
    const JsonValidator validator(schema);
    std::optional<Grammar> grammar;
    const std::string error = error_of([&] { grammar.emplace(grammar_of(schema)); });
    if (!grammar) {
      ASSERT_TRUE(says(error, "no value matches")) << schema;
      ++n_nothing;
    }
    for (const Json& value : world) {
      const bool fits = validator.fits(value);
      ASSERT_EQ(grammar && accepts_in_some_order(*grammar, value), fits) << schema << "\n" << value;
      ++(fits ? n_in : n_out);
    }
  }
  EXPECT_GT(n_in, kSchemas * 30);
  EXPECT_GT(n_out, kSchemas * 30);
  EXPECT_LT(n_nothing, kSchemas / 10);
}

// A grammar writes those constants of a list that fit the other keywords.
TEST(Schema, ConstantsAreThoseThatFit) {
  constexpr int kSchemas = 200;
  const std::vector<Json> world = small_world();
  SchemaMaker maker(6);
  int n_in = 0, n_out = 0;
  for (int i = 0; i < kSchemas; ++i) {
    Json schema = maker.root();
    schema["enum"] = world;
    const JsonValidator validator(schema);
    std::optional<Grammar> grammar;
    const std::string error = error_of([&] { grammar.emplace(grammar_of(schema)); });
    if (!grammar) {
      ASSERT_TRUE(says(error, "no value matches")) << schema;
    }
    for (const Json& value : world) {
      const bool fits = validator.fits(value);
      ASSERT_EQ(grammar && accepts(*grammar, value.dump()), fits) << schema << "\n" << value;
      ++(fits ? n_in : n_out);
    }
  }
  EXPECT_GT(n_in, kSchemas * 20);
  EXPECT_GT(n_out, kSchemas * 20);
}

TEST(Schema, TextsWrittenByHand) {
  const std::string long_text(10'000, 'x');
  const struct {
    std::string schema;
    std::vector<std::string> good, bad;
  } cases[] = {
      {R"({"type":"integer","minimum":-9007199254740991,"maximum":9007199254740991})",
       {"-9007199254740991", "9007199254740991", "0", "123456789012345"},
       {"-9007199254740992", "9007199254740992", "10000000000000000", "-0", "1.0"}},
      {R"({"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807})",
       {"-9223372036854775808", "9223372036854775807", "1000000000000000000"},
       {"-9223372036854775809", "9223372036854775808", "10000000000000000000"}},
      {R"({"type":"integer","minimum":0,"maximum":18446744073709551615})",
       {"18446744073709551615"},
       {"18446744073709551616", "-1"}},
      {R"({"type":"number","minimum":0.5})", {"0.5", "0.50", "0.51", "1", "12.25"}, {"0.49", "0"}},
      {R"({"type":"number","exclusiveMinimum":-0.25,"exclusiveMaximum":0.125})",
       {"-0.249", "0", "0.1249", "-0.1"},
       {"-0.25", "-0.250", "0.125", "0.1250", "-1", "0.2"}},
      {R"({"type":"number","exclusiveMaximum":1})",
       {"0.99999999999999"},
       {"0.99999999999999999999", "1"}},
      {R"({"minimum":5,"exclusiveMinimum":true,"type":"integer"})", {"6"}, {"5"}},
      {R"({"type":"integer","multipleOf":7,"minimum":-20})",
       {"-14", "-7", "0", "7", "49", "700"},
       {"-21", "1", "8", "701"}},
      {R"({"type":"integer","multipleOf":5000,"maximum":1000000})",
       {"0", "5000", "-5000", "15000", "1000000"},
       {"500", "1005000", "5001", "-500"}},
      {R"({"type":"number","multipleOf":0.01,"minimum":0,"maximum":0.5})",
       {"0", "0.5", "0.50", "0.07"},
       {"0.51", "0.005", "0.500", "1"}},
      {R"({"type":"number","multipleOf":0.3,"allOf":[{"multipleOf":0.2}]})",
       {"0", "0.6", "1.2", "-6", "6.0"},
       {"0.3", "0.2", "1.3"}},
      {R"({"type":"integer","multipleOf":0.5})", {"3"}, {"1.5"}},
      {R"({"type":"number","not":{"type":"integer"}})", {"1.5", "0.50"}, {"1", "1.0", "2.00"}},
      {R"({"not":{"enum":[[1],[],{}]}})",
       {"1", "null", "[1,2]", "[1,2,3]", "{\"a\":1}"},
       {"[]", "[1]", "{}"}},
      {R"({"properties":{"a":{},"b":{}},"not":{"enum":[{"a":1},{"b":2}]}})",
       {"1", "[]", "{\"a\":1,\"b\":2}"},
       {"{}", "{\"a\":1}", "{\"b\":2}"}},
      {R"({"type":"string","maxLength":10000})",
       {"\"\"", "\"" + long_text + "\""},
       {"\"" + long_text + "y\""}},
      {R"({"type":"string","minLength":130,"maxLength":200})",
       {"\"" + std::string(130, 'a') + "\"", "\"" + std::string(200, 'a') + "\"",
        "\"" + std::string(192, '\t').replace(0, 192, std::string(192, 'b')) + "\""},
       {"\"" + std::string(129, 'a') + "\"", "\"" + std::string(201, 'a') + "\""}},
      {R"({"type":"string","pattern":"^[a-z]+$","minLength":2,"maxLength":1000})",
       {"\"ab\"", "\"" + std::string(1000, 'q') + "\""},
       {"\"a\"", "\"aB\"", "\"" + std::string(1001, 'q') + "\""}},
      {R"({"type":"string","pattern":"^(?=.*\\d)(?=.*[a-z])(?!.*\\s).{4,8}$"})",
       {"\"abc1\"", "\"1234567z\""},
       {"\"abcd\"", "\"1234\"", "\"a 12\"", "\"ab1\"", "\"abcdefg12\""}},
      {R"({"type":"string","format":"email","maxLength":12})",
       {"\"a.b@c.de\""},
       {"\"a.b@c.de.fg.hi\"", "\"ab\"", "\"a@\""}},
      {R"({"type":"string","format":"ipv6"})",
       {"\"::\"", "\"1::2\"", "\"1:2:3:4:5:6:7:8\"", "\"fe80::1\""},
       {"\"1\"", "\"1::2::3\"", "\"1:2:3:4:5:6:7:8:9\"", "\":1\""}},
      {R"({"type":"array","items":{"enum":["a","b","c"]},"uniqueItems":true,"minItems":1})",
       {"[\"a\"]", "[\"c\"]", "[\"a\",\"c\"]", "[\"a\", \"b\", \"c\"]"},
       {"[]", "[\"a\",\"a\"]", "[\"b\",\"b\",\"c\"]", "[\"d\"]"}},
      {R"({"type":"array","items":{"type":"integer","minimum":-1,"maximum":2},"uniqueItems":true})",
       {"[]", "[-1]", "[0,2]", "[-1,0,1,2]"},
       {"[0,0]", "[3]", "[-2]", "[1,2,1]"}},
      {R"({"type":"array","items":{"type":"boolean"},"maxItems":3000,"minItems":1})",
       {"[true]", "[" +
                      [] {
                        std::string items = "true";
                        for (int i = 1; i < 3000; ++i) items += ",false";
                        return items;
                      }() +
                      "]"},
       {"[]", "[" +
                  [] {
                    std::string items = "true";
                    for (int i = 1; i < 3001; ++i) items += ",false";
                    return items;
                  }() +
                  "]"}},
      {R"({"type":"object","propertyNames":{"pattern":"^[a-z]+$","maxLength":3}})",
       {"{}", "{\"ab\":1,\"abc\":[]}"},
       {"{\"abcd\":1}", "{\"A\":1}"}},
      {R"({"type":"object","properties":{"a":{},"b":{}},"minProperties":1,"maxProperties":1})",
       {"{\"a\":1}", "{\"b\":1}"},
       {"{}", "{\"a\":1,\"b\":1}"}},
      {R"({"type":"object","propertyNames":{"enum":["a","b"]},"minProperties":2,
           "additionalProperties":{"type":"integer"}})",
       {"{\"a\":1,\"b\":2}"},
       {"{\"a\":1}", "{\"a\":1,\"a\":2}", "{\"a\":1,\"c\":2}"}},
      {R"({"allOf":[{"$ref":"#/$defs/base"},{"properties":{"y":{"type":"null"}}}],
           "unevaluatedProperties":false,
           "$defs":{"base":{"type":"object","properties":{"x":{}},"required":["x"]}}})",
       {"{\"x\":1}", "{\"x\":1,\"y\":null}"},
       {"{}", "{\"x\":1,\"z\":1}", "{\"x\":1,\"y\":1}"}},
      {R"({"type":"object","properties":{"kind":{"enum":["a","b"]},"x":{"type":"integer"}},
           "required":["kind"],"if":{"properties":{"kind":{"const":"a"}}},
           "then":{"required":["x"]},"else":{"properties":{"x":false}}})",
       {"{\"kind\":\"a\",\"x\":1}", "{\"kind\":\"b\"}"},
       {"{\"kind\":\"a\"}", "{\"kind\":\"b\",\"x\":1}"}},
      {R"({"type":"object","properties":{"never":{"type":"integer","minimum":2,"maximum":1}}})",
       {"{}"},
       {"{\"never\":1}"}},
      {R"({"type":"array","items":[{"type":"null"}],"additionalItems":false})",
       {"[]", "[null]"},
       {"[1]", "[null,null]"}},
      {R"({"$ref":"#item","$defs":{"i":{"$anchor":"item","const":5}}})", {"5"}, {"4"}},
      {R"({"$id":"urn:x","$ref":"urn:x#/$defs/i%25~1","$defs":{"i%/":{"const":5}}})", {"5"}, {}},
  };
  for (const auto& c : cases) {
    const Grammar grammar = grammar_of(Json::parse(c.schema));
    for (const std::string& text : c.good) EXPECT_TRUE(accepts(grammar, text)) << c.schema << text;
    for (const std::string& text : c.bad) EXPECT_FALSE(accepts(grammar, text)) << c.schema << text;
  }
}

// Alternatives of oneOf exclude each other if a property that both require has different constants.
// Otherwise the opposite of each is needed, which not every keyword has.
TEST(Schema, AlternativesWithOtherConstantsExcludeEachOther) {
  const auto either = [](const Json& a, const Json& b, const Json& required, const Json& other) {
    const auto one = [&](const Json& kind) {
      return Json{
          {"type", "object"}, {"required", required}, {"properties", {{"k", kind}, {"x", other}}}};
    };
    return Json{{"oneOf", Json::array({one(a), one(b)})}};
  };
  const Json k = Json::array({"k"}), anything = Json::object(),
             nullable = {{"type", "string"}, {"nullable", true}};
  const auto is_refused = [&](const Json& a, const Json& b, const Json& required) {
    return error_of([&] { (void)grammar_of(either(a, b, required, nullable)); }) != "no error";
  };
  const auto of = [](const Json& value) { return Json{{"const", value}}; };
  const auto among = [](const Json& values) { return Json{{"enum", values}}; };
  EXPECT_FALSE(is_refused(of("a"), of("b"), k));
  EXPECT_FALSE(is_refused(of("a"), among({"b", "c"}), k));
  EXPECT_FALSE(is_refused(among({1, 2}), of(3), k));
  EXPECT_FALSE(is_refused(among({1, 2}), among({3, 4}), k));
  EXPECT_TRUE(is_refused(of("a"), of("a"), k));
  EXPECT_TRUE(is_refused(of(1), of(1.0), k));
  EXPECT_TRUE(is_refused(among({1, 2}), among({2, 3}), k));
  EXPECT_TRUE(is_refused(of("b"), among({"b", "c"}), k));
  EXPECT_TRUE(is_refused(of("a"), anything, k));
  EXPECT_TRUE(is_refused(of("a"), of("b"), Json::array({"x"})));
  EXPECT_TRUE(is_refused(of("a"), of("b"), "k"));

  const Grammar optional = grammar_of(either(of(1), of(2), Json::array(), anything));
  EXPECT_TRUE(accepts(optional, R"({"k":1})"));
  EXPECT_TRUE(accepts(optional, R"({"k":2})"));
  EXPECT_FALSE(accepts(optional, "{}")) << "fits both";
  const Grammar overlapping = grammar_of(either(among({1, 2}), among({2, 3}), k, anything));
  EXPECT_TRUE(accepts(overlapping, R"({"k":1})"));
  EXPECT_TRUE(accepts(overlapping, R"({"k":3})"));
  EXPECT_FALSE(accepts(overlapping, R"({"k":2})"));
}

// A text that begins a value can always be completed: a property that no value fits is left out
// together with its name.
TEST(Schema, EveryBeginningCanBeCompleted) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"object","properties":{"never":{"type":"integer","minimum":2,"maximum":1}}})",
       "{\""},
      {R"({"type":"array","items":{"allOf":[{"type":"string"},{"type":"null"}]}})", "[\""},
      {R"({"type":"integer","multipleOf":20,"minimum":41,"maximum":79})", "7"},
      {R"({"type":"string","pattern":"^(abc|a{5})$","maxLength":4})", "\"aa"},
  };
  for (const auto& [schema, begin] : cases) {
    const Grammar grammar = grammar_of(Json::parse(schema));
    TextStates states(grammar);
    TextStates::State state = states.begin();
    for (const char c : std::string_view(begin)) {
      ASSERT_NE(state, TextStates::kDead) << schema;
      state = states.after(state, static_cast<uint8_t>(c));
    }
    EXPECT_EQ(state, TextStates::kDead) << schema;
  }
}

// Characters are counted in blocks, and a token may extend from one block into the next.
TEST(Schema, AMaskOfALongTextIsWhatEveryTokenByItselfGives) {
  const Tokenizer tokenizer = Tokenizer::from_directory(TANDEM_SOURCE_DIR "/models/tiny-r1");
  const TokenTrie trie(tokenizer);
  const GrammarTokens tokens(
      grammar_of(Json::parse(R"({"type":"string","minLength":62,"maxLength":131})")), trie);
  TextStates states(tokens.grammar());
  TextStates::State state = states.after(states.begin(), '"');
  for (int n = 0; n <= 131; ++n) {
    std::vector<uint64_t> bits(mask_words(tokens.vocab_size()));
    tokens.add_allowed(states, state, bits);
    for (int32_t id = 0; id < tokens.vocab_size(); ++id) {
      if (!tokenizer.has_token(id) || tokenizer.is_added(id)) continue;
      TextStates::State after = state;
      for (const char c : tokenizer.bytes_of(id))
        if (after != TextStates::kDead) after = states.after(after, static_cast<uint8_t>(c));
      ASSERT_EQ(after != TextStates::kDead, bits[id / 64] >> id % 64 & 1)
          << n << tokenizer.bytes_of(id);
    }
    if (n < 131) state = states.after(state, 'a');
    ASSERT_NE(state, TextStates::kDead) << n;
  }
}

// n schemas made by `one`, which gets their index.
Json list_of(int n, const std::function<Json(int)>& one) {
  Json list = Json::array();
  for (int i = 0; i < n; ++i) list.push_back(one(i));
  return list;
}

// Each limit is reached, and one more is too many.
TEST(Schema, CombinationsHaveLimits) {
  const auto refusal = [](const Json& schema) {
    return error_of([&] { (void)grammar_of(schema); });
  };
  // A chain of n references to a constant.
  const auto chain = [](int n) {
    return list_of(n, [n](int i) {
      return i + 1 == n ? Json{{"const", 1}} : Json{{"$ref", fmt::format("#/$defs/{}", i + 1)}};
    });
  };
  const auto referring = [&](int n) { return Json{{"$ref", "#/$defs/0"}, {"$defs", chain(n)}}; };
  EXPECT_EQ(refusal(referring(255)), "no error");
  EXPECT_EQ(refusal(referring(256)), "#/$defs/255: too many references and schemas are combined");
  const auto opposite = [&](int n) {
    return Json{{"type", "integer"}, {"not", {{"$ref", "#/$defs/0"}}}, {"$defs", chain(n)}};
  };
  EXPECT_EQ(refusal(opposite(64)), "no error");
  EXPECT_EQ(refusal(opposite(65)), "#/not: the schema refers only to itself");
  const auto all = [](int n) {
    return Json{{"allOf", list_of(n, [](int) { return Json{{"type", "null"}}; })}};
  };
  EXPECT_EQ(refusal(all(1999)), "no error");
  EXPECT_EQ(refusal(all(2000)), "#/allOf/1999: too many references and schemas are combined");
  const auto patterns = [](int n) {
    Json of = Json::object();
    for (int i = 0; i < n; ++i) of[fmt::format("^{}", i)] = {{"type", "null"}};
    return Json{{"type", "object"}, {"patternProperties", of}};
  };
  EXPECT_EQ(refusal(patterns(6)), "no error");
  EXPECT_TRUE(says(refusal(patterns(7)), "#: more than 6 patterns of names, or 4 of "));
  const auto step = [](double of) { return Json{{"type", "number"}, {"multipleOf", of}}; };
  EXPECT_EQ(refusal(step(1e19)), "no error");
  EXPECT_TRUE(says(refusal(step(1e20)), "multiples of a step with more than 20 zeros"));
  EXPECT_EQ(refusal(step(1e-19)), "no error");
  EXPECT_TRUE(says(refusal(step(1e-20)), "multiples of a step with more than 20 zeros"));
  EXPECT_EQ(refusal(step(1000)), "no error");
  EXPECT_EQ(refusal(step(0.999)), "no error");
  EXPECT_TRUE(says(refusal(step(1.001)), "multiples of a step of more than 1000"));
}

TEST(Schema, ExpensiveSchemasAreWrittenOrRefusedInTime) {
  const auto property = [](int i) { return fmt::format("property{}", i); };
  const auto two = [&](int i) {
    return Json{{"anyOf",
                 {{{"required", Json::array({property(i)})}},
                  {{"required", Json::array({property(i + 1)})}}}}};
  };
  Json many = Json::object(), dependent = Json::object(), patterns = Json::object();
  for (int i = 0; i < 2000; ++i) many[property(i)] = {{"type", "integer"}};
  for (int i = 0; i < 40; ++i) dependent[property(i)] = Json::array({property(i + 1)});
  for (int i = 0; i < 20; ++i) patterns[fmt::format("a{}.*b", i)] = true;
  Json deep = {{"type", "string"}};
  for (int i = 0; i < 25; ++i)
    deep = {{"not", {{"oneOf", {{{"items", deep}}, {{"type", "array"}}}}}}};
  const std::pair<const char*, Json> schemas[] = {
      {"choices", {{"type", "object"}, {"allOf", list_of(40, two)}}},
      {"dependencies", {{"type", "object"}, {"dependentRequired", dependent}}},
      {"one of many",
       {{"oneOf",
         list_of(60,
                 [&](int i) {
                   return Json{{"type", "object"}, {"required", Json::array({property(i)})}};
                 })}}},
      {"deep opposites", deep},
      {"patterns of names", {{"type", "object"}, {"patternProperties", patterns}}},
      {"many properties", {{"type", "object"}, {"properties", many}, {"minProperties", 1000}}},
      {"many excluded", {{"type", "object"}, {"properties", many}, {"additionalProperties", true}}},
      {"exponential opposite", {{"not", {{"pattern", "(a|b)*a(a|b){40}"}}}}},
      {"patterns",
       {{"allOf",
         list_of(20,
                 [](int i) {
                   return Json{{"type", "string"}, {"pattern", fmt::format("a.{{{}}}b", i)}};
                 })}}},
      {"empty repeats", {{"type", "string"}, {"pattern", "((a?){1000}){1000}"}}},
      {"loops", {{"type", "string"}, {"pattern", "(((a*)*b*)*c*)*"}, {"maxLength", 1000000}}},
      {"a long text", {{"type", "string"}, {"minLength", 1000000}}},
      {"a long list", {{"type", "array"}, {"items", {{"type", "null"}}}, {"maxItems", 900000}}},
      {"contains",
       {{"type", "array"},
        {"maxItems", 500},
        {"allOf", list_of(4,
                          [](int i) {
                            return Json{{"contains", {{"const", i}}}, {"minContains", 50}};
                          })}}},
      {"steps", {{"type", "number"}, {"multipleOf", 0.997}, {"minimum", -1e15}}},
      {"coprime steps",
       {{"allOf", list_of(12,
                          [](int i) {
                            return Json{{"type", "integer"}, {"multipleOf", 2 * i + 3}};
                          })}}},
      {"constants",
       {{"enum", list_of(20000, [](int i) { return Json(i); })},
        {"not", {{"enum", list_of(20000, [](int i) { return Json(2 * i); })}}}}},
      {"references",
       {{"$ref", "#/$defs/0"},
        {"$defs", list_of(3000,
                          [](int i) {
                            return Json{{"$ref", fmt::format("#/$defs/{}", i + 1)}};
                          })}}},
  };
  for (const auto& [name, schema] : schemas) {
    const auto begin = std::chrono::steady_clock::now();
    std::string result = error_of([&] { (void)grammar_of(schema); });
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    EXPECT_LT(seconds, TANDEM_SANITIZED ? 60 : 6) << name << ": " << result;
    RecordProperty(name, fmt::format("{:.2f} s: {}", seconds, result));
    fmt::print("{}: {:.2f} s: {}\n", name, seconds, result);
  }
}

}  // namespace
}  // namespace tandem::test
