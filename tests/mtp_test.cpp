// Layers for multi-token prediction: golden logits (tests/golden/README.md), what a checkpoint
// stores of them, and drafts whose cache was filled in pieces, shared or not filled.
#include <cmath>
#include <limits>
#include <numeric>

#include "engine/mtp_drafts.h"
#include "loader/loaded_model.h"
#include "tests/check_close.h"
#include "tests/golden_file.h"
#include "tests/plain_engine.h"

namespace tandem::test {
namespace {

const std::string kGolden = std::string(TANDEM_SOURCE_DIR) + "/tests/golden/";

// Pages in an order that is not that of memory.
std::vector<int32_t> scattered_pages(const KvCache& cache) {
  std::vector<int32_t> pages(cache.n_pages());
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(pages.size() - 1 - i);
  return pages;
}

struct Rows {
  int64_t n, cols;
  std::vector<float> numbers;
  std::span<const float> row(int64_t i) const { return std::span(numbers).subspan(i * cols, cols); }
};

Rows logits_of(LoadedModel& loaded, int64_t n) {
  const int64_t vocab = loaded.config().vocab;
  Rows rows = {n, vocab, std::vector<float>(n * vocab)};
  loaded.model().device().to_host(loaded.model().logits().rows_from(0, n),
                                  {rows.numbers.data(), n, vocab, vocab, DType::kF32});
  return rows;
}

// The logits of layer 0 for multi-token prediction after each of `tokens`, of which the last
// n_logits of each chunk are computed; next[i] follows tokens[i].
std::vector<std::vector<float>> mtp_logits(LoadedModel& loaded, const std::vector<int32_t>& tokens,
                                           const std::vector<int32_t>& next, int chunk) {
  const std::vector<int32_t> pages = scattered_pages(loaded.cache());
  std::vector<std::vector<float>> logits;
  const auto n = static_cast<int>(tokens.size());
  for (int first = 0; first < n; first += chunk) {
    const int count = std::min(chunk, n - first);
    StepArrays step(count);
    step.add(tokens, pages, first, count, 1);
    loaded.model().forward(step.batch(), loaded.cache());
    std::vector<int32_t> rows(count);
    std::iota(rows.begin(), rows.end(), 0);
    loaded.model().take_hidden(rows);
    step.clear();
    step.add(next, pages, first, count, count);
    loaded.model().draft(0, step.batch(), loaded.cache());
    const Rows got = logits_of(loaded, count);
    for (int64_t i = 0; i < count; ++i) {
      const auto row = got.row(i);
      logits.emplace_back(row.begin(), row.end());
    }
  }
  return logits;
}

struct Case {
  std::string family;
  cpu::Isa isa;
  int chunk;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string family : {"t1", "v3_fp8", "v3_1_fp8"})
    for (int isa = 0; isa <= static_cast<int>(cpu::best_isa()); ++isa)
      for (const int chunk : {200, 64, 7})
        if (family != "t1" || isa == 0) all.push_back({family, static_cast<cpu::Isa>(isa), chunk});
  return all;
}

class MtpGolden : public testing::TestWithParam<Case> {};

TEST_P(MtpGolden, LogitsOfEveryLength) {
  const Case& c = GetParam();
  LoadedModel loaded({.directory = kGolden + c.family,
                      .isa = c.isa,
                      .context = 256,
                      .max_logits = 200,
                      .draft = DraftChoice::kMtp});
  const GoldenFile golden(kGolden + c.family + "/golden.safetensors");
  const size_t vocab = loaded.config().vocab;
  const double tolerance = c.isa == cpu::Isa::kReference ? 2e-4 : 2e-2;
  int n_compared = 0;
  for (const int length : {5, 17, 150, 200}) {
    const std::string suffix = "_" + std::to_string(length);
    if (!golden.has("mtp_logits" + suffix)) continue;
    const auto logits = mtp_logits(loaded, golden.ints("tokens" + suffix),
                                   golden.ints("mtp_next_tokens" + suffix), c.chunk);
    const std::vector<float> want = golden.floats("mtp_logits" + suffix);
    const size_t n_rows = want.size() / vocab;
    for (size_t i = 0; i < n_rows; ++i) {
      SCOPED_TRACE(testing::Message() << length << " tokens, row " << i << " of " << n_rows);
      const std::span<const float> row(want.data() + i * vocab, vocab);
      expect_close(logits[length - n_rows + i], row, tolerance * largest(row));
      ++n_compared;
    }
  }
  EXPECT_GE(n_compared, c.family == "t1" ? 5 : 19);
}

INSTANTIATE_TEST_SUITE_P(Families, MtpGolden, testing::ValuesIn(cases()), [](const auto& info_of) {
  const Case& c = info_of.param;
  return c.family + "_" + cpu::name_of(c.isa) + "_" + std::to_string(c.chunk);
});

// Numbers of a second double-precision implementation; tools/make_t1.py has the same.
TEST(Mtp, T1HasTheLogitsOfASecondImplementation) {
  LoadedModel loaded({.directory = kGolden + "t1",
                      .isa = cpu::Isa::kReference,
                      .context = 64,
                      .max_logits = 8,
                      .draft = DraftChoice::kMtp});
  const auto logits = mtp_logits(loaded, {3, 1, 4, 1, 5}, {1, 4, 1, 5, 2}, 5);
  std::vector<int64_t> best;
  for (const auto& row : logits)
    best.push_back(std::max_element(row.begin(), row.end()) - row.begin());
  EXPECT_EQ(best, (std::vector<int64_t>{31, 19, 3, 31, 21}));
  expect_close(std::span(logits[4]).first(4),
               std::vector<double>{1.126559386, -1.289769461, 1.106651585, 1.085845298}, 2e-5);
}

// Token ids of a text that has several pages.
std::vector<int32_t> long_text(int n) {
  std::vector<int32_t> text(n);
  for (int i = 0; i < n; ++i) text[i] = static_cast<int32_t>((i * 37 + i / 5) % 200 + 20);
  return text;
}

// MtpDrafts over a model whose steps the test decides.
class DraftsTest : public testing::Test {
 protected:
  DraftsTest()
      : loaded_({.directory = TANDEM_SOURCE_DIR "/models/tiny-r1",
                 .isa = cpu::Isa::kReference,
                 .context = 512,
                 .max_logits = 8,
                 .draft = DraftChoice::kMtp}),
        drafts_(loaded_.model(), loaded_.cache(), loaded_.config().vocab, 4) {}

  // Computes positions [first, first + n) of a text and tells the drafts; returns what they draft.
  std::vector<int32_t> advance(std::span<const int32_t> text, const std::vector<int32_t>& pages,
                               int first, int n, int n_drafts, bool follows = true) {
    StepArrays step(n);
    step.add(text, pages, first, n, 1);
    drafts_.will_compute(pages, first, n);
    loaded_.model().forward(step.batch(), loaded_.cache());
    const auto known = text.first(first + n + 1);
    const Advance advance = {1, known, pages, first, n, 0, n_drafts};
    drafts_.step_done({&advance, 1}, follows);
    return drafts_.draft(1, known, 8);
  }

  LoadedModel loaded_;
  MtpDrafts drafts_;
};

TEST_F(DraftsTest, PromptsInPiecesFillTheSameRows) {
  const std::vector<int32_t> text = long_text(201), pages = {3, 0, 5, 2};
  const auto whole = advance(text, pages, 0, 200, 4);
  ASSERT_EQ(whole.size(), 4u);
  advance(text, pages, 0, 70, 0);
  advance(text, pages, 70, 1, 0);
  advance(text, pages, 71, 58, 0);
  EXPECT_EQ(advance(text, pages, 129, 71, 4), whole);
}

// A page boundary ends the drafts where the sequence has no further page.
TEST_F(DraftsTest, DraftsNeedAPlaceInThePages) {
  const std::vector<int32_t> text = long_text(129), pages = {3, 0};
  EXPECT_EQ(advance(text, pages, 0, 128, 4).size(), 1u);
  EXPECT_EQ(advance(text, pages, 0, 126, 4).size(), 3u);
  EXPECT_EQ(advance(text, pages, 0, 126, 2).size(), 2u);
  EXPECT_EQ(advance(text, pages, 0, 126, 0).size(), 0u);
}

TEST_F(DraftsTest, DraftsAreForOneText) {
  const std::vector<int32_t> text = long_text(60), pages = {1};
  const auto drafts = advance(text, pages, 0, 40, 2);
  EXPECT_EQ(drafts_.draft(1, std::span(text).first(41), 1),
            std::vector<int32_t>(1, drafts.front()));
  EXPECT_TRUE(drafts_.draft(1, std::span(text).first(42), 2).empty()) << "the text has grown";
  EXPECT_TRUE(drafts_.draft(2, std::span(text).first(41), 2).empty()) << "another sequence";
  drafts_.ended(1);
  EXPECT_TRUE(drafts_.draft(1, std::span(text).first(41), 2).empty());
}

// Rows of the MTP layer that were not filled are not read: the layer's cache is NaN there.
TEST_F(DraftsTest, RowsThatAreNotFilledAreNotRead) {
  const std::vector<int32_t> text = long_text(260), pages = {3, 0, 5, 2, 6};
  const TensorView rows = loaded_.cache().layer(loaded_.config().n_layers);
  for (int64_t r = 0; r < rows.rows; ++r)
    std::fill_n(rows.row<float>(r), rows.cols, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(advance(text, pages, 0, 70, 0, false).empty());
  EXPECT_TRUE(advance(text, pages, 70, 1, 2).empty()) << "the page is not filled before";
  EXPECT_TRUE(advance(text, pages, 71, 1, 2).empty());
  const auto drafts = advance(text, pages, 72, 60, 2);  // page 2 begins at 128
  ASSERT_EQ(drafts.size(), 2u);
  for (int i = 132; i < 200; ++i) EXPECT_EQ(advance(text, pages, i, 1, 2).size(), 2u) << i;
  for (const float x : logits_of(loaded_, 1).numbers) ASSERT_TRUE(std::isfinite(x));
}

// Pages that were filled keep their rows when they are copied, and lose them with a new owner.
TEST_F(DraftsTest, CopiesAndNewOwnersOfPages) {
  const std::vector<int32_t> text = long_text(100), pages = {3, 0};
  const auto want = advance(text, pages, 0, 80, 1);
  const auto copy = [&](int32_t from, int32_t to) {
    loaded_.cache().for_each_pair(from, to,
                                  [](auto a, auto b) { std::copy(a.begin(), a.end(), b.begin()); });
  };
  copy(0, 7);
  drafts_.copied({7, 0, PageCopy::Way::kWithin});
  EXPECT_EQ(advance(text, {3, 7}, 79, 1, 1), want) << "a copy within the cache";
  copy(0, 6);
  drafts_.copied({0, 2, PageCopy::Way::kToHost});
  drafts_.copied({6, 2, PageCopy::Way::kFromHost});
  EXPECT_EQ(advance(text, {3, 6}, 79, 1, 1), want) << "by way of host memory";
  copy(0, 5);
  EXPECT_TRUE(advance(text, {3, 5}, 79, 1, 1).empty()) << "a page that was never filled";
  advance(text, {0}, 0, 3, 0, false);
  EXPECT_TRUE(advance(text, {0}, 3, 1, 1).empty()) << "another text in the same page";
}

// Another sequence fills a shared page, as the scheduler's prefix cache makes them.
TEST_F(DraftsTest, PagesOfOthersAreNotFilledAgain) {
  const std::vector<int32_t> text = long_text(100), pages = {3, 0};
  const auto want = advance(text, pages, 0, 80, 1);
  std::vector<int32_t> other = {3, 4};
  advance(text, other, 64, 15, 0);
  EXPECT_EQ(advance(text, other, 79, 1, 1), want);
}

}  // namespace
}  // namespace tandem::test
