// The scheduler with a simulated model: random traces, and tests of each guarantee.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/error_of.h"
#include "tests/simulated_engine.h"

namespace tandem::test {
namespace {

// Offloaded and copied pages of all traces.
struct Swaps {
  int64_t n_in = 0, n_copied_out = 0, n_copied_in = 0, n_copied_within = 0, n_shares = 0;
  int64_t n_drafted = 0, n_accepted = 0;  // tokens
};

void play_random_trace(int seed, Swaps& swaps, bool drafts = false, int n_stages = 1) {
  std::mt19937 rng(seed);
  const auto up_to = [&](int n) { return static_cast<int>(rng() % n); };
  Scheduler::Limits limits;
  limits.n_pages = 1 + up_to(seed % 2 == 0 ? 24 : 8);
  limits.max_tokens = 1 + up_to(100);
  limits.max_running = 1 + up_to(std::min(limits.max_tokens, 12));
  limits.max_logits = limits.max_running + (up_to(2) ? up_to(20) : 0);
  limits.keeps_pages = up_to(4) > 0;
  limits.n_host_pages = up_to(4) > 0 ? up_to(30) : 0;
  Simulation simulation(limits);
  const int longest = limits.n_pages * kPageSize;
  // Copying a page out and back takes 2 s, computing its 64 tokens about 2 s.
  SwapRates rates = {1, 1, 1, 24.0 + up_to(16)};
  if (up_to(3) > 0) rates.computed_tokens_per_second = 1;
  simulation.scheduler.set_rates(rates);
  if (drafts) simulation.drafts = {1 + seed % 8, (seed % 11) / 10.0, std::mt19937(seed)};

  std::map<SequenceId, std::vector<int32_t>> expected;
  int64_t n_tokens = 0;
  for (int left = 1 + up_to(25); left > 0 || up_to(8) > 0;) {
    const int what = up_to(20);
    if (what < 5 && left > 0) {
      --left;
      const auto prompt = prompt_with_known_beginning(rng, std::min(longest - 1, 300));
      const int n_new = 1 + up_to(std::min<int>(150, longest - static_cast<int>(prompt.size())));
      n_tokens += static_cast<int64_t>(prompt.size()) + n_new;
      expected[simulation.add(prompt, n_new, up_to(4) == 0)] = alone(prompt, n_new);
    } else if (what == 5 && !simulation.unfinished().empty() && up_to(3) == 0) {
      auto victim = simulation.unfinished().begin();
      std::advance(victim, up_to(static_cast<int>(simulation.unfinished().size())));
      const SequenceId id = victim->first;
      simulation.abort(id);
      expected[id].clear();
    } else if (what == 6 && up_to(5) == 0) {
      simulation.scheduler.forget_pages();
    } else {
      simulation.step_of_stages(n_stages);
    }
    if (testing::Test::HasFatalFailure() || testing::Test::HasNonfatalFailure()) return;
  }
  simulation.run(n_stages);
  for (const auto& [id, tokens] : expected) {
    EXPECT_EQ(simulation.n_ended[id], 1) << id;
    if (tokens.empty()) continue;  // aborted
    EXPECT_EQ(simulation.texts[id], tokens) << id;
  }
  EXPECT_LE(simulation.n_steps, n_tokens) << "every step moves a sequence";
  EXPECT_EQ(simulation.scheduler.counts().n_drafted_tokens, simulation.n_drafted);
  EXPECT_EQ(simulation.scheduler.counts().n_accepted_tokens, simulation.n_accepted);
  swaps.n_drafted += simulation.n_drafted;
  swaps.n_accepted += simulation.n_accepted;
  swaps.n_in += simulation.scheduler.counts().n_swaps_in;
  swaps.n_copied_out += simulation.n_copied_out;
  swaps.n_copied_in += simulation.n_copied_in;
  swaps.n_copied_within += simulation.n_copied_within;
  swaps.n_shares += simulation.n_shares;
}

TEST(Scheduler, RandomTraces) {
  Swaps swaps;
  for (int seed = 0; seed < 1000 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    play_random_trace(seed, swaps);
  }
  EXPECT_GT(swaps.n_in, 200);
  EXPECT_GT(swaps.n_copied_in, 250);
  EXPECT_GT(swaps.n_copied_within, 250);
  EXPECT_GT(swaps.n_copied_out, swaps.n_copied_in) << "some are found on the GPU, some aborted";
}

// The same texts with drafts that are accepted at random: each token is computed where it belongs,
// rejected ones leave no page and no key behind.
TEST(Scheduler, RandomTracesWithDrafts) {
  Swaps swaps;
  for (int seed = 0; seed < 500 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    play_random_trace(seed, swaps, true);
  }
  EXPECT_GT(swaps.n_in, 50);
  EXPECT_GT(swaps.n_drafted, 25'000);
  EXPECT_GT(swaps.n_accepted, swaps.n_drafted / 5);
  EXPECT_LT(swaps.n_accepted, swaps.n_drafted / 2);
}

// The same texts where the stages of a pipeline have shares of the sequences in flight, of which
// some are removed meanwhile.
TEST(Scheduler, RandomTracesInFlight) {
  for (const int n_stages : {2, 3, 5}) {
    Swaps swaps;
    for (int seed = 0; seed < 400 && !HasFailure(); ++seed) {
      SCOPED_TRACE(fmt::format("{} stages, seed {}", n_stages, seed));
      play_random_trace(seed, swaps, seed % 2 == 1, n_stages);
    }
    EXPECT_GT(swaps.n_shares, 20'000);
    EXPECT_GT(swaps.n_in, 50);
    EXPECT_GT(swaps.n_copied_within, 50);
  }
}

// Prompts and sequences that can be admitted are planned when nothing is in flight.
TEST(Scheduler, SharesAreOfSequencesThatAllDecode) {
  Simulation s({.n_pages = 8, .max_tokens = 100, .max_running = 4});
  EXPECT_TRUE(s.scheduler.only_decodes());
  s.add(text(10, 1), 300);
  EXPECT_FALSE(s.scheduler.only_decodes()) << "it can be admitted";
  s.step();
  EXPECT_TRUE(s.scheduler.only_decodes());
  const SequenceId second = s.add(text(150, 2), 300);
  s.step();
  EXPECT_FALSE(s.scheduler.only_decodes()) << "51 tokens of its prompt are left";
  s.step();
  EXPECT_TRUE(s.scheduler.only_decodes());
  s.add(text(200, 3), 20);  // four pages, and four are left
  EXPECT_TRUE(s.scheduler.only_decodes()) << "no page would be left for the running ones";
  std::vector<SequenceId> planned;
  for (int i = 0; i < 3; ++i)
    for (const Scheduler::Part& part : s.scheduler.plan_share(2)) planned.push_back(part.id);
  EXPECT_EQ(planned, (std::vector<SequenceId>{1, second}));
  EXPECT_FALSE(s.scheduler.is_decoding(1)) << "no draft may follow what is in flight";
  s.scheduler.computed();
  s.scheduler.append(1, 1);
  EXPECT_TRUE(s.scheduler.is_decoding(1));
  s.scheduler.remove(second);
  s.scheduler.computed();
  EXPECT_FALSE(s.scheduler.only_decodes()) << "there is room for the third";
}

// A sequence whose beginning running ones have needs fewer pages.
TEST(Scheduler, PagesThatAreUsedAreNotTakenAgain) {
  Simulation s({.n_pages = 8, .max_tokens = 512, .max_running = 4});
  s.add(text(200, 1), 100);
  s.step();
  s.add(text(40, 2), 100);
  s.step();  // three pages are left
  s.add(text(200, 1), 3);
  EXPECT_FALSE(s.scheduler.only_decodes()) << "it shares three of its four pages";
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_running, 3);
}

TEST(Scheduler, DraftsTakeOnlyWhatIsLeft) {
  const auto n_drafts = [](Scheduler::Limits limits, int n_sequences, int prompt, int n) {
    Simulation s(limits);
    for (int i = 0; i < n_sequences; ++i) s.add(text(prompt, 1 + i), 100);
    while (!s.scheduler.is_decoding(n_sequences)) s.step();
    for (int i = 1; i <= n_sequences; ++i) s.scheduler.draft(i, std::vector<int32_t>(n, 3));
    std::vector<int> drafts;
    for (const Scheduler::Part& part : s.scheduler.plan()) drafts.push_back(part.n_drafts);
    return drafts;
  };
  using Ints = std::vector<int>;
  const Scheduler::Limits wide = {
      .n_pages = 32, .max_tokens = 100, .max_running = 8, .max_logits = 100};
  EXPECT_EQ(n_drafts(wide, 2, 5, 6), (Ints{6, 6}));
  Scheduler::Limits limits = wide;
  limits.max_tokens = 9;
  EXPECT_EQ(n_drafts(limits, 2, 5, 6), (Ints{6, 1})) << "tokens of a step";
  limits = wide;
  limits.max_logits = 8;
  EXPECT_EQ(n_drafts(limits, 2, 5, 6), (Ints{6, 0})) << "rows of logits";
  limits = wide;
  limits.n_pages = 1;
  EXPECT_EQ(n_drafts(limits, 1, 59, 6), (Ints{4})) << "60 tokens are known, 64 fit the page";
  limits.n_pages = 2;
  EXPECT_EQ(n_drafts(limits, 1, 59, 6), (Ints{4})) << "the other page is for the next token";
  limits.n_pages = 3;
  EXPECT_EQ(n_drafts(limits, 1, 59, 6), (Ints{6}));
}

TEST(Scheduler, LimitsMustAllowAStep) {
  const auto refusal = [](int n_pages, int max_tokens, int max_running) {
    return error_of([&] {
      const Scheduler scheduler({.n_pages = n_pages,
                                 .max_tokens = max_tokens,
                                 .max_running = max_running,
                                 .max_logits = max_running});
    });
  };
  EXPECT_EQ(refusal(1, 1, 1), "no error");
  EXPECT_EQ(refusal(1, 7, 7), "no error");
  EXPECT_EQ(refusal(0, 7, 8), "0 pages of KV cache: give it more memory");
  EXPECT_EQ(refusal(1, 7, 8),
            "8 sequences at a time and 7 tokens a step: each sequence needs a token of a step");
  EXPECT_EQ(refusal(1, 7, 0),
            "0 sequences at a time and 7 tokens a step: each sequence needs a token of a step");
}

TEST(Scheduler, PromptsAreChunkedBesideDecodes) {
  Simulation s({.n_pages = 32, .max_tokens = 100, .max_running = 8});
  const SequenceId stream = s.add(text(10, 1), 50);
  s.step();
  s.add(text(250, 2), 5);
  for (const int piece : {99, 99, 52}) {
    const auto plan = s.scheduler.plan();
    ASSERT_EQ(plan.size(), 2);
    EXPECT_EQ(plan[0].id, stream);
    EXPECT_EQ(plan[0].n, 1);
    EXPECT_EQ(plan[1].n, piece);
    EXPECT_EQ(plan[1].last, piece == 52);
    s.scheduler.computed();
    for (const auto& part : plan)
      if (part.last) s.scheduler.append(part.id, 1);
  }
}

TEST(Scheduler, AdmissionLeavesAPageForEachRunningSequence) {
  Simulation s({.n_pages = 4, .max_tokens = 512, .max_running = 8});
  s.add(text(64, 1), 10);
  s.add(text(128, 2), 1);  // takes 2 of the 3 free pages; one stays reserved for the first
  s.add(text(1, 3), 1);    // no page stays for the second
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_waiting, 1);
  s.run();
}

TEST(Scheduler, TheYoungestIsPreemptedAndRecomputed) {
  Simulation s({.n_pages = 4, .max_tokens = 64, .max_running = 4, .keeps_pages = false});
  const auto first = s.add(text(60, 1), 190);  // grows to all four pages
  const auto second = s.add(text(60, 2), 20);
  s.run();
  EXPECT_EQ(s.texts[first], alone(text(60, 1), 190));
  EXPECT_EQ(s.texts[second], alone(text(60, 2), 20));
  EXPECT_EQ(s.scheduler.counts().n_preemptions, 0) << "the second ends before pages run out";

  Simulation tight({.n_pages = 4, .max_tokens = 64, .max_running = 4, .keeps_pages = false});
  tight.add(text(60, 1), 190);
  tight.add(text(60, 2), 190);
  tight.run();
  EXPECT_GE(tight.scheduler.counts().n_preemptions, 1);
}

TEST(Scheduler, ARepeatedPromptIsFoundAndNotComputedAgain) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  s.add(text(300, 1), 1);
  s.run();
  EXPECT_EQ(s.n_computed, 300);
  const auto again = s.add(text(300, 1), 2);
  s.step();
  EXPECT_EQ(s.scheduler.cached_tokens(again), 299);
  s.run();
  EXPECT_EQ(s.n_computed, 300 + 2) << "its last token's logits are needed";
  // Of a whole number of pages all but the last token is taken from the cache too.
  s.add(text(256, 1), 1);
  s.run();
  EXPECT_EQ(s.n_computed, 300 + 2 + 1);
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 299 + 255);
  EXPECT_EQ(s.scheduler.counts().n_prompt_tokens, 300 + 300 + 256);
}

TEST(Scheduler, LeastRecentlyUsedPagesAreTakenFirst) {
  Simulation s({.n_pages = 9, .max_tokens = 512, .max_running = 1});
  const auto play = [&](int n, int seed) {
    const auto id = s.add(text(n, seed), 1);
    s.step();
    return s.n_ended[id];
  };
  play(193, 1);  // 3 full pages and a partial one are kept
  play(193, 2);  // 4 more
  play(193, 1);  // used again: now more recent than those of 2
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 192);
  play(193, 3);  // takes the free page and the last three pages of 2
  play(193, 1);
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 2 * 192);
  play(193, 2);
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 2 * 192 + 64);
}

TEST(Scheduler, APageWithACommonBeginningIsCopied) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  std::vector<int32_t> prompt = text(100, 1);
  s.add(prompt, 1);
  s.run();
  prompt.resize(90);
  prompt.push_back(16);  // a token that no text contains
  for (const int32_t token : text(30, 2)) prompt.push_back(token);
  const auto other = s.add(prompt, 1);
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 90) << "a page and the beginning of the next";
  EXPECT_EQ(s.n_copied_within, 1);
  EXPECT_EQ(s.n_ended[other], 1);
  prompt.resize(110);
  s.add(prompt, 1);
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 90 + 109) << "the better of two is chosen";
  s.add({16, 1, 2}, 1);
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 90 + 109) << "nothing in common";
}

TEST(Scheduler, WhatIsAssumedToBeCachedIsFound) {
  Scheduler scheduler({.n_pages = 6, .max_tokens = 512, .max_running = 4});
  const std::vector<int32_t> long_text = text(150, 1), too_long = text(500, 2);
  scheduler.assume_cached(long_text);
  scheduler.add(1, long_text);
  ASSERT_EQ(scheduler.plan().size(), 1);
  EXPECT_EQ(scheduler.cached_tokens(1), 149);
  scheduler.computed();
  scheduler.remove(1);
  scheduler.assume_cached(too_long);  // as far as there are pages
  EXPECT_EQ(scheduler.counts().n_available_pages, 6);
}

TEST(Scheduler, SequencesThatStartTogetherShareTheirPagesOnceComputed) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  s.add(text(130, 1), 3);
  s.add(text(130, 1), 3);
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_available_pages, 16 - 2 - 2);
  s.run();
}

TEST(Scheduler, APromptWhoseTokensAllWantLogitsSharesTheRowsWithOthers) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4, .max_logits = 100});
  s.add(text(300, 1), 1);
  s.run();
  s.add(text(10, 2), 20);
  s.step();
  const auto scored = s.add(text(300, 1), 1, true);
  s.add(text(200, 3), 1);
  const auto plan = s.scheduler.plan();
  ASSERT_EQ(plan.size(), 3);
  EXPECT_EQ(plan[1].n, 99) << "a row is the first one's; none of the cached pages is taken";
  EXPECT_EQ(plan[2].n, 199) << "no row is left for its last token";
  EXPECT_FALSE(plan[2].last);
  EXPECT_EQ(s.scheduler.cached_tokens(scored), 0);
}

TEST(Scheduler, AFoundPageHasTheSamePagesBeforeIt) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  const auto prompt = [](int first_page, int second_page) {
    std::vector<int32_t> tokens = text(kPageSize, first_page);
    for (const int32_t token : text(kPageSize, second_page)) tokens.push_back(token);
    tokens.push_back(1);
    return tokens;
  };
  for (const int first_page : {1, 2}) {
    s.add(prompt(first_page, 10 + first_page), 1);
    s.run();
  }
  const auto mixed = s.add(prompt(2, 11), 1);
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, kPageSize) << "the second page stood elsewhere";
  EXPECT_EQ(s.n_ended[mixed], 1);
}

TEST(Scheduler, ForgottenPagesAreNotFound) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  s.add(text(300, 1), 1);
  s.run();
  s.scheduler.forget_pages();
  s.add(text(300, 1), 1);
  s.run();
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 0);
}

}  // namespace
}  // namespace tandem::test
