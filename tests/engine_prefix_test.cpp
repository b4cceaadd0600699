// Prompts whose keys another engine computes: the same text as without, whatever becomes of the
// other one.
#include <gtest/gtest.h>

#include "tests/other_engine.h"
#include "tests/running_engine.h"

namespace tandem::test {
namespace {

std::string long_text(int first) {
  std::string text = "Tell me. ";
  for (int i = first; i < first + 40; ++i) text += fmt::format("What is {} + {}? ", i, 1000 - i);
  return text + "What is 478 + 356?";
}

// Answers of an engine that computes all.
std::vector<std::string> computed_alone(const std::vector<std::string>& asked) {
  RunningEngine engine({});
  std::vector<std::string> texts;
  for (const std::string& text : asked) texts.push_back(engine.submit(question(text)).get().text);
  return texts;
}

int tokens_before_last(const Asked& asked) {
  return static_cast<int>(asked.request.prompt.size()) - 1;
}

TEST(EnginePrefix, TextIsThatOfOneEngine) {
  const std::vector<std::string> asked = {long_text(0), long_text(500), "What is 1 + 2?"};
  const std::vector<std::string> expected = computed_alone(asked);
  for (const int draft_tokens : {0, 2}) {
    RunningEngine prefill({});
    OtherEngine other(*prefill);
    RunningEngine decode(
        {.draft_tokens = draft_tokens, .draft = DraftChoice::kMtp, .prefixes = &other});
    std::vector<std::future<Ending>> endings;
    int n_tokens = 0, n_pages = 0;
    for (const std::string& text : asked) {
      const Asked request = question(text);
      if (tokens_before_last(request) >= kPageSize) {
        n_tokens += tokens_before_last(request);
        n_pages += pages_for(tokens_before_last(request));
      }
      endings.push_back(decode.submit(request));
    }
    for (size_t i = 0; i < asked.size(); ++i) {
      const Ending ending = endings[i].get();
      EXPECT_EQ(ending.text, expected[i]) << i;
      const int n = tokens_before_last(question(asked[i]));
      if (n >= kPageSize) {
        EXPECT_EQ(ending.cached_tokens, n) << i;
      }
    }
    EXPECT_GT(n_pages, 10);
    EXPECT_EQ(other.n_pages, n_pages);
    EXPECT_EQ(decode->counts().n_fetched_tokens, n_tokens);
    EXPECT_EQ(prefill->counts().n_fetched_tokens, 0);

    // What is in the cache is not fetched again.
    const int n_fetches = other.n_fetches;
    EXPECT_EQ(decode.submit(question(asked[0])).get().text, expected[0]);
    EXPECT_EQ(other.n_fetches, n_fetches);
    // And of a prompt that goes on differently, only what follows.
    const Asked longer = question(long_text(0) + long_text(700));
    other.n_wanted = 0;
    EXPECT_FALSE(decode.submit(longer).get().text.empty());
    EXPECT_EQ(other.n_fetches, n_fetches + 1);
    EXPECT_LT(other.n_wanted, tokens_before_last(longer));
    EXPECT_GT(other.n_wanted, 0);
  }
}

TEST(EnginePrefix, PagesThatDoNotComeAreComputedHere) {
  const std::vector<std::string> asked = {long_text(0)};
  const std::vector<std::string> expected = computed_alone(asked);
  for (const int n : {0, 1, 5}) {
    RunningEngine prefill({});
    OtherEngine other(*prefill);
    other.most_pages = n;
    RunningEngine decode({.prefixes = &other});
    const Ending ending = decode.submit(question(asked[0])).get();
    EXPECT_EQ(ending.text, expected[0]) << n;
    EXPECT_EQ(ending.cached_tokens, n * kPageSize);
    EXPECT_EQ(decode->counts().n_fetched_tokens, n * kPageSize);
  }
  RunningEngine prefill({});
  OtherEngine other(*prefill);
  other.cuts_pages = true;
  RunningEngine decode({.prefixes = &other});
  const Ending ending = decode.submit(question(asked[0])).get();
  EXPECT_EQ(ending.text, expected[0]);
  EXPECT_EQ(ending.cached_tokens, 0) << "pages of another size are not used";
  EXPECT_EQ(other.n_cancelled, 1);
}

TEST(EnginePrefix, ShortPromptsAreComputedHere) {
  RunningEngine prefill({});
  OtherEngine other(*prefill);
  other.least = 1 << 20;
  RunningEngine decode({.prefixes = &other});
  EXPECT_EQ(decode.submit(question(long_text(0))).get().text, computed_alone({long_text(0)})[0]);
  EXPECT_EQ(other.n_fetches, 0);
}

// The cache is too small for what arrives beside what runs: the rest is computed when there is
// room.
TEST(EnginePrefix, ACacheThatIsFullTakesNoMorePages) {
  const std::vector<std::string> asked = {long_text(0), long_text(500), long_text(900)};
  const std::vector<std::string> expected = computed_alone(asked);
  RunningEngine prefill({});
  OtherEngine other(*prefill);
  RunningEngine decode({.kv_tokens = 1280, .context = 1280, .prefixes = &other});
  std::vector<std::future<Ending>> endings;
  for (const std::string& text : asked) endings.push_back(decode.submit(question(text)));
  for (size_t i = 0; i < asked.size(); ++i) EXPECT_EQ(endings[i].get().text, expected[i]) << i;
}

TEST(EnginePrefix, OthersGoOnWhilePagesDoNotCome) {
  RunningEngine prefill({});
  OtherEngine other(*prefill);
  other.silent = true;
  std::future<Ending> aborted, overdue, late, cut;
  {
    RunningEngine decode({.prefixes = &other});
    SequenceId id = 0;
    aborted = decode.submit(question(long_text(0)), &id);
    Asked hasty = question(long_text(500));
    hasty.deadline = Clock::now() + std::chrono::milliseconds(50);
    overdue = decode.submit(std::move(hasty));
    EXPECT_EQ(overdue.get().finish, FinishReason::kDeadline);
    late = decode.submit(question(long_text(700)));
    EXPECT_FALSE(decode.submit(question("What is 1 + 2?")).get().text.empty());
    decode->abort(id);
    EXPECT_FALSE(decode.submit(question("What is 2 + 2?")).get().text.empty());
    EXPECT_EQ(other.n_cancelled, 2) << "one aborted, one overdue";
    ASSERT_EQ(other.receivers.size(), 3u);
    other.receivers[2].ended();
    EXPECT_EQ(late.get().text, computed_alone({long_text(700)})[0]);
    cut = decode.submit(question(long_text(900)));
    EXPECT_FALSE(decode.submit(question("What is 3 + 2?")).get().text.empty());
  }
  EXPECT_EQ(cut.get().finish, FinishReason::kCancelled);
}

}  // namespace
}  // namespace tandem::test
