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
  request.form.kind = AnswerForm::Kind::kSchema;
  request.form.schema = {{"type", "integer"}};
  const auto alone = grammars.of(request, false), after = grammars.of(request, true);
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
  EXPECT_EQ(grammars.of({}, false), nullptr);
  EXPECT_EQ(grammars.of({}, true), nullptr);
}

// Requests with the same form and the same position of it share one grammar object; all others have
// different ones.
TEST(AnswerGrammar, IsKeptForTheNextRequest) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  GenerationRequest one, two;
  one.form.kind = two.form.kind = AnswerForm::Kind::kPattern;
  one.form.pattern = "[ab]+";
  two.form.pattern = "[ac]+";
  const auto first = grammars.of(one, false);
  EXPECT_EQ(grammars.of(one, false), first);
  EXPECT_NE(grammars.of(one, true), first);
  EXPECT_TRUE(accepts(grammars.of(two, false)->grammar(), "caac"));
  EXPECT_FALSE(accepts(first->grammar(), "caac"));
  EXPECT_EQ(grammars.of(one, false), first);
}

}  // namespace
}  // namespace tandem::test
