// Strict parsing of JSON, and untrusted text in messages.
#include "io/json.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <ctime>

#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

std::string parse_error(const std::string& text) {
  return error_of([&] { parse_json(text, "x.json"); });
}

TEST(Json, ParsesWhatIsRight) {
  EXPECT_EQ(parse_json(R"({"a":{"k":1},"b":{"k":2},"c":[{"k":3},{"k":4}]})", "x").at("b").at("k"),
            2);
  const std::string deepest = std::string(64, '[') + "1" + std::string(64, ']');
  EXPECT_EQ(parse_error(deepest), "no error");
}

TEST(Json, RefusesBrokenText) {
  for (const std::string text :
       {"", "{", "{}}", "[1,]", "{'a':1}", "nul", "\xff", "[1e999]", "\"\x01\""})
    EXPECT_TRUE(says(parse_error(text), "x.json: broken JSON")) << text;
  EXPECT_TRUE(says(parse_error(std::string("{}\0{", 4)), "byte 2 is zero"));
}

TEST(Json, RefusesDoubleKeysInEveryObject) {
  EXPECT_TRUE(says(parse_error(R"({"a":1,"a":1})"), "the key \"a\" appears twice"));
  EXPECT_TRUE(says(parse_error(R"([{"b":{"c":1},"d":{"c":1,"c":2}}])"), "\"c\" appears twice"));
  EXPECT_TRUE(says(parse_error(R"({"a":{"a":1},"b":[{"a":1}],"a":2})"), "\"a\" appears twice"));
}

TEST(Json, RefusesDeepNesting) {
  EXPECT_TRUE(says(parse_error(std::string(65, '[') + std::string(65, ']')), "64 levels"));
  EXPECT_TRUE(says(parse_error(std::string(10'000'000, '[')), "64 levels"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  EXPECT_TRUE(says(parse_error(objects), "64 levels"));
}

// Uses CPU time, because other processes share the machine.
double parsing_seconds(const std::string& text) {
  const std::clock_t start = std::clock();
  parse_json(text, "x");
  parse_ordered_json(text, "x");
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// Four times as much text takes about four times as long; a quadratic algorithm would take sixteen
// times.
TEST(Json, TakesLinearTime) {
  std::string keys = "{";
  for (int i = 0; i < 5000; ++i) keys += fmt::format("\"{}\":0,", i);
  keys.back() = '}';
  for (const std::string& item : {std::string("{\"role\":\"user\"}"), std::string("[]")}) {
    const auto many = [&](int n) {
      std::string text = "[" + keys;
      for (int i = 0; i < n; ++i) text += "," + item;
      return text + "]";
    };
    EXPECT_LT(parsing_seconds(many(160'000)), 8 * parsing_seconds(many(40'000)) + 0.05) << item;
  }
}

TEST(Json, KeepsTheOrderOfKeysWhereItIsAskedFor) {
  const std::string text = R"({"b":1,"a":{"d":2,"c":3}})";
  EXPECT_EQ(parse_ordered_json(text, "x").dump(), text);
  EXPECT_TRUE(says(error_of([&] { parse_ordered_json(R"({"a":1,"a":1})", "x"); }), "twice"));
  std::string many = "{";
  for (int i = 0; i < 7000; ++i) many += fmt::format("\"{}\":{},", i, i);
  many.back() = '}';
  EXPECT_EQ(parse_json(many, "x").size(), 7000u);
  EXPECT_TRUE(says(error_of([&] { parse_ordered_json(many, "x"); }), "too many keys"));
}

TEST(Json, ShowsUntrustedTextOnOneBoundedLine) {
  EXPECT_EQ(shown(std::string("a\n\"\x1b")), R"("a\n\"\u001b")");
  EXPECT_EQ(shown(std::string("\xff")), "\"\xef\xbf\xbd\"");
  const std::string cut = shown(std::string(1000, 'x'));
  EXPECT_LE(cut.size(), 110u);
  EXPECT_TRUE(cut.ends_with(".."));
  EXPECT_LE(shown(nlohmann::json(std::vector<int>(1000, 7))).size(), 110u);
}

TEST(Json, ReadsFilesUpToALimit) {
  const TempDirectory dir;
  dir.write("f", "12345");
  EXPECT_EQ(read_text_file(dir.file("f"), 5), "12345");
  EXPECT_TRUE(says(error_of([&] { read_text_file(dir.file("f"), 4); }), "longer than 4 bytes"));
  EXPECT_TRUE(says(error_of([&] { read_text_file(dir.file("g"), 4); }), "No such file"));
  EXPECT_TRUE(says(error_of([&] { read_text_file(dir.path(), 4); }), "cannot read"));
}

}  // namespace
}  // namespace tandem
