// Keys of prompts that several ranks compute for others, or get from others: pages byte by byte on
// every rank, and answers whose bits are those of the same ranks without another engine. Ranks are
// threads here; rank_prefill_test.py has processes.
#include "tests/rank_keys.h"

namespace tandem::test::rank_keys {
namespace {

constexpr auto kGather = ExpertDispatch::kGather;

TEST(RankKeys, PagesAreWhereTheyBelong) {
  for (const RankGrid& grid :
       {grid_without_rows(1, 1), grid_without_rows(3, 1), grid_of(3, 1, 1), grid_without_rows(1, 3),
        grid_of(2, 2, 1), grid_without_rows(2, 2), grid_of(2, 1, 2), grid_of(2, 2, 2)}) {
    ModelOptions options = tiny(256);
    if (grid.pp == 1) options.draft = DraftChoice::kMtp;  // whose layer has keys that stay
    expect_pages_where_they_belong(grid, options);
  }
}

Questions questions_of_all_lengths() {
  Questions all;
  for (int i = 0; i < 5; ++i) all.prompts.push_back(prompt_of(i, 8 + 3 * i));
  all.prompts.push_back(prompt_of(9, 0));  // less than a page
  return all;
}

// Each kind of grid computes keys for another one like it: the bits of one that computes all.
TEST(RankKeys, BitsAreThoseOfTheSameRanksAlone) {
  const Questions asked = questions_of_all_lengths();
  const Answered alone = computed_by(grid_without_rows(1, 1), tiny(), asked);
  for (const RankGrid& grid : {grid_without_rows(2, 1), grid_of(2, 1, 1), grid_without_rows(1, 2),
                               grid_of(2, 1, 2), grid_of(2, 2, 1)}) {
    SCOPED_TRACE(grid.name());
    const Answered want = computed_by(grid, tiny(), asked);
    EXPECT_EQ(tokens_of(want), tokens_of(alone));
    const auto [got, n_fetches, n_pages] = fetched_by(grid, grid, tiny(), tiny(), asked);
    EXPECT_TRUE(got.answers == want.answers);
    EXPECT_EQ(got.n_cached, fetchable(asked).n_tokens);
    EXPECT_EQ(got.counts.n_fetched_tokens, fetchable(asked).n_tokens);
    EXPECT_EQ(n_fetches, fetchable(asked).n_prompts);
    for (const Scheduler::Counts& of_replica : got.counts.replicas)
      EXPECT_GT(of_replica.n_prompt_tokens, 2 * 200) << "prompts go to all replicas";
    if (grid.dp * grid.tp == 1) {
      EXPECT_TRUE(got.answers == alone.answers) << "stages change no bits";
    }
  }
}

// Servers of unlike grids: one process and several ranks, either way, and pages that end early.
TEST(RankKeys, UnlikeGridsGiveTheSameTokens) {
  const Questions asked = questions_of_all_lengths();
  const RankGrid one = grid_without_rows(1, 1);
  const Answered want = computed_by(one, tiny(), asked);
  ModelOptions drafting = tiny();
  drafting.draft = DraftChoice::kMtp;
  drafting.draft_tokens = 2;
  struct Case {
    RankGrid prefill, decode;
    ModelOptions options = tiny();
    int most_pages = 1 << 30;
  };
  for (const auto& [prefill, decode, options, most_pages] :
       {Case{grid_without_rows(2, 1), one}, Case{one, grid_without_rows(2, 1)},
        Case{one, grid_of(2, 1, 1), drafting}, Case{grid_of(2, 1, 1), grid_without_rows(1, 2)},
        Case{grid_without_rows(1, 3), grid_of(2, 2, 1)},
        Case{one, grid_without_rows(1, 2), tiny(), 3}, Case{one, grid_of(2, 1, 1), tiny(), 2}}) {
    SCOPED_TRACE(prefill.name() + " for " + decode.name());
    const Fetched got = fetched_by(decode, prefill, options, tiny(), asked, most_pages);
    EXPECT_EQ(tokens_of(got.answered), tokens_of(want));
    EXPECT_GT(got.n_pages, 10);
    if (most_pages > got.n_pages) {
      EXPECT_EQ(got.answered.n_cached, fetchable(asked).n_tokens);
    } else {
      EXPECT_LE(got.answered.counts.n_fetched_tokens, most_pages * kPageSize);
      EXPECT_GT(got.answered.counts.n_fetched_tokens, (most_pages - 1) * kPageSize);
    }
  }
}

// A stage computes a step after it was announced. Pages that come meanwhile are not written where
// the step of a sequence that has ended still writes.
TEST(RankKeys, PagesWaitForWhatIsInFlight) {
  const Prompt asked = prompt_of(1);
  on_grid(grid_without_rows(1, 3), tiny(), [&](LoadedModel& loaded) {
    Answer want, ended, other, third, got;
    std::vector<BlockPool::Block> pages;
    Engine alone = engine_of(loaded);
    EngineRequest request = request_of(asked, 12, want);
    request.on_page = [&](int, BlockPool::Block keys) { pages.push_back(std::move(keys)); };
    alone.submit(std::move(request));
    while (alone.step()) {
    }
    ASSERT_EQ(std::ssize(pages), pages_for(std::ssize(asked) - 1));

    OtherEngine source(alone);
    source.silent = true;
    Engine engine = engine_of(loaded, &source);
    // Its next token is the first one of a page, which is free as soon as it has ended.
    const Prompt whole_page(asked.begin() + 7, asked.begin() + 7 + kPageSize);
    const SequenceId id = engine.submit(request_of(whole_page, 100, ended));
    engine.submit(request_of(prompt_of(9, 0), 30, other));
    engine.submit(request_of({5, 6, 7}, 30, third));
    engine.step();
    ASSERT_EQ(ended.tokens.size(), 1u);
    engine.submit(request_of(asked, 12, got));
    engine.step();  // the first stage has computed its next token
    engine.abort(id);
    engine.step();
    EXPECT_EQ(ended.tokens.size(), 1u) << "its step is in flight";
    ASSERT_EQ(source.receivers.size(), 1u);
    const std::span<std::byte> block = pages[0].span();
    const std::vector<std::byte> first_page(block.begin(), block.end());
    for (size_t i = 0; i < pages.size(); ++i)
      EXPECT_TRUE(source.receivers[0].page(static_cast<int>(i), std::move(pages[i])));
    source.receivers[0].ended();
    EXPECT_EQ(engine.counts().n_fetched_tokens, 0);
    for (int i = 0; i < 3; ++i) engine.step();
    EXPECT_LT(other.tokens.size() + third.tokens.size(), 8u) << "they go on afterwards";
    EXPECT_EQ(engine.counts().n_fetched_tokens, std::ssize(asked) - 1);
    int n_found = 0;
    for (int page = 0; page < loaded.cache().n_pages(); ++page) {
      std::vector<std::byte> keys(first_page.size());
      loaded.model().read_page(loaded.cache(), 0, page, keys);
      n_found += keys == first_page;
    }
    EXPECT_EQ(n_found, 1) << "the step that was in flight has not written there";
    while (engine.step()) {
    }
    EXPECT_TRUE(got == want);
    EXPECT_EQ(other.tokens.size() + third.tokens.size(), 2 * 30u);
  });
}

// A replica is chosen when keys are asked for, and is free again when the request has ended.
TEST(RankKeys, RequestsThatHaveEndedAreNotExpected) {
  on_grid(grid_of(2, 1, 1), tiny(), [&](LoadedModel& loaded) {
    Answer none, first, second;
    Engine other = engine_of(loaded);
    OtherEngine source(other);
    source.silent = true;
    Engine engine = engine_of(loaded, &source);
    const auto n_prompt_tokens = [&](int replica) {
      return engine.counts().replicas[replica].n_prompt_tokens;
    };
    const Prompt prompt = prompt_of(9, 0);
    const SequenceId id = engine.submit(request_of(prompt_of(1), 12, none));
    engine.step();
    engine.submit(request_of(prompt, 1, first));
    while (engine.step()) {
    }
    EXPECT_EQ(n_prompt_tokens(0), 0) << "the other request is expected there";
    EXPECT_EQ(n_prompt_tokens(1), std::ssize(prompt));
    engine.abort(id);
    engine.step();
    engine.submit(request_of({prompt.begin() + 1, prompt.end()}, 1, second));
    while (engine.step()) {
    }
    EXPECT_EQ(n_prompt_tokens(0), std::ssize(prompt) - 1);
    EXPECT_EQ(source.n_cancelled, 1);
  });
}

// The text that two servers compare names what divides sums, and nothing else of a grid.
TEST(RankKeys, ArithmeticNamesWhatChangesBits) {
  const auto text_of = [](const RankGrid& grid, ModelOptions options) {
    std::string text;
    on_grid(grid, std::move(options), [&](LoadedModel& loaded) { text = loaded.arithmetic(); });
    return text;
  };
  const std::string alone = text_of(grid_without_rows(1, 1), tiny());
  const std::string tp = text_of(grid_without_rows(2, 1), tiny());
  const std::string dp = text_of(grid_of(2, 1, 1), tiny());
  EXPECT_EQ(text_of(grid_without_rows(1, 2), tiny()), alone);
  EXPECT_EQ(tp.substr(0, tp.find(" (division ")),
            alone + ", backbone divided by 2 ranks, experts by 2");
  EXPECT_EQ(text_of(grid_without_rows(2, 2), tiny()), tp) << "stages of two ranks";
  EXPECT_EQ(dp.substr(0, dp.find(" (division ")), alone + ", experts by 2");
  EXPECT_EQ(text_of({2, 1, ExpertDispatch::kAllToAll}, tiny()), dp) << "the same sums";
  EXPECT_EQ(text_of(grid_of(2, 1, 2), tiny()), dp);
  EXPECT_EQ(text_of({1, 2, kGather}, tiny()), tp + ", whose rows travel");
  EXPECT_NE(text_of(grid_of(3, 1, 1), tiny()), dp);
  ModelOptions fp8 = tiny();
  fp8.rows = ExpertRows::kFp8;
  const std::string reduced = text_of(grid_of(2, 1, 1), fp8),
                    sent = text_of({2, 1, ExpertDispatch::kAllToAll}, fp8);
  EXPECT_NE(reduced, sent) << "sums that are sent are BF16";
  EXPECT_NE(reduced.find(" for prompts by gather, decode by gather"), std::string::npos) << reduced;
  const RankGrid by_ranks = {4, 1, ExpertDispatch::kAllToAll},
                 by_hosts = {4, 1, ExpertDispatch::kAllToAll, 1, 0, {2, 2}};
  EXPECT_NE(text_of(by_ranks, tiny()), text_of(by_hosts, tiny()));
}

}  // namespace
}  // namespace tandem::test::rank_keys
