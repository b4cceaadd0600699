// Answers of the embedded model to held-out questions, by greedy generation, against the expected
// text and against the reference implementation.
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/conversation.h"
#include "cli/options.h"
#include "tests/check_close.h"
#include "tests/repository.h"
#include "text/chat_format.h"

namespace tandem::test {
namespace {

constexpr int kAtOnce = 16;

// Under a sanitizer tokens are slow and one full batch covers all code paths; the accuracy is
// measured without sanitizers.
nlohmann::json read_cases(const std::string& path) {
  std::ifstream file(path);
  nlohmann::json cases = nlohmann::json::parse(file);
  if (TANDEM_SANITIZED && cases.is_array()) cases.erase(cases.begin() + kAtOnce, cases.end());
  return cases;
}

class TinyR1 : public testing::Test {
 protected:
  const std::string directory_ = kTinyR1;
  const Tokenizer tokenizer_ = Tokenizer::from_directory(directory_);
  const ChatFormat format_{directory_, tokenizer_};

  // For each held-out question whether the answer is right.
  // Which questions, each `every`-th of them, are answered as they should be.
  std::vector<bool> right_answers(const ModelOptions& options, size_t every = 1) {
    LoadedModel loaded(options);
    std::vector<nlohmann::ordered_json> conversations;
    for (size_t i = 0; i < questions_.size(); i += every)
      conversations.push_back(first_messages("", questions_[i]["question"].get<std::string>()));
    const std::vector<std::string> got = answers(loaded, conversations);
    std::vector<bool> right;
    for (size_t i = 0; i < got.size(); ++i)
      right.push_back(got[i] == questions_[i * every]["completion"].get<std::string>());
    return right;
  }

  ModelOptions options(std::optional<WeightFormat> experts = {}) const {
    return {.directory = directory_, .context = 8192, .max_logits = kAtOnce, .experts = experts};
  }

  const nlohmann::json questions_ = read_cases(kRoot + "/tests/data/tiny_r1_questions.json");

  std::vector<std::string> answers(LoadedModel& loaded,
                                   const std::vector<nlohmann::ordered_json>& conversations) {
    std::vector<Request> requests;
    GenerateOptions generate;
    generate.max_new_tokens = 160;
    generate.sampling.temperature = 0;
    for (const auto& messages : conversations)
      requests.push_back(make_request(generate, tokenizer_, format_.prompt(messages)));
    Engine engine = engine_for(loaded, tokenizer_);
    std::vector<std::string> texts;
    for (const Completion& c : complete(engine, requests))
      texts.push_back(tokenizer_.decode(c.tokens));
    return texts;
  }
};

TEST_F(TinyR1, AnswersHeldOutQuestions) {
  ASSERT_GE(questions_.size(), TANDEM_SANITIZED ? 16u : 200u);
  const std::vector<bool> right = right_answers(options());
  const auto reference =
      read_cases(kRoot + "/tests/data/tiny_r1_reference.json")["questions"]["passed"];
  ASSERT_GE(reference.size(), right.size());
  int n_right = 0, n_as_reference = 0, n_reference = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    n_right += right[i];
    n_reference += reference[i].get<bool>();
    n_as_reference += right[i] == reference[i].get<bool>();
  }
  const double n = static_cast<double>(right.size());
  std::printf("%d of %zu right (%.1f %%); reference implementation %d\n", n_right, right.size(),
              100 * n_right / n, n_reference);
  EXPECT_GE(n_right, 0.95 * n);
  EXPECT_LE(std::abs(n_right - n_reference), 0.01 * n);
  EXPECT_GE(n_as_reference, 0.98 * n);
}

// BF16 weights are within 2^-9 of the FP8 ones, INT8 within 2^-8 of the row's largest, INT4 within
// an eighth of the group's largest.
TEST_F(TinyR1, AnswersWithExpertsInEveryFormat) {
  struct Case {
    const char* experts;
    double fewer;  // allowed loss of right answers compared with stored FP8, as a share of all
  };
  const auto count = [](const std::vector<bool>& v) {
    return std::count(v.begin(), v.end(), true);
  };
  constexpr size_t kEvery = 2;
  const auto stored = count(right_answers(options(), kEvery));
  const double n = static_cast<double>(questions_.size()) / kEvery;
  for (const Case& c : {Case{"bf16", 0.005}, Case{"int8", 0.01}, Case{"int4-32", 0.1},
                        Case{"int4", 0.1}, Case{"int4-128", 0.1}}) {
    const auto right = count(right_answers(options(weight_format(c.experts)), kEvery));
    std::printf("%s: %ld of %.0f right, as stored %ld\n", c.experts, right, n, stored);
    EXPECT_GE(static_cast<double>(right), static_cast<double>(stored) - c.fewer * n) << c.experts;
  }
}

// The reference kernels take a minute and are covered by golden_test.
TEST_F(TinyR1, AnswersOnEveryIsa) {
  const double n = static_cast<double>(questions_.size());
  for (int i = 1; i <= static_cast<int>(cpu::best_isa()); ++i) {
    ModelOptions forced = options();
    forced.isa = static_cast<cpu::Isa>(i);
    const char* name = cpu::name_of(*forced.isa);
    const std::vector<bool> right = right_answers(forced);
    const auto n_right = std::count(right.begin(), right.end(), true);
    std::printf("%s: %ld of %.0f right\n", name, n_right, n);
    EXPECT_GE(static_cast<double>(n_right), 0.98 * n) << name;
  }
}

TEST_F(TinyR1, AnswersInAConversation) {
  LoadedModel loaded(options());
  const auto talks = read_cases(kRoot + "/tests/data/tiny_r1_conversations.json");
  std::vector<nlohmann::ordered_json> conversations;
  for (const auto& talk : talks) conversations.push_back(nlohmann::ordered_json(talk["messages"]));
  const std::vector<std::string> got = answers(loaded, conversations);
  int n_right = 0;
  for (size_t i = 0; i < got.size(); ++i)
    n_right += got[i] == talks[i]["completion"].get<std::string>();
  EXPECT_GE(n_right, 0.9 * static_cast<double>(got.size()));
}

// The model was trained with its layer for multi-token prediction (tools/tiny_r1).
TEST_F(TinyR1, DraftsOfTheMtpLayerAreAcceptedAndChangeNoAnswer) {
  ModelOptions drafts = options();
  drafts.max_logits = 512;
  drafts.draft = DraftChoice::kMtp;
  drafts.draft_tokens = 1;
  LoadedModel plain(options()), drafting(drafts);
  const auto complete_all = [&](LoadedModel& loaded, float temperature, uint64_t seed, int every) {
    std::vector<Request> requests;
    for (size_t i = 0; i < questions_.size(); i += every) {
      GenerateOptions generate;
      generate.max_new_tokens = 160;
      generate.sampling.temperature = temperature;
      generate.sampling.seed = seed + i;
      const auto messages = first_messages("", questions_[i]["question"].get<std::string>());
      requests.push_back(make_request(generate, tokenizer_, format_.prompt(messages)));
    }
    Engine engine = engine_for(loaded, tokenizer_);
    return complete(engine, requests);
  };
  struct Case {
    float temperature;
    uint64_t seed;
    int every;
  };
  for (const Case& c : {Case{0, 0, 2}, Case{0.8f, 1, 4}, Case{0.8f, 2, 8}}) {
    const auto want = complete_all(plain, c.temperature, c.seed, c.every);
    const auto got = complete_all(drafting, c.temperature, c.seed, c.every);
    ASSERT_EQ(got.size(), want.size());
    double n_accepted = 0, n_rejected = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
      n_accepted += got[i].accepted_drafts;
      n_rejected += got[i].rejected_drafts;
    }
    const double rate = n_accepted / (n_accepted + n_rejected);
    std::printf("temperature %.1f: %.2f %% of %.0f drafts accepted\n", c.temperature, 100 * rate,
                n_accepted + n_rejected);
    if (c.temperature == 0) {
      EXPECT_GE(rate, 0.98);
    }
  }
}

}  // namespace
}  // namespace tandem::test
