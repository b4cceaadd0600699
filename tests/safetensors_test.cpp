// Headers of safetensors files: valid ones, and everything that the format forbids.
#include "io/safetensors.h"

#include <gtest/gtest.h>

#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

using Shape = std::vector<int64_t>;

std::vector<TensorEntry> parse(const std::string& header, int64_t data_bytes) {
  return parse_header(header, data_bytes, "f.safetensors");
}
std::string parse_error(const std::string& header, int64_t data_bytes) {
  return error_of([&] { parse(header, data_bytes); });
}

// The fields of a tensor, and a header with the single tensor "a".
std::string fields(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":)" + fields(dtype, shape, offsets) + "}";
}
std::string two(const std::string& name, const std::string& a, const std::string& b) {
  return R"({"a":)" + a + ",\"" + name + "\":" + b + "}";
}

TEST(Safetensors, ReadsEntriesInTheOrderOfTheirOffsets) {
  const auto entries = parse(R"({"__metadata__":{"format":"pt"},)"
                             R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                             R"("a":{"data_offsets":[0,4],"shape":[],"dtype":"F32"},)"
                             R"("\u00e4\n":{"dtype":"F8_E4M3","shape":[5],"data_offsets":[16,21]},)"
                             R"("empty":{"dtype":"I64","shape":[0,7],"data_offsets":[16,16]}}   )",
                             21);
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].name, "a");
  EXPECT_EQ(entries[0].shape, Shape{});
  EXPECT_EQ(entries[1].name, "b");
  EXPECT_EQ(entries[1].shape, (Shape{2, 3}));
  EXPECT_EQ(entries[1].type->dtype, DType::kBF16);
  EXPECT_EQ(entries[1].offset, 4);
  EXPECT_EQ(entries[1].bytes, 12);
  EXPECT_EQ(entries[2].name, "empty");
  EXPECT_EQ(entries[3].name, "ä\n");
  EXPECT_EQ(entries[3].type->name, "F8_E4M3");
}

TEST(Safetensors, IndexesTypesThatItDoesNotComputeWith) {
  const auto entries = parse(one("F8_E5M2", "[3]", "[0,3]"), 3);
  EXPECT_EQ(entries[0].type->name, "F8_E5M2");
  EXPECT_FALSE(entries[0].type->dtype.has_value());
  EXPECT_EQ(parse(one("F4", "[6]", "[0,3]"), 3)[0].bytes, 3);
  EXPECT_TRUE(says(parse_error(one("F4", "[5]", "[0,3]"), 3), "does not fill whole bytes"));
}

TEST(Safetensors, MayHoldNoTensor) { EXPECT_TRUE(parse("{}", 0).empty()); }

struct Refusal {
  std::string header, message;
  int64_t data_bytes = 4;
};

class SafetensorsRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(SafetensorsRefuses, NamingTheFile) {
  const std::string error = parse_error(GetParam().header, GetParam().data_bytes);
  EXPECT_TRUE(says(error, GetParam().message));
  EXPECT_TRUE(says(error, "f.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(
    BrokenJson, SafetensorsRefuses,
    ::testing::Values(Refusal{"", "no JSON object"}, Refusal{" {}", "no JSON object"},
                      Refusal{"[]", "no JSON object"}, Refusal{"{", "broken JSON"},
                      Refusal{"{}x", "broken JSON"}, Refusal{"{\"\xff\":", "broken JSON"},
                      Refusal{one("F32", "[1]", "[0,4]") + "{}", "broken JSON"},
                      Refusal{std::string("{}\0", 3), "broken JSON"}));

INSTANTIATE_TEST_SUITE_P(
    Fields, SafetensorsRefuses,
    ::testing::Values(Refusal{one("F33", "[1]", "[0,4]"), "unknown dtype \"F33\""},
                      Refusal{one("f32", "[1]", "[0,4]"), "unknown dtype \"f32\""},
                      Refusal{one("F32", "[\"1\"]", "[0,4]"), "is not allowed here"},
                      Refusal{one("F32", "[[1]]", "[0,4]"), "a list is not allowed here"},
                      Refusal{one("F32", "1", "[0,4]"), "the number 1 is not allowed here"},
                      Refusal{one("F32", "null", "[0,4]"), "null is not allowed"},
                      Refusal{one("F32", "[true]", "[0,4]"), "true or false is not allowed"},
                      Refusal{R"({"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}})",
                              "a list is not allowed"},
                      Refusal{R"({"a":{"dtype":"F32","shape":[1]}})", "needs the fields"},
                      Refusal{R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "needs the fields"},
                      Refusal{R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "needs the fields"},
                      Refusal{
                          R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                          "dtype appears twice"},
                      Refusal{R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":1}})",
                              "unknown field \"extra\""},
                      Refusal{R"({"a":[1]})", "a list is not allowed here"},
                      Refusal{R"({"a":5})", "the number 5"},
                      Refusal{R"({"__metadata__":{},"__metadata__":{}})", "appears twice", 0},
                      Refusal{R"({"__metadata__":{"a":1}})", "the number 1 is not allowed", 0},
                      Refusal{R"({"__metadata__":{"a":{}}})", "an object is not allowed", 0},
                      Refusal{R"({"__metadata__":"x"})", "is not allowed here", 0}));

INSTANTIATE_TEST_SUITE_P(
    Sizes, SafetensorsRefuses,
    ::testing::Values(
        Refusal{one("F32", "[2]", "[0,4]"), "needs 8 bytes, its data_offsets [0, 4] hold 4"},
        Refusal{one("F32", "[-1]", "[0,4]"), "negative"},
        Refusal{one("F32", "[1.0]", "[0,4]"), "no whole number"},
        Refusal{one("F32", "[1e99]", "[0,4]"), "no whole number"},
        Refusal{one("F32", "[9223372036854775808]", "[0,4]"), "2^63 or more"},
        Refusal{one("F32", "[99999999999999999999999]", "[0,4]"), "no whole number"},
        Refusal{one("F32", "[4294967296,4294967296]", "[0,4]"), "larger than any file"},
        Refusal{one("F32", "[2305843009213693953]", "[0,4]"), "larger than any file"},
        Refusal{one("F32", "[4294967296,4294967296,0]", "[0,0]"), "larger than any file"},
        Refusal{one("U8", "[9223372036854775807]", "[0,9223372036854775807]"),
                "larger than any file"}));

INSTANTIATE_TEST_SUITE_P(
    Offsets, SafetensorsRefuses,
    ::testing::Values(
        Refusal{one("F32", "[1]", "[4,0]"), "no begin and end"},
        Refusal{one("F32", "[1]", "[0]"), "no begin and end"},
        Refusal{one("F32", "[1]", "[0,2,4]"), "no begin and end"},
        Refusal{one("F32", "[1]", "[-4,0]"), "negative"},
        Refusal{one("F32", "[1]", "[0,4]"), "ends at byte 4 of 3 bytes", 3},
        Refusal{one("F32", "[1]", "[0,4]"), "end at byte 4 of 5 bytes", 5},
        Refusal{one("F32", "[1]", "[4,8]"), "4 bytes before tensor \"a\"", 8},
        Refusal{one("U8", "[1152921504606846975]", "[0,1152921504606846975]"),
                "of 4 bytes of data"},
        Refusal{one("U8", "[1]", "[9223372036854775806,9223372036854775807]"),
                "9223372036854775806 bytes before tensor"},
        Refusal{two("b", fields("F16", "[1]", "[0,2]"), fields("F16", "[1]", "[1,3]")),
                "tensor \"b\" begins at byte 1, inside the one before"},
        Refusal{two("b", fields("F16", "[1]", "[0,2]"), fields("F16", "[1]", "[0,2]")),
                "inside the one before", 2},
        Refusal{two("b", fields("U8", "[1]", "[0,1]"), fields("U8", "[1]", "[3,4]")),
                "2 bytes before tensor \"b\""},
        Refusal{two("a", fields("F16", "[1]", "[0,2]"), fields("F16", "[1]", "[2,4]")),
                "tensor \"a\" appears twice"}));

TEST(Safetensors, RefusesDeepNestingAtOnce) {
  const std::string lists = R"({"a":)" + std::string(1'000'000, '[');
  EXPECT_TRUE(says(parse_error(lists, 0), "a list is not allowed here"));
  std::string objects = R"({"a":)";
  for (int i = 0; i < 100'000; ++i) objects += R"({"dtype":)";
  EXPECT_TRUE(says(parse_error(objects, 0), "an object is not allowed here"));
}

TEST(Safetensors, MessagesAreBounded) {
  const std::string name(100'000, 'n');
  EXPECT_TRUE(says(parse_error("{\"" + name + "\":5}", 0), "nnn.."));
  EXPECT_TRUE(says(parse_error("{\"\\u001b[31m\\n\":5}", 0), R"("\u001b[31m\n")"));
  EXPECT_TRUE(says(parse_error("{\"a\":" + std::string(100'000, 'x'), 0), "broken JSON"));
}

TEST(Safetensors, HeaderLengthMustFitTheFileAndTheFormat) {
  const auto length = [](uint64_t claimed, int64_t file_bytes) {
    const std::string bytes = length_bytes(claimed);
    return header_length(std::as_bytes(std::span<const char, 8>(bytes.data(), 8)), file_bytes, "f");
  };
  EXPECT_EQ(length(0x0201, 8 + 0x0201), 0x0201);
  EXPECT_EQ(length(100'000'000, 200'000'000), 100'000'000);
  EXPECT_TRUE(says(error_of([&] { length(11, 18); }), "11 bytes and the file only 18"));
  EXPECT_TRUE(says(error_of([&] { length(100'000'001, 200'000'000); }), "100000001 bytes"));
  EXPECT_TRUE(says(error_of([&] { length(uint64_t{1} << 63, 1 << 30); }), "more than"));
  EXPECT_TRUE(says(error_of([&] { length(~uint64_t{0}, 1 << 30); }), "Git LFS"));
}

TEST(Safetensors, ShapeText) {
  EXPECT_EQ(shape_text(Shape{}), "[]");
  EXPECT_EQ(shape_text(Shape{576, 7168}), "[576, 7168]");
  EXPECT_EQ(shape_text(Shape(10, 1)), "[1, 1, 1, 1, 1, 1, 1, 1, ..]");
}

}  // namespace
}  // namespace tandem
