// Requests that can never run are refused before anything is computed.
#include "scheduling/request.h"

#include <gtest/gtest.h>

#include "tests/error_of.h"

namespace tandem {
namespace {

constexpr int kTokens = 10;
const Vocabulary kVocabulary = {kTokens, {}};

std::string refusal(std::vector<int32_t> prompt, int n_new, int64_t context,
                    std::optional<int> first_scored = {}) {
  EngineRequest asked = {};
  asked.request.prompt = std::move(prompt);
  asked.request.max_new_tokens = n_new;
  if (first_scored) asked.first_scored = *first_scored;
  return error_of([&] { require_runnable(asked, kTokens, context, kVocabulary); });
}

TEST(Requests, ThatFitRun) {
  EXPECT_EQ(refusal({0, 9, 5, 5, 5}, 1, 6), "no error");
  EXPECT_EQ(refusal({1}, 1000, 2), "no error") << "the answer ends with the context";
  EXPECT_EQ(refusal({0, 9, 5, 5, 5}, 0, 5, 1), "no error") << "tokens are scored, none is drawn";
}

TEST(Requests, ThatDoNotFitAreRefused) {
  EXPECT_EQ(refusal({1, 2, 3, 4, 5}, 1, 5),
            "the prompt has 5 tokens and the context 5: shorten it or raise --ctx above 5");
  EXPECT_EQ(refusal({1, 2, 3, 4, 5}, 0, 4, 0),
            "the prompt has 5 tokens and the context 4: shorten it or raise --ctx above 4");
  EXPECT_EQ(refusal({1}, 0, 9), "0 new tokens asked for: must be 1 or more");
  EXPECT_EQ(refusal({1}, -1, 9, 0), "-1 new tokens asked for: must be 0 or more");
  EXPECT_EQ(refusal({1, 10}, 1, 9), "token 10 is not in the model's vocabulary of 10");
  EXPECT_EQ(refusal({-1, 1}, 1, 9), "token -1 is not in the model's vocabulary of 10");
}

TEST(Requests, TheFirstProblemIsNamed) {
  EXPECT_EQ(refusal({}, 0, 0), "the prompt is empty: give at least one token");
  EXPECT_EQ(refusal({10}, 0, 0), "0 new tokens asked for: must be 1 or more");
  EXPECT_EQ(refusal({10}, 1, 1),
            "the prompt has 1 tokens and the context 1: shorten it or raise --ctx above 1");
}

}  // namespace
}  // namespace tandem
