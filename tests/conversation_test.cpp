// What the commands that generate make of options and results: requests, vocabularies, rates.
#include "cli/conversation.h"

#include <gtest/gtest.h>

#include "cli/options.h"
#include "io/json.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer t = Tokenizer::from_directory(TANDEM_SOURCE_DIR "/models/tiny-r1");
  return t;
}

TEST(Conversation, RatesAreOfWhatWasComputed) {
  Request request;
  request.prompt.resize(120);
  Completion c;
  c.cached_tokens = 20;
  c.tokens = {1, 2, 3, 4};
  EXPECT_EQ(prefill_rate(request, c), 0) << "no time";
  EXPECT_EQ(decode_rate(c), 0);
  c.prefill_seconds = 0.5;
  c.decode_seconds = 0.25;
  EXPECT_EQ(prefill_rate(request, c), 200);
  EXPECT_EQ(decode_rate(c), 12) << "the first token is of the prompt";
  c.tokens = {1};
  EXPECT_EQ(decode_rate(c), 0);
}

TEST(Conversation, MessagesBeginWithTheSystemPrompt) {
  EXPECT_EQ(first_messages("", "u").dump(), R"([{"role":"user","content":"u"}])");
  EXPECT_EQ(first_messages("s", "").dump(),
            R"([{"role":"system","content":"s"},{"role":"user","content":""}])");
}

TEST(Conversation, RequestsHaveTheirOptions) {
  GenerateOptions options;
  options.max_new_tokens = 7;
  options.sampling.temperature = 0.25;
  options.logit_bias = {"3=-1.5", "0=2"};
  Request r = make_request(options, tokenizer(), {5, 6});
  EXPECT_EQ(r.prompt, (std::vector<int32_t>{5, 6}));
  EXPECT_EQ(r.max_new_tokens, 7);
  EXPECT_EQ(r.sampling.temperature, 0.25f);
  EXPECT_EQ(r.stop_ids, tokenizer().stop_ids());
  EXPECT_FALSE(r.stop_ids.empty());
  EXPECT_EQ(r.sampling.logit_bias, (std::vector<std::pair<int32_t, float>>{{3, -1.5f}, {0, 2}}));
  options.ignore_eos = true;
  EXPECT_TRUE(make_request(options, tokenizer(), {}).stop_ids.empty());
  for (const char* wrong : {"", "1", "1=", "=1", "1=x", "1=1x", "x=1", "1x=1", "1 =1"}) {
    options.logit_bias = {"1=1", wrong};
    EXPECT_EQ(error_of([&] { make_request(options, tokenizer(), {}); }),
              std::string("--logit-bias ") + wrong + ": give ID=VALUE, such as 1=-100");
  }
}

// tiny-r1's tokenizer without three of its added tokens, whose ids are then holes.
TEST(Conversation, TheVocabularyIsTheSmaller) {
  const std::string from = TANDEM_SOURCE_DIR "/models/tiny-r1";
  auto json = nlohmann::ordered_json::parse(read_text_file(from + "/tokenizer.json", 1 << 24));
  auto others = nlohmann::ordered_json::array();
  for (const auto& token : json["added_tokens"])
    if (const int id = token["id"]; id != 503 && id != 505 && id != 507) others.push_back(token);
  json["added_tokens"] = others;
  const TempDirectory dir;
  dir.write("tokenizer.json", json.dump());
  for (const char* name : {"tokenizer_config.json", "config.json"})
    dir.write(name, read_text_file(from + "/" + name, 1 << 24));
  const Tokenizer with_holes = Tokenizer::from_directory(dir.path());
  const int n = with_holes.vocab_size();
  EXPECT_EQ(vocabulary_of(with_holes, n + 5).size, n);
  EXPECT_EQ(vocabulary_of(with_holes, n - 1).size, n - 1);
  const std::vector<int32_t> holes = with_holes.holes();
  ASSERT_EQ(holes, (std::vector<int32_t>{503, 505, 507}));
  EXPECT_EQ(vocabulary_of(with_holes, n + 5).holes, holes);
  EXPECT_EQ(vocabulary_of(with_holes, holes.back() + 1).holes, holes);
  EXPECT_EQ(vocabulary_of(with_holes, holes.back()).holes,
            std::vector<int32_t>(holes.begin(), holes.end() - 1));
}

TEST(Conversation, ReasonsHaveNames) {
  EXPECT_STREQ(name_of(FinishReason::kStop), "stop");
  EXPECT_STREQ(name_of(FinishReason::kLength), "length");
  EXPECT_STREQ(name_of(FinishReason::kDeadline), "deadline");
  EXPECT_STREQ(name_of(FinishReason::kFailed), "failed");
  EXPECT_STREQ(name_of(FinishReason::kCancelled), "cancelled");
}

}  // namespace
}  // namespace tandem
