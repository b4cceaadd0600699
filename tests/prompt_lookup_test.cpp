// What prompt lookup drafts, against a search of all earlier places.
#include "scheduling/drafts/prompt_lookup.h"

#include <gtest/gtest.h>

#include <random>

#include "io/json.h"
#include "model/attention_form.h"
#include "model/batch.h"
#include "tests/config_families.h"

namespace tandem {
namespace {

using Ints = std::vector<int32_t>;

Ints drafted(const Ints& tokens, int n) { return PromptLookup().draft(tokens, n); }

TEST(PromptLookup, DraftsWhatFollowedTheLongestEarlierOccurrence) {
  EXPECT_EQ(drafted({1, 2, 3, 9, 8, 1, 2, 3}, 2), (Ints{9, 8}));
  EXPECT_EQ(drafted({1, 2, 3, 9, 8, 1, 2, 3}, 9), (Ints{9, 8, 1, 2, 3})) << "up to the end";
  EXPECT_EQ(drafted({7, 1, 2, 3, 5, 1, 2, 3, 6, 7, 1, 2, 3}, 1), Ints{5}) << "longer, not newer";
  EXPECT_EQ(drafted({1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 3}, 1), Ints{6}) << "the newest of equal ones";
  EXPECT_EQ(drafted({4, 4, 4, 4}, 3), Ints{4}) << "occurrences may overlap";
}

TEST(PromptLookup, DraftsNothingWithoutAnOccurrence) {
  EXPECT_EQ(drafted({}, 4), Ints{});
  EXPECT_EQ(drafted({1, 2}, 4), Ints{});
  EXPECT_EQ(drafted({1, 2, 3}, 4), Ints{});
  EXPECT_EQ(drafted({2, 3, 9, 2, 3}, 4), Ints{}) << "two tokens are too few";
  EXPECT_EQ(drafted({1, 2, 3, 9, 1, 2, 3}, 0), Ints{});
}

// A step with drafts takes the form of attention of a step with one token, so that drafts change no
// bits. A draft needs four tokens before it.
TEST(PromptLookup, DraftsDoNotChangeTheFormOfAttention) {
  std::vector<nlohmann::json> configs = {nlohmann::json::parse(
      read_text_file(TANDEM_SOURCE_DIR "/models/tiny-r1/config.json", 1 << 20))};
  for (const char* name : {"v2-lite", "v2", "v3", "r1", "k2", "moonlight"})
    configs.push_back(family(name));
  for (const nlohmann::json& json : configs) {
    const ModelConfig config = parse(json);
    for (int n_drafts = 0; n_drafts <= kMaxDraftTokens; ++n_drafts)
      for (int known = 4; known < 5000; ++known)
        ASSERT_FALSE(naive_is_cheaper(config.mla, 1 + n_drafts, known + n_drafts))
            << json["model_type"] << " " << known << " " << n_drafts;
  }
}

// One object that sees a growing text drafts what a search of the whole text finds.
TEST(PromptLookup, AgreesWithASearch) {
  int n_found = 0;
  for (int seed = 0; seed < 300; ++seed) {
    std::mt19937 rng(seed);
    PromptLookup lookup;
    Ints tokens;
    while (tokens.size() < 60) {
      for (int i = static_cast<int>(rng() % 3); i >= 0; --i)
        tokens.push_back(static_cast<int32_t>(rng() % (2 + seed % 4)));
      const int n = 1 + static_cast<int>(rng() % 5);
      const int end = static_cast<int>(tokens.size()) - 1;
      int longest = 2, best = -1, n_compared = 0;
      for (int p = end - 1; p >= 2; --p) {
        int length = 0;
        while (length <= p && tokens[p - length] == tokens[end - length]) ++length;
        if (length >= 3 && ++n_compared <= 8 && length > longest) {
          longest = length;
          best = p;
        }
      }
      Ints expected;
      for (int i = best + 1; best >= 0 && i <= std::min(end, best + n); ++i)
        expected.push_back(tokens[i]);
      ASSERT_EQ(lookup.draft(tokens, n), expected) << "seed " << seed;
      n_found += !expected.empty();
    }
  }
  EXPECT_GT(n_found, 1000);
}

}  // namespace
}  // namespace tandem
