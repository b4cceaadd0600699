// Golden logits of Hugging Face transformers for a tiny random checkpoint of every family
// (tests/golden/README.md), read from disk as a user's checkpoint is.

#include "loader/loaded_model.h"
#include "tests/check_close.h"
#include "tests/golden_file.h"
#include "tests/plain_engine.h"
#include "tests/repository.h"

namespace tandem::test {
namespace {

struct GoldenCase {
  std::string family;
  cpu::Isa isa;
  AttentionForm form;
};

// t1 has near ties between experts, which only float32 decides as the golden values do.
std::vector<GoldenCase> golden_cases() {
  std::vector<GoldenCase> all;
  for (const std::string& family : golden_families(kGolden))
    for (int isa = 0; isa <= static_cast<int>(cpu::best_isa()); ++isa)
      for (const AttentionForm form : {AttentionForm::kNaive, AttentionForm::kAbsorbed})
        if (family != "t1" || isa == 0) all.push_back({family, static_cast<cpu::Isa>(isa), form});
  return all;
}

class GoldenTest : public testing::TestWithParam<GoldenCase> {};

// The greedy token may differ where the golden margin is smaller than the allowed error.
void expect_same_greedy(std::span<const float> got, std::span<const float> want, double bound) {
  const auto best = std::max_element(want.begin(), want.end()) - want.begin();
  for (size_t i = 0; i < want.size(); ++i)
    if (want[best] - want[i] > 2 * bound) {
      EXPECT_GT(got[best], got[i]);
    }
}

TEST_P(GoldenTest, LogitsOfEveryLength) {
  const GoldenCase& c = GetParam();
  ModelOptions options{.directory = kGolden + c.family,
                       .isa = c.isa,
                       .n_threads = 0,
                       .context = 256,
                       .max_logits = 64,
                       .attention = c.form};
  LoadedModel loaded(options);
  EXPECT_STREQ(loaded.isa(), cpu::name_of(c.isa));
  const GoldenFile golden(kGolden + c.family + "/golden.safetensors");
  const size_t vocab = loaded.config().vocab;
  // Activations of INT4 experts are bytes with a step of 1/127 of a row's largest number.
  const bool bytes = loaded.config().expert_group > 0;
  const double tolerance = c.isa == cpu::Isa::kReference ? 2e-4 : bytes ? 3e-2 : 2e-2;
  int n_compared = 0;
  for (const int length : {1, 5, 17, 40, 150, 200}) {
    const std::string suffix = "_" + std::to_string(length);
    if (!golden.has("tokens" + suffix)) continue;
    const std::vector<int32_t> tokens = golden.ints("tokens" + suffix);
    const std::vector<float> want = golden.floats("logits" + suffix);
    const auto n_rows = static_cast<int64_t>(want.size() / vocab);
    const int64_t first = length - n_rows;  // goldens have every position, or the last one
    score(loaded.model(), loaded.cache(), tokens, first,
          [&](int64_t i, std::span<const float> got) {
            SCOPED_TRACE(testing::Message() << length << " tokens, position " << i);
            const std::span<const float> row(want.data() + (i - first) * vocab, vocab);
            const double bound = tolerance * largest(row);
            expect_close(got, row, bound);
            expect_same_greedy(got, row, bound);
            ++n_compared;
          });
  }
  EXPECT_GE(n_compared, 20);
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenTest, testing::ValuesIn(golden_cases()),
                         [](const auto& info_of) {
                           const GoldenCase& c = info_of.param;
                           return c.family + "_" + cpu::name_of(c.isa) +
                                  (c.form == AttentionForm::kNaive ? "_naive" : "_absorbed");
                         });

TEST(Golden, EveryFamilyIsThere) { EXPECT_GE(golden_families(kGolden).size(), 11u); }

// Logits and greedy continuation of t1 from a second double-precision implementation of DeepSeek-V3
// (arXiv 2412.19437, section 2.1); tools/make_t1.py has the same numbers.
TEST(Golden, T1HasTheLogitsOfASecondImplementation) {
  LoadedModel loaded(
      {.directory = kGolden + "t1", .isa = cpu::Isa::kReference, .context = 64, .max_logits = 8});
  std::vector<int32_t> tokens = {3, 1, 4, 1, 5};
  const std::vector<double> want = {0.449801305,  -1.131572497, 1.579666978, 1.121415457,
                                    -0.134841701, 0.389253419,  0.651399470, -1.448245215};
  std::vector<int64_t> argmax;
  score(loaded.model(), loaded.cache(), tokens, 0, [&](int64_t i, std::span<const float> logits) {
    argmax.push_back(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (i == 4) expect_close(logits.first(8), want, 2e-5);
  });
  EXPECT_EQ(argmax, (std::vector<int64_t>{1, 14, 17, 14, 2}));
  for (const int next : {2, 19, 4, 17, 11, 31, 31, 31}) {
    score(loaded.model(), loaded.cache(), tokens, static_cast<int64_t>(tokens.size()) - 1,
          [&](int64_t, std::span<const float> logits) {
            EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), next);
          });
    tokens.push_back(next);
  }
}

}  // namespace
}  // namespace tandem::test
