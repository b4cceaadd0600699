#include "text/utf8.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tandem {
namespace {

constexpr size_t kValid = std::string_view::npos;

std::string replaced(std::string_view bytes) {
  Utf8Stream stream;
  std::string text = stream.push(bytes);
  return text + stream.flush();
}

TEST(Utf8, FindsTheFirstByteThatIsNotUtf8) {
  const std::vector<std::pair<std::string_view, size_t>> cases = {
      {"", kValid},
      {"plain text, longer than eight bytes", kValid},
      {"\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x8C\x8D", kValid},
      {std::string_view("a\0b", 3), kValid},
      {"\xED\x9F\xBF\xEE\x80\x80", kValid},  // the neighbours of the surrogates
      {"\xF4\x8F\xBF\xBF", kValid},          // U+10FFFF
      {"12345678\x80", 8},                   // a continuation byte alone
      {"\xC0\xAF", 0},                       // overlong
      {"\xC1\xBF", 0},
      {"a\xE0\x9F\xBF", 1},
      {"\xF0\x8F\xBF\xBF", 0},
      {"\xED\xA0\x80", 0},      // a surrogate
      {"\xF4\x90\x80\x80", 0},  // beyond U+10FFFF
      {"\xF5\x80\x80\x80", 0},
      {"\xFF", 0},
      {"ok\xE4\xBD", 2},  // cut short
      {"ok\xC3", 2},
      {"\xE4\xBD\x41", 0},
      {"\xF0\x9F\x8C\xC3", 0},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(find_invalid_utf8(text), expected) << text;
}

TEST(Utf8, EveryScalarValueSurvives) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(text, c);
    ASSERT_EQ(find_invalid_utf8(text), kValid) << static_cast<uint32_t>(c);
    const CodePoint decoded = decode_utf8(text, 0);
    ASSERT_EQ(decoded.value, c);
    ASSERT_EQ(decoded.n_bytes, text.size());
    ASSERT_EQ(count_code_points(text), 1u);
  }
}

TEST(Utf8, SkipsCodePoints) {
  const std::string text = "abcdefghijklmnopé的😀x12345678y的zabcdefg";
  std::vector<size_t> begins;
  for (size_t at = 0; at < text.size(); at += decode_utf8(text, at).n_bytes) begins.push_back(at);
  begins.push_back(text.size());
  for (size_t from = 0; from < begins.size(); ++from)
    for (size_t n = 0; from + n < begins.size(); ++n)
      ASSERT_EQ(skip_code_points(text, begins[from], n), begins[from + n]) << from << " " << n;
}

// Unicode 15, tables 3-8 to 3-11: one U+FFFD for each maximal ill-formed part.
TEST(Utf8, ReplacesAsTheStandardShows) {
  EXPECT_EQ(replaced("a\xF1\x80\x80\xE1\x80\xC2"
                     "b\x80"
                     "c\x80\xBF"
                     "d"),
            "a\uFFFD\uFFFD\uFFFDb\uFFFDc\uFFFD\uFFFDd");
  EXPECT_EQ(replaced("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82"
                     "A"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA");
  EXPECT_EQ(replaced("\xED\xA0\x80\xED\xBF\xBF\xED\xAF"
                     "A"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA");
  EXPECT_EQ(replaced("\xF4\x91\x92\x93\xFF"
                     "A\x80\xBF"
                     "B"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA\uFFFD\uFFFDB");
  EXPECT_EQ(replaced("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF"
                     "A"),
            "\uFFFD\uFFFD\uFFFD\uFFFDA");
}

TEST(Utf8, StreamHoldsBackAnIncompleteCharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push(" \xF0"), " ");
  EXPECT_EQ(stream.push("\x9F"), "");
  EXPECT_EQ(stream.push("\x8C"), "");
  EXPECT_EQ(stream.push("\x8D!"), "\U0001F30D!");
  EXPECT_EQ(stream.flush(), "");
  EXPECT_EQ(stream.push("\xE4\xBD"), "");
  EXPECT_EQ(stream.flush(), "\uFFFD");
  EXPECT_EQ(stream.push("\xE4"), "");
  EXPECT_EQ(stream.push("x"), "\uFFFDx");  // the bytes can never become a character
  EXPECT_EQ(stream.push(""), "");
  EXPECT_EQ(stream.flush(), "");
}

TEST(Utf8, StreamDoesNotDependOnWhereTheBytesAreCut) {
  std::mt19937 random(5);
  const std::string_view bytes(
      "a\x80\xBF\xC2\xC3\xE0\xA0\xE4\xBD\xED\x9F\xF0\x90\x9F\x8D\xF4\x8F\xFF", 18);
  for (int trial = 0; trial < 20000; ++trial) {
    std::string input;
    for (size_t n = random() % 12; n > 0; --n) input += bytes[random() % bytes.size()];
    Utf8Stream stream;
    std::string text;
    for (size_t at = 0; at < input.size();) {
      const size_t n = std::min<size_t>(1 + random() % 4, input.size() - at);
      const std::string piece = stream.push(std::string_view(input).substr(at, n));
      ASSERT_EQ(find_invalid_utf8(piece), kValid);
      text += piece;
      at += n;
    }
    text += stream.flush();
    ASSERT_EQ(text, replaced(input));
    ASSERT_EQ(text == input, find_invalid_utf8(input) == kValid);
  }
}

}  // namespace
}  // namespace tandem
