// Grammars of numbers and of counted repetitions against every text of a small world, and the exact
// decimal arithmetic below them.
#include "text/grammar/number_grammar.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/error_of.h"
#include "tests/grammar_texts.h"

namespace tandem::test {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Decimal& d) {
  return (d.negative ? "-" : "") + d.integer + (d.fraction.empty() ? "" : "." + d.fraction);
}
Decimal decimal(const char* text) { return decimal_of(Json::parse(text)); }

TEST(Decimal, IsReadExactly) {
  for (const auto& [json, wanted] : {std::pair{"0", "0"},
                                     std::pair{"-0", "0"},
                                     {"-0.0", "0"},
                                     {"7", "7"},
                                     {"-7", "-7"},
                                     {"100", "100"},
                                     {"0.5", "0.5"},
                                     {"-12.25", "-12.25"},
                                     {"1e3", "1000"},
                                     {"1.5e3", "1500"},
                                     {"2.5e1", "25"},
                                     {"1e-3", "0.001"},
                                     {"1.25e-7", "0.000000125"},
                                     {"1e25", "10000000000000000000000000"},
                                     {"18446744073709551615", "18446744073709551615"},
                                     {"-9223372036854775808", "-9223372036854775808"}})
    EXPECT_EQ(text_of(decimal(json)), wanted) << json;
  for (const auto& [value, exponent, wanted] : {std::tuple{"12.5", 1, "1.25"},
                                                std::tuple{"12.5", -1, "125"},
                                                {"12.5", -3, "12500"},
                                                {"12.5", 3, "0.0125"},
                                                {"-200", 2, "-2"},
                                                {"0", 5, "0"},
                                                {"0.01", -2, "1"}})
    EXPECT_EQ(text_of(shifted(decimal(value), exponent)), wanted) << value;
}

TEST(Decimal, IsCompared) {
  const char* const ascending[] = {"-100", "-99.5", "-12",  "-9",   "-0.5", "-0.25", "-0.05",
                                   "0",    "0.05",  "0.25", "0.5",  "1",    "1.05",  "1.5",
                                   "9",    "10",    "12",   "99.5", "100",  "1e20"};
  for (size_t i = 0; i < std::size(ascending); ++i)
    for (size_t j = 0; j < std::size(ascending); ++j) {
      const int order = compare(decimal(ascending[i]), decimal(ascending[j]));
      EXPECT_EQ(order < 0, i < j) << ascending[i] << " " << ascending[j];
      EXPECT_EQ(order > 0, i > j) << ascending[i] << " " << ascending[j];
    }
}

TEST(Decimal, StepsHaveNineDigits) {
  const auto text = [](const std::optional<DecimalStep>& s) {
    return s ? std::to_string(s->digits) + "e" + std::to_string(s->exponent) : "none";
  };
  for (const auto& [value, wanted] : {std::pair{"1", "1e0"},
                                      std::pair{"20", "2e1"},
                                      {"0.05", "5e-2"},
                                      {"12.5", "125e-1"},
                                      {"999999999", "999999999e0"},
                                      {"1000000001", "none"},
                                      {"1000000000", "1e9"},
                                      {"0.999999999", "999999999e-9"},
                                      {"0", "none"},
                                      {"-1", "none"}})
    EXPECT_EQ(text(step_of(decimal(value))), wanted) << value;
  const auto common = [&](const char* a, const char* b) {
    return text(common_multiple(*step_of(decimal(a)), *step_of(decimal(b))));
  };
  EXPECT_EQ(common("4", "6"), "12e0");
  EXPECT_EQ(common("0.3", "0.2"), "6e-1");
  EXPECT_EQ(common("20", "3"), "6e1");
  EXPECT_EQ(common("4", "25"), "1e2");
  EXPECT_EQ(common("0.5", "300"), "3e2");
  EXPECT_EQ(common("99991", "10000"), "99991e4");
  EXPECT_EQ(common("99991", "99989"), "none");
  EXPECT_EQ(common("1e9", "1"), "none");
  EXPECT_EQ(common("1e8", "1"), "1e8");
  for (const auto& [value, step, wanted] : {std::tuple{"12", "4", true},
                                            std::tuple{"12", "5", false},
                                            {"0", "7", true},
                                            {"0.75", "0.25", true},
                                            {"0.8", "0.25", false},
                                            {"-6", "3", true},
                                            {"40", "20", true},
                                            {"30", "20", false},
                                            {"1e20", "1000", true}})
    EXPECT_EQ(is_multiple(decimal(value), *step_of(decimal(step))), wanted) << value << " " << step;
}

// Bounds, with and without themselves, and steps, against all multiples of a twentieth from -13 to
// 13, in units of a hundredth.
TEST(NumberGrammar, AcceptsWhatLiesWithin) {
  std::vector<std::pair<int, std::string>> texts;
  for (int n = -1300; n <= 1300; n += 5)
    texts.emplace_back(n, text_of(decimal_of(Json(n / 100.0))));
  const int bounds[] = {-1250, -1000, -100, -5, 0, 5, 50, 100, 995, 1000, 1250};
  const int steps[] = {0, 100, 25, 300, 1000, 15};  // 0: none
  int n_grammars = 0, flags = 0;
  for (const int low : bounds)
    for (const int high : bounds) {
      if (low > high) continue;
      const int step = steps[n_grammars++ % 6];
      flags = (flags + 1) % 16;
      const bool has_low = (flags & 3) != 3, has_high = (flags & 12) != 12;
      const bool above = has_low && (flags & 1), below = has_high && (flags & 4);
      Json schema = {{"type", "number"}};
      if (has_low) schema[above ? "exclusiveMinimum" : "minimum"] = low / 100.0;
      if (has_high) schema[below ? "exclusiveMaximum" : "maximum"] = high / 100.0;
      if (step > 0) schema["multipleOf"] = step / 100.0;
      std::optional<Grammar> grammar;
      const std::string error = error_of([&] { grammar = grammar_of(schema); });
      int n_differences = 0;
      for (const auto& [n, text] : texts) {
        const bool wanted = (!has_low || n > low || (n == low && !above)) &&
                            (!has_high || n < high || (n == high && !below)) &&
                            (step == 0 || n % step == 0);
        if ((grammar && accepts(*grammar, text)) != wanted && ++n_differences < 3)
          ADD_FAILURE() << schema << " and " << text << ": " << error;
      }
      if (!grammar) continue;
      EXPECT_EQ(accepts(*grammar, "-0"), schema.size() == 1) << schema;  // any number of JSON
      for (const char* never : {"00", "01", "-01", "1.", ".5", "-", "+1", "", "-.5"})
        EXPECT_FALSE(accepts(*grammar, never)) << schema << " and " << never;
    }
  EXPECT_EQ(n_grammars, 66);
}

TEST(NumberGrammar, DigitsAreLimited) {
  const auto is = [](const Json& schema, const std::string& text) {
    return accepts(grammar_of(schema), text);
  };
  const auto nines = [](int n) { return std::string(static_cast<size_t>(n), '9'); };
  const Json natural = {{"type", "integer"}, {"minimum", 0}};
  EXPECT_TRUE(is(natural, nines(18)));
  EXPECT_FALSE(is(natural, nines(19)));
  const Json large = {{"type", "integer"}, {"minimum", 1'000'000'000'000'000'000}};
  EXPECT_TRUE(is(large, nines(19)));
  EXPECT_FALSE(is(large, nines(20)));
  EXPECT_FALSE(is(large, nines(18)));
  // The digits before and after the point are 15 together.
  const Json positive = {{"type", "number"}, {"minimum", 0}};
  EXPECT_TRUE(is(positive, "1." + nines(14)));
  EXPECT_FALSE(is(positive, "1." + nines(15)));
  EXPECT_TRUE(is(positive, "123." + nines(12)));
  EXPECT_FALSE(is(positive, "123." + nines(13)));
  const Json tiny = {{"type", "number"}, {"minimum", 1e-20}, {"maximum", 1}};
  EXPECT_TRUE(is(tiny, "0." + std::string(19, '0') + "1"));
  EXPECT_FALSE(is(tiny, "0." + std::string(20, '0') + "1"));
  const Json hundredths = {{"type", "number"}, {"multipleOf", 0.01}};
  EXPECT_TRUE(is(hundredths, "1.50"));
  EXPECT_FALSE(is(hundredths, "1.500"));
  for (const auto& [step, wanted] : {std::pair{1000.0, "no error"},
                                     std::pair{999.0, "no error"},
                                     {1001.0, "multiples of a step of more than 1000 "},
                                     {1e19, "no error"},
                                     {1e20, "multiples of a step with more than 20 zeros"}})
    EXPECT_TRUE(says(error_of([&] {
                       grammar_of({{"type", "number"}, {"multipleOf", step}});
                     }),
                     wanted))
        << step;
}

// Counts around the blocks of 32 in which repetitions are counted.
TEST(Repetition, CountsAcrossBlocks) {
  const std::pair<int, int> ranges[] = {{0, 0},   {0, 1},   {1, 1},   {0, 31},  {31, 32}, {32, 32},
                                        {32, 33}, {33, 64}, {63, 65}, {64, 64}, {0, 96},  {5, 100},
                                        {65, 97}, {96, -1}, {0, -1},  {1, -1},  {33, -1}};
  for (const auto& [min, max] : ranges) {
    Json schema = {{"type", "string"}, {"minLength", min}};
    if (max >= 0) schema["maxLength"] = max;
    const Grammar grammar = grammar_of(schema);
    for (int n = 0; n <= 130; ++n)
      ASSERT_EQ(accepts(grammar, "\"" + std::string(static_cast<size_t>(n), 'a') + "\""),
                n >= min && (max < 0 || n <= max))
          << min << " " << max << " " << n;
  }
}

// Up to 64 items are written one by one, more as a repetition.
TEST(Repetition, OfItems) {
  const std::pair<int, int> ranges[] = {{0, 0},   {0, 1},   {1, 1},  {2, 3},   {64, 65},
                                        {0, 65},  {65, 66}, {0, 66}, {66, 66}, {66, -1},
                                        {0, 100}, {40, 98}, {0, -1}, {2, -1},  {97, 97}};
  for (const auto& [min, max] : ranges) {
    Json schema = {{"type", "array"}, {"items", {{"const", 7}}}, {"minItems", min}};
    if (max >= 0) schema["maxItems"] = max;
    const Grammar grammar = grammar_of(schema);
    std::string items;
    for (int n = 0; n <= 130; ++n) {
      ASSERT_EQ(accepts(grammar, "[" + items + "]"), n >= min && (max < 0 || n <= max))
          << min << " " << max << " " << n;
      items += items.empty() ? "7" : ",7";
    }
  }
}

// The first three items have schemas of their own.
TEST(Repetition, OfItemsAfterOthers) {
  const std::string items[] = {"", "1", "1,2", "1,2,3", "1,2,3,7", "1,2,3,7,7", "1,2,3,7,7,7"};
  for (int min = 0; min <= 5; ++min)
    for (int max = min; max <= 6; ++max) {
      Json schema = {{"type", "array"},
                     {"prefixItems", {{{"const", 1}}, {{"const", 2}}, {{"const", 3}}}},
                     {"items", {{"const", 7}}},
                     {"minItems", min}};
      if (max < 6) schema["maxItems"] = max;
      const Grammar grammar = grammar_of(schema);
      for (int n = 0; n <= 6; ++n)
        EXPECT_EQ(accepts(grammar, "[" + items[n] + "]"), n >= min && n <= max)
            << min << " " << max << " " << n;
      for (const char* never : {"[7]", "[1,7]", "[1,2,7]", "[1,2,3,4]", "[1,]"})
        EXPECT_FALSE(accepts(grammar, never)) << never;
    }
}

}  // namespace
}  // namespace tandem::test
