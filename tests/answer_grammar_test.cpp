// Grammars of whole answers: the form that a client requires, and what may precede it.
#include "server/answer_grammar.h"

#include <gtest/gtest.h>

#include "tests/grammar_texts.h"

namespace tandem::test {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer t = Tokenizer::from_directory(TANDEM_SOURCE_DIR "/models/tiny-r1");
  return t;
}

TEST(AnswerGrammar, UpToTwoLineBreaksFollowThinking) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  GenerationRequest request;
  request.response_format.kind = ResponseFormat::Kind::kSchema;
  request.response_format.schema = {{"type", "integer"}};
  const auto alone = grammars.get(request, false), after = grammars.get(request, true);
  const std::string line = "\n";
  for (int n = 0; n < 4; ++n) {
    std::string text;
    for (int i = 0; i < n; ++i) text += line;
    text += "17";
    EXPECT_EQ(accepts(alone->grammar(), text), n == 0) << n;
    EXPECT_EQ(accepts(after->grammar(), text), n <= 2) << n;
  }
  EXPECT_FALSE(accepts(after->grammar(), line + line));
}

TEST(AnswerGrammar, AFreeAnswerHasNone) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  EXPECT_EQ(grammars.get({}, false), nullptr);
  EXPECT_EQ(grammars.get({}, true), nullptr);
}

// Requests with the same form and the same position of it share one grammar object; all others have
// different ones.
TEST(AnswerGrammar, IsKeptForTheNextRequest) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  GenerationRequest one, two;
  one.response_format.kind = two.response_format.kind = ResponseFormat::Kind::kPattern;
  one.response_format.pattern = "[ab]+";
  two.response_format.pattern = "[ac]+";
  const auto first = grammars.get(one, false);
  EXPECT_EQ(grammars.get(one, false), first);
  EXPECT_NE(grammars.get(one, true), first);
  EXPECT_TRUE(accepts(grammars.get(two, false)->grammar(), "caac"));
  EXPECT_FALSE(accepts(first->grammar(), "caac"));
  EXPECT_EQ(grammars.get(one, false), first);
}

}  // namespace
}  // namespace tandem::test
