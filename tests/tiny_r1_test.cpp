// The embedded model really answers: held-out questions, by greedy generation, against the expected
// text and against the reference implementation on the same questions.
#include <fstream>
#include <nlohmann/json.hpp>

#include "conversation.h"
#include "tests/check_close.h"

namespace tandem::test {
namespace {

const std::string kRoot = TANDEM_SOURCE_DIR;

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

class TinyR1 : public testing::Test {
 protected:
  static constexpr int kAtOnce = 16;
  const std::string directory_ = kRoot + "/models/tiny-r1";
  const Tokenizer tokenizer_ = Tokenizer::from_directory(directory_);
  const ChatFormat format_{directory_, tokenizer_};

  std::vector<std::string> answers(LoadedModel& loaded,
                                   const std::vector<nlohmann::ordered_json>& conversations) {
    std::vector<Request> requests;
    GenerateOptions options;
    options.max_new_tokens = 160;
    options.sampling.temperature = 0;
    for (const auto& messages : conversations)
      requests.push_back(make_request(options, tokenizer_, format_.prompt(messages)));
    Generator generator(loaded.model(), loaded.cache(),
                        vocabulary_of(tokenizer_, loaded.config().vocab), loaded.context());
    std::vector<std::string> texts;
    for (const Completion& c : generator.run(requests, {}))
      texts.push_back(tokenizer_.decode(c.tokens));
    return texts;
  }
};

TEST_F(TinyR1, AnswersHeldOutQuestions) {
  LoadedModel loaded({.directory = directory_, .context = 8192, .max_logits = kAtOnce});
  const auto questions = read_json(kRoot + "/tests/data/tiny_r1_questions.json");
  ASSERT_GE(questions.size(), 200u);
  std::vector<nlohmann::ordered_json> conversations;
  for (const auto& q : questions)
    conversations.push_back(first_messages("", q["question"].get<std::string>()));
  const std::vector<std::string> got = answers(loaded, conversations);

  const auto reference =
      read_json(kRoot + "/tests/data/tiny_r1_reference.json")["questions"]["passed"];
  ASSERT_EQ(reference.size(), questions.size());
  int n_right = 0, n_as_reference = 0, n_reference = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool right = got[i] == questions[i]["completion"];
    n_right += right;
    n_reference += reference[i].get<bool>();
    n_as_reference += right == reference[i].get<bool>();
  }
  const double n = static_cast<double>(got.size());
  std::printf("%d of %zu right (%.1f %%); reference implementation %d\n", n_right, got.size(),
              100 * n_right / n, n_reference);
  EXPECT_GE(n_right, 0.95 * n);
  EXPECT_LE(std::abs(n_right - n_reference), 0.01 * n);
  EXPECT_GE(n_as_reference, 0.98 * n);
}

TEST_F(TinyR1, AnswersInAConversation) {
  LoadedModel loaded({.directory = directory_, .context = 8192, .max_logits = kAtOnce});
  const auto talks = read_json(kRoot + "/tests/data/tiny_r1_conversations.json");
  std::vector<nlohmann::ordered_json> conversations;
  for (const auto& talk : talks) conversations.push_back(nlohmann::ordered_json(talk["messages"]));
  const std::vector<std::string> got = answers(loaded, conversations);
  int n_right = 0;
  for (size_t i = 0; i < got.size(); ++i) n_right += got[i] == talks[i]["completion"];
  EXPECT_GE(n_right, 0.9 * static_cast<double>(got.size()));
}

}  // namespace
}  // namespace tandem::test
