// The requests of `tandem bench serving` at the edges: conversations that a file gives in odd ways,
// lengths at their limits, and random numbers against Python's and numpy's.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "bench/serving/dataset.h"
#include "tests/error_of.h"
#include "tests/repository.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

using test::kTinyR1;

using Pairs = std::vector<std::pair<std::string, std::string>>;

// random.seed(7); random.shuffle(list(range(n))); random.shuffle(list(range(8))) of Python 3.11:
// nothing is drawn for lists of fewer than two items.
TEST(PythonRandom, ShufflesShortLists) {
  const std::pair<std::vector<int>, std::vector<int>> wanted[] = {
      {{}, {6, 7, 2, 4, 0, 3, 1, 5}},           {{0}, {6, 7, 2, 4, 0, 3, 1, 5}},
      {{0, 1}, {1, 6, 7, 4, 0, 5, 3, 2}},       {{2, 0, 1}, {2, 3, 1, 4, 7, 0, 5, 6}},
      {{3, 1, 0, 2}, {1, 5, 3, 2, 6, 4, 7, 0}}, {{4, 0, 3, 1, 2}, {7, 5, 3, 2, 0, 4, 6, 1}}};
  for (size_t n = 0; n < std::size(wanted); ++n) {
    PythonRandom random(7);
    std::vector<int> few, eight;
    for (int i = 0; i < static_cast<int>(n); ++i) few.push_back(i);
    for (int i = 0; i < 8; ++i) eight.push_back(i);
    random.shuffle(few);
    random.shuffle(eight);
    EXPECT_EQ(few, wanted[n].first) << n;
    EXPECT_EQ(eight, wanted[n].second) << n;
  }
}

// np.random.seed(42), then np.random.randint(low, high, n) for each row; numpy 2.4.6.
TEST(NumpyRandom, DrawsFromWideAndNegativeRanges) {
  NumpyRandom random(42);
  const auto drawn = [&](int64_t low, int64_t high, int n) {
    std::vector<int64_t> numbers;
    for (int i = 0; i < n; ++i) numbers.push_back(random.integer(low, high));
    return numbers;
  };
  using Numbers = std::vector<int64_t>;
  EXPECT_EQ(drawn(0, 4294967295, 4), (Numbers{1608637542, 3421126067, 4083286876, 787846414}));
  EXPECT_EQ(drawn(0, int64_t{1} << 31, 3), (Numbers{996406378, 1201263687, 423734972}));
  EXPECT_EQ(drawn(-5, -3, 6), (Numbers{-5, -5, -4, -5, -5, -5}));
  EXPECT_EQ(drawn(-3, 0, 6), (Numbers{-1, -3, -1, -2, -3, -2}));
}

Pairs pairs_of(const std::string& text) {
  const TempFile file(text);
  return read_sharegpt(file.path());
}

TEST(ShareGpt, ReadsFilesOfNoConversations) {
  EXPECT_EQ(pairs_of("[]"), Pairs());
  EXPECT_EQ(pairs_of("[{}, 3, \"a\", null, [], [{}]]"), Pairs());
  EXPECT_EQ(pairs_of(R"([{"conversations": "a"}, {"conversations": {"value": "b"}}])"), Pairs());
}

TEST(ShareGpt, PrefersThePluralKey) {
  const std::string plural = R"("conversations": [{"value": "a"}, {"value": "b"}])",
                    singular = R"("conversation": [{"value": "c"}, {"value": "d"}])";
  EXPECT_EQ(pairs_of("[{" + plural + "," + singular + "}]"), (Pairs{{"a", "b"}}));
  EXPECT_EQ(pairs_of("[{" + singular + "," + plural + "}]"), (Pairs{{"a", "b"}}));
  EXPECT_EQ(pairs_of("[{" + singular + "}, {" + plural + "}]"), (Pairs{{"c", "d"}, {"a", "b"}}));
  // The plural is taken where it is a list, even an empty one, and else the singular.
  EXPECT_EQ(pairs_of(R"([{"conversations": [], )" + singular + "}]"), Pairs());
  EXPECT_EQ(pairs_of(R"([{"conversations": null, )" + singular + "}]"), (Pairs{{"c", "d"}}));
}

TEST(ShareGpt, ReadsOnlyTheValuesOfTurns) {
  EXPECT_EQ(pairs_of(R"([{"conversations": [
      {"value": "1", "from": "human"}, {"from": {"value": "no"}, "value": "2"}, {"value": 3}],
    "value": "no", "items": [{"value": "no"}]}])"),
            (Pairs{{"1", "2"}}));
  EXPECT_EQ(pairs_of(R"([{"conversations": [{"value": "1"}]}, {"conversations": [{"value": "2"}]},
    {"conversations": [{"value": "3"}, {"value": "4"}]}])"),
            (Pairs{{"3", "4"}}));
  // Text in a list inside the conversation belongs to no turn.
  EXPECT_EQ(pairs_of(R"([{"conversations": [{"value": "1"}, ["no"], {"value": "2"}]}])"),
            (Pairs{{"1", "2"}}));
}

TEST(ShareGpt, SaysWhatIsWrong) {
  const std::pair<const char*, std::string> cases[] = {
      {"{}", ": is not a list of conversations"},
      {"\"a\"", ": is not a list of conversations"},
      {"true", ": is not a list of conversations"},
      {R"([{"conversations": [{"value": "a"}, {"value": "b"}]},
           {"conversations": [{"value": "a"}, {"from": "b"}]}])",
       ": conversation 2 has a turn without a text as its \"value\""},
      {R"([{"conversations": [{"value": 1}, {"value": "b"}]}])",
       ": conversation 1 has a turn without a text as its \"value\""}};
  for (const auto& [text, wanted] : cases) {
    const TempFile file(text);
    EXPECT_EQ(error_of([&] { read_sharegpt(file.path()); }), file.path() + wanted) << text;
  }
}

const Tokenizer& tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  return tokenizer;
}

std::vector<ServingRequest> dataset(const DatasetOptions& options, uint32_t seed = 42) {
  PythonRandom python(seed);
  NumpyRandom numpy(seed);
  return make_dataset(options, tokenizer(), base_tokens(kTinyR1, tokenizer()), python, numpy);
}

std::string conversation_file(const Pairs& pairs) {
  nlohmann::json file = nlohmann::json::array();
  for (const auto& [first, second] : pairs)
    file.push_back({{"conversations", {{{"value", first}}, {{"value", second}}}}});
  return file.dump();
}

int n_tokens(const std::string& text) { return static_cast<int>(tokenizer().encode(text).size()); }

DatasetOptions sharegpt_of(const TempFile& file) {
  DatasetOptions o;
  o.name = "sharegpt";
  o.path = file.path();
  return o;
}

TEST(Dataset, SkipsConversationsOutsideTheLimits) {
  ASSERT_EQ(n_tokens("7"), 1);
  ASSERT_EQ(n_tokens("12"), 2);
  ASSERT_EQ(n_tokens("123456"), 6);
  {  // both turns need two tokens
    const TempFile file(conversation_file({{"7", "12"}}));
    EXPECT_EQ(dataset(sharegpt_of(file)).size(), 0U);
  }
  {
    const TempFile file(conversation_file({{"12", "7"}}));
    EXPECT_EQ(dataset(sharegpt_of(file)).size(), 0U);
    DatasetOptions o = sharegpt_of(file);
    o.sharegpt_output_tokens = 2;  // counts instead of the second turn
    EXPECT_EQ(dataset(o).at(0).output_tokens, 2);
  }
  const TempFile file(conversation_file({{"12", "123456"}}));
  DatasetOptions o = sharegpt_of(file);
  EXPECT_EQ(dataset(o).at(0).prompt_tokens, 2);
  EXPECT_EQ(dataset(o).at(0).output_tokens, 6);
  o.sharegpt_context = 8;
  EXPECT_EQ(dataset(o).size(), 1U);
  o.sharegpt_context = 7;
  EXPECT_EQ(dataset(o).size(), 0U);
  o.sharegpt_output_tokens = 5;
  EXPECT_EQ(dataset(o).at(0).output_tokens, 5);
}

TEST(Dataset, TakesNoMoreConversationsThanAskedFor) {
  const TempFile file(conversation_file({{"12", "34"}, {"56", "78"}, {"90", "12"}}));
  DatasetOptions o = sharegpt_of(file);
  for (const auto& [n_prompts, wanted] :
       {std::pair{1, size_t{1}}, std::pair{2, size_t{2}}, {3, size_t{3}}, {4, size_t{3}}}) {
    o.n_prompts = n_prompts;
    EXPECT_EQ(dataset(o).size(), wanted);
  }
  o.name = "random";
  o.n_prompts = 2;
  EXPECT_EQ(dataset(o).size(), 2U);
  o.n_prompts = 5;
  EXPECT_EQ(dataset(o).size(), 3U);
}

// The suffix stands before the word with which a prompt asks for the answer.
TEST(Dataset, AddsTheSuffix) {
  for (const auto& [prompt, wanted] : Pairs{{"12 Assistant:", "12 it?Assistant:"},
                                            {"12", "12it?Assistant:"},
                                            {"12 Assistant: ", "12 Assistant: it?Assistant:"},
                                            {"Assistant:", "it?Assistant:"}}) {
    const TempFile file(conversation_file({{prompt, "1234"}}));
    DatasetOptions o = sharegpt_of(file);
    EXPECT_EQ(dataset(o).at(0).prompt, prompt);
    o.prompt_suffix = "it?";
    EXPECT_EQ(dataset(o).at(0).prompt, wanted);
    EXPECT_EQ(dataset(o).at(0).prompt_tokens, n_tokens(wanted));
  }
}

TEST(Dataset, RepeatsAndCutsPromptsOfAFile) {
  const TempFile file(conversation_file({{"", "34"}, {"123", "4"}}));
  DatasetOptions o = sharegpt_of(file);
  o.name = "random";
  o.n_prompts = 1;
  o.range_ratio = 1;
  o.output_tokens = 3;
  for (const auto& [n, prompt] : {std::pair{7, "1231231"}, std::pair{3, "123"}, {2, "12"}}) {
    o.input_tokens = n;
    for (uint32_t seed = 0; seed < 8; ++seed) {  // the empty prompt is skipped in either place
      const std::vector<ServingRequest> requests = dataset(o, seed);
      ASSERT_EQ(requests.size(), 1U);
      EXPECT_EQ(requests[0].prompt, prompt);
      EXPECT_EQ(requests[0].prompt_tokens, n);
      EXPECT_EQ(requests[0].output_tokens, 3);
      EXPECT_TRUE(requests[0].ids.empty());
    }
  }
}

// Successive ids from a drawn offset plus the request's number, modulo the vocabulary without added
// tokens; as text, they are decoded.
TEST(Dataset, RandomIdsCountUpAndWrap) {
  EXPECT_EQ(base_tokens(kTinyR1, tokenizer()), 495);
  EXPECT_EQ(base_tokens("/no/such", tokenizer()), 512);
  DatasetOptions o;
  o.name = "random-ids";
  o.n_prompts = 3;
  o.input_tokens = 600;
  o.output_tokens = 4;
  o.range_ratio = 1;
  o.sends_ids = true;
  NumpyRandom same(42);
  const std::vector<int> offsets = same.integers(0, 495, 3);  // lengths draw nothing
  const std::vector<ServingRequest> requests = dataset(o);
  ASSERT_EQ(requests.size(), 3U);
  for (int i = 0; i < 3; ++i) {
    const ServingRequest& r = requests[static_cast<size_t>(i)];
    ASSERT_EQ(r.ids.size(), 600U);
    for (int j = 0; j < 600; ++j)
      ASSERT_EQ(r.ids[static_cast<size_t>(j)], (offsets[static_cast<size_t>(i)] + i + j) % 495);
    EXPECT_EQ(r.prompt, "");
    EXPECT_EQ(r.prompt_tokens, 600);
    EXPECT_EQ(r.output_tokens, 4);
  }
  o.sends_ids = false;
  const std::vector<ServingRequest> texts = dataset(o);
  ASSERT_EQ(texts.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(texts[i].ids.empty());
    EXPECT_EQ(texts[i].prompt, tokenizer().decode(requests[i].ids));
    EXPECT_EQ(texts[i].prompt_tokens, 600);
  }
}

// The least length is the given part of the most, rounded down, and at least 1.
TEST(Dataset, LengthsReachBothLimits) {
  DatasetOptions o;
  o.name = "random-ids";
  o.n_prompts = 400;
  o.input_tokens = 7;
  o.output_tokens = 3;
  for (const auto& [ratio, least_input, least_output] :
       {std::tuple{0.5, 3, 1}, std::tuple{0.0, 1, 1}, std::tuple{0.99, 6, 2},
        std::tuple{1.0, 7, 3}}) {
    o.range_ratio = ratio;
    int least_in = 99, most_in = 0, least_out = 99, most_out = 0;
    for (const ServingRequest& r : dataset(o)) {
      least_in = std::min(least_in, r.prompt_tokens);
      most_in = std::max(most_in, r.prompt_tokens);
      least_out = std::min(least_out, r.output_tokens);
      most_out = std::max(most_out, r.output_tokens);
    }
    EXPECT_EQ(least_in, least_input);
    EXPECT_EQ(most_in, 7);
    EXPECT_EQ(least_out, least_output);
    EXPECT_EQ(most_out, 3);
  }
}

TEST(Dataset, SaysWhatIsMissing) {
  DatasetOptions o;
  EXPECT_EQ(error_of([&] { dataset(o); }),
            "--dataset-name sharegpt: give --dataset-path, a ShareGPT file such as "
            "ShareGPT_V3_unfiltered_cleaned_split.json; --dataset-name random-ids needs none");
  const TempFile file(R"([{"conversations": [{"value": "alone"}]}])");
  o.path = file.path();
  EXPECT_EQ(error_of([&] { dataset(o); }), file.path() + ": has no conversation of two turns");
}

}  // namespace
}  // namespace tandem
