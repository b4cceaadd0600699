// Layers for multi-token prediction: golden logits (tests/golden/README.md), what a checkpoint
// stores of them, and drafts whose cache was filled in pieces, shared or not filled.
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "engine/completion.h"
#include "engine/drafts/mtp_drafts.h"
#include "engine/engine.h"
#include "io/weight_store.h"
#include "loader/loaded_model.h"
#include "loader/weights/mtp_layers.h"
#include "model/checkpoint.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/mtp_logits.h"
#include "tests/plain_engine.h"
#include "tests/planner_cases.h"
#include "tests/repository.h"
#include "tests/temp_directory.h"

namespace tandem::test {
namespace {

struct MtpCase {
  std::string family;
  cpu::Isa isa;
  int chunk;
};

std::vector<MtpCase> mtp_cases() {
  std::vector<MtpCase> all;
  for (const std::string family : {"t1", "v3_fp8", "v3_1_fp8"})
    for (int isa = 0; isa <= static_cast<int>(cpu::best_isa()); ++isa)
      for (const int chunk : {200, 64, 7})
        if (family != "t1" || isa == 0) all.push_back({family, static_cast<cpu::Isa>(isa), chunk});
  return all;
}

class MtpGolden : public testing::TestWithParam<MtpCase> {};

TEST_P(MtpGolden, LogitsOfEveryLength) {
  const MtpCase& c = GetParam();
  LoadedModel loaded({.directory = kGolden + c.family,
                      .isa = c.isa,
                      .context = 256,
                      .max_logits = 200,
                      .draft = DraftChoice::kMtp});
  const GoldenFile golden(kGolden + c.family + "/golden.safetensors");
  const double tolerance = c.isa == cpu::Isa::kReference ? 2e-4 : 2e-2;
  EXPECT_GE(compare_with_golden(loaded, golden, c.chunk, tolerance), c.family == "t1" ? 5 : 19);
}

INSTANTIATE_TEST_SUITE_P(Families, MtpGolden, testing::ValuesIn(mtp_cases()),
                         [](const auto& info_of) {
                           const MtpCase& c = info_of.param;
                           return c.family + "_" + cpu::name_of(c.isa) + "_" +
                                  std::to_string(c.chunk);
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
  for (const auto& row : logits) best.push_back(best_of(row));
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
      : loaded_({.directory = kTinyR1,
                 .isa = cpu::Isa::kReference,
                 .context = 512,
                 .max_logits = 8,
                 .draft = DraftChoice::kMtp}),
        drafts_(loaded_.model(), loaded_.cache(), 4) {
    draw_from(loaded_.config().vocab);
  }

  // The first n tokens may be drafted.
  void draw_from(int n) { loaded_.model().set_vocabulary({allowed_bits({.size = n}), n}); }

  // Computes positions [first, first + n) of a text and tells the drafts; returns what they draft.
  std::vector<int32_t> advance(std::span<const int32_t> text, const std::vector<int32_t>& pages,
                               int first, int n, int n_drafts, bool follows = true) {
    StepArrays step(n);
    step.add(text, pages, first, n, 1);
    drafts_.will_compute(0, pages, first, n);
    loaded_.model().forward(step.batch(), loaded_.cache());
    const auto known = text.first(first + n + 1);
    const Advance advance = {1, 0, known, pages, first, n, 0, n_drafts};
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
  drafts_.copied(0, {7, 0, PageCopy::Way::kWithin});
  EXPECT_EQ(advance(text, {3, 7}, 79, 1, 1), want) << "a copy within the cache";
  copy(0, 6);
  drafts_.copied(0, {0, 2, PageCopy::Way::kToHost});
  drafts_.copied(0, {6, 2, PageCopy::Way::kFromHost});
  EXPECT_EQ(advance(text, {3, 6}, 79, 1, 1), want) << "by way of host memory";
  copy(0, 5);
  EXPECT_TRUE(advance(text, {3, 5}, 79, 1, 1).empty()) << "a page that was never filled";
  copy(0, 4);
  drafts_.copied(0, {5, 3, PageCopy::Way::kToHost});
  drafts_.copied(0, {4, 3, PageCopy::Way::kFromHost});
  EXPECT_TRUE(advance(text, {3, 4}, 79, 1, 1).empty()) << "nor before it was in host memory";
  advance(text, {0}, 0, 3, 0, false);
  EXPECT_TRUE(advance(text, {0}, 3, 1, 1).empty()) << "another text in the same page";
}

TEST_F(DraftsTest, DraftsAreTokensOfTheVocabulary) {
  const std::vector<int32_t> text = long_text(41), pages = {1};
  ASSERT_GE(advance(text, pages, 0, 40, 1).at(0), 2);
  MtpDrafts few(loaded_.model(), loaded_.cache(), 4);
  draw_from(2);
  StepArrays step(40);
  step.add(text, pages, 0, 40, 1);
  loaded_.model().forward(step.batch(), loaded_.cache());
  const Advance advance = {1, 0, text, pages, 0, 40, 0, 3};
  few.step_done({&advance, 1}, true);
  const std::vector<int32_t> drafts = few.draft(1, text, 8);
  ASSERT_EQ(drafts.size(), 3u);
  for (const int32_t token : drafts) EXPECT_LT(token, 2);
}

// A source of drafts that notes what it is told of one sequence.
class Listener final : public DraftSource {
 public:
  std::vector<int32_t> draft(SequenceId, std::span<const int32_t>, int) override { return {}; }
  void will_compute(int, std::span<const int32_t> pages, int first, int n) override {
    EXPECT_EQ(first, end);
    EXPECT_GE(std::ssize(pages) * kPageSize, first + n);
    end = first + n;
  }
  void step_done(std::span<const Advance> sequences, bool) override {
    for (const Advance& s : sequences) EXPECT_EQ(s.first + s.n, end);
    n_steps += !sequences.empty();
  }
  void ended(SequenceId) override { ++n_ended; }
  int end = 0, n_steps = 0, n_ended = 0;
};

TEST(Drafter, TheSourceIsToldOfEveryToken) {
  LoadedModel loaded({.directory = kTinyR1, .context = 512, .step_tokens = 64, .max_logits = 8});
  Listener listener;
  Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab}, loaded.context(),
                {.drafting = {.n_tokens = 2, .given = &listener}});
  const Request request = {
      .prompt = long_text(100), .max_new_tokens = 5, .sampling = {}, .stop_ids = {}};
  complete(engine, {&request, 1});
  EXPECT_EQ(listener.end, 104) << "the last token is not computed";
  EXPECT_EQ(listener.n_steps, 2 + 3) << "nothing follows the last step";
  EXPECT_EQ(listener.n_ended, 1);
}

// Another sequence fills a shared page, as the scheduler's prefix cache makes them.
TEST_F(DraftsTest, PagesOfOthersAreNotFilledAgain) {
  const std::vector<int32_t> text = long_text(100), pages = {3, 0};
  const auto want = advance(text, pages, 0, 80, 1);
  std::vector<int32_t> other = {3, 4};
  advance(text, other, 64, 15, 0);
  EXPECT_EQ(advance(text, other, 79, 1, 1), want);
}

// The embedded model with other MTP layers, in a folder of its own.
class ChangedModel {
 public:
  using Json = nlohmann::json;
  ChangedModel() {
    std::ifstream file(kTinyR1 + "/model.safetensors", std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    const Json header = Json::parse(bytes.substr(8, length));
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") continue;
      const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
      tensors_[name] = {entry["dtype"], entry["shape"],
                        bytes.substr(8 + length + begin, end - begin)};
    }
    config_ = Json::parse(std::ifstream(kTinyR1 + "/config.json"));
  }

  std::string& data(const std::string& name) { return tensors_.at(name).data; }
  void copy_mtp_layer() {
    const auto tensors = tensors_;
    for (const auto& [name, tensor] : tensors)
      if (name.starts_with("model.layers.3."))
        tensors_["model.layers.4." + name.substr(15)] = tensor;
    config_["num_nextn_predict_layers"] = 2;
  }

  void drop(const std::string& name) { tensors_.erase(name); }

  std::string write() {
    Json header;
    std::string data;
    for (const auto& [name, t] : tensors_) {
      header[name] = {{"dtype", t.dtype},
                      {"shape", t.shape},
                      {"data_offsets", {data.size(), data.size() + t.data.size()}}};
      data += t.data;
    }
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream file(directory_.path() + "/model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << text << data;
    std::ofstream(directory_.path() + "/config.json") << config_.dump();
    return directory_.path();
  }

 private:
  struct Tensor {
    Json dtype, shape;
    std::string data;
  };
  std::map<std::string, Tensor> tensors_;
  Json config_;
  const TempDirectory directory_;
};

ModelOptions mtp_options(const std::string& directory) {
  return {.directory = directory,
          .isa = cpu::Isa::kReference,
          .context = 512,
          .max_logits = 8,
          .draft = DraftChoice::kMtp};
}

// The logits of two layers in sequence for the last of 40 tokens.
std::vector<std::vector<float>> logits_of_layers(ChangedModel& changed) {
  LoadedModel loaded(mtp_options(changed.write()));
  const std::vector<int32_t> text = long_text(50), pages = {3};
  StepArrays step(40);
  step.add(text, pages, 0, 40, 1);
  loaded.model().forward(step.batch(), loaded.cache());
  std::vector<std::vector<float>> logits;
  for (int module = 0; module < 2; ++module) {
    step.clear();
    step.add(std::span(text).subspan(1 + module), pages, 0, 40, 1);
    for (int i = 0; i < 40; ++i) step.add_hidden_row(i);
    loaded.model().draft(module, module == 0 ? HiddenStates::kOfModel : HiddenStates::kOfLayer,
                         step.batch(), loaded.cache());
    logits.push_back(logits_of(loaded, 1).numbers);
  }
  return logits;
}

TEST(Mtp, EachLayerHasItsOwnWeights) {
  ChangedModel changed;
  changed.copy_mtp_layer();
  const auto before = logits_of_layers(changed);
  changed.data("model.layers.4.post_attention_layernorm.weight")[1] ^= 1;
  const auto after = logits_of_layers(changed);
  EXPECT_EQ(after[0], before[0]);
  EXPECT_NE(after[1], before[1]);
}

// Two layers in sequence: the second takes the hidden states of the first and the token after next.
TEST(Mtp, TwoLayersInSequence) {
  ChangedModel changed;
  changed.copy_mtp_layer();
  // Halved gains distinguish the second layer from the first.
  for (const char* norm : {"enorm", "hnorm", "input_layernorm"}) {
    std::string& gains = changed.data(fmt::format("model.layers.4.{}.weight", norm));
    for (size_t i = 1; i < gains.size(); i += 4) gains[i] ^= 1;  // BF16: an exponent bit
  }
  const std::string directory = changed.write();
  LoadedModel loaded(mtp_options(directory)), again(mtp_options(directory));
  const std::vector<int32_t> text = long_text(201), pages = {3, 0, 5, 2};
  const int n = 130;

  StepArrays step(n);
  step.add(text, pages, 0, n, 1);
  loaded.model().forward(step.batch(), loaded.cache());
  std::vector<int32_t> known(text.begin(), text.begin() + n + 1), expected;
  for (int module = 0; module < 2; ++module) {
    step.clear();
    step.add(std::span(known).subspan(1 + module), pages, 0, n, 1);
    for (int i = 0; i < n; ++i) step.add_hidden_row(i);
    loaded.model().draft(module, module == 0 ? HiddenStates::kOfModel : HiddenStates::kOfLayer,
                         step.batch(), loaded.cache());
    const std::vector<float> logits = logits_of(loaded, 1).numbers;
    known.push_back(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    expected.push_back(known.back());
  }

  MtpDrafts drafts(again.model(), again.cache(), 0);
  const int vocab = again.config().vocab;
  again.model().set_vocabulary({allowed_bits({.size = vocab}), vocab});
  for (const auto& [first, count] : {std::pair(0, 70), {70, 1}, {71, 59}}) {
    step.clear();
    step.add(text, pages, first, count, 1);
    drafts.will_compute(0, pages, first, count);
    again.model().forward(step.batch(), again.cache());
    // Prompts know what follows a piece; the last piece is followed by one token.
    const auto size = first + count == n ? n + 1 : std::ssize(text);
    const Advance advance = {1,     0, std::span(text).first(size), pages, first,
                             count, 0, first + count == n ? 4 : 0};
    drafts.step_done({&advance, 1}, true);
  }
  const auto got = drafts.draft(1, std::span(text).first(n + 1), 4);
  ASSERT_EQ(got.size(), 4u) << "two more by the second layer again";
  EXPECT_EQ((std::vector<int32_t>{got[0], got[1]}), expected);
}

TEST(Mtp, CopiesOfEmbeddingAndHeadAreKeptOnceIfTheyAreEqual) {
  const LoadedModel shared(mtp_options(kTinyR1));
  EXPECT_FALSE(shared.config().mtp_has_embedding || shared.config().mtp_has_head);
  ChangedModel changed;
  changed.data("model.layers.3.shared_head.head.weight").back() ^= 1;
  const LoadedModel own_head(mtp_options(changed.write()));
  EXPECT_TRUE(!own_head.config().mtp_has_embedding && own_head.config().mtp_has_head);
  changed.data("model.layers.3.embed_tokens.weight")[0] ^= 1;
  const LoadedModel own_both(mtp_options(changed.write()));
  EXPECT_TRUE(own_both.config().mtp_has_embedding && own_both.config().mtp_has_head);
  const int64_t matrix = int64_t{2} * shared.config().vocab * shared.config().dim;
  EXPECT_GE(own_head.packed_bytes(), shared.packed_bytes() + matrix);
  EXPECT_GE(own_both.packed_bytes(), own_head.packed_bytes() + matrix);
  ModelOptions off = mtp_options(kTinyR1);
  off.draft = DraftChoice::kOff;
  LoadedModel without(off);
  EXPECT_LT(without.packed_bytes(), shared.packed_bytes()) << "the layer is not loaded";
  EXPECT_LT(without.load_report().bytes, shared.load_report().bytes) << "nor read";
  EXPECT_EQ(without.cache().n_layers(), 3);
}

// With signs changed in the layer's own embedding and in the columns of eh_proj that take it, and
// in its own head, the logits change their signs alone.
TEST(Mtp, AnEmbeddingAndAHeadOfItsOwnAreUsed) {
  const std::vector<int32_t> text = long_text(42);
  const std::vector<int32_t> tokens(text.begin(), text.end() - 2),
      next(text.begin() + 1, text.end() - 1);
  LoadedModel shared(mtp_options(kTinyR1));
  const auto want = mtp_logits(shared, tokens, next, 8);
  ChangedModel changed;
  const auto negate = [&](const std::string& name, size_t of_columns, size_t n_columns) {
    std::string& data = changed.data("model.layers.3." + name + ".weight");
    for (size_t i = 0; i < data.size() / 2; ++i)
      if (i % n_columns < of_columns) data[2 * i + 1] ^= static_cast<char>(0x80);  // BF16: the sign
  };
  const size_t dim = shared.config().dim;
  negate("embed_tokens", dim, dim);
  negate("eh_proj", dim, 2 * dim);
  negate("shared_head.head", dim, dim);
  LoadedModel own(mtp_options(changed.write()));
  const auto got = mtp_logits(own, tokens, next, 8);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    for (size_t t = 0; t < got[i].size(); ++t) ASSERT_EQ(got[i][t], -want[i][t]) << i << ", " << t;
}

TEST(Mtp, ADraftOfR1ReadsASmallShareOfAStep) {
  const ModelConfig r1 = known_model("r1");
  EXPECT_NEAR(mtp_share(r1), 0.0437, 0.0005);
  EXPECT_NEAR(mtp_share(ModelConfig::from_directory(kTinyR1)), 0.434, 0.001);
}

// `auto` uses what there is, and says in a line why it does not use the layer.
TEST(Mtp, AutoWithoutTheLayer) {
  std::vector<std::string> lines;
  ModelOptions options = mtp_options(std::string(TANDEM_SOURCE_DIR) + "/tests/golden/v2_lite");
  EXPECT_TRUE(says(error_of([&] { LoadedModel m(options); }),
                   "has no layer for multi-token prediction (num_nextn_predict_layers is 0): use "
                   "--draft lookup"));
  options.draft = DraftChoice::kAuto;
  EXPECT_EQ(LoadedModel(options).drafting().source, Drafting::Source::kLookup);

  ModelOptions damaged = mtp_options(kTinyR1);
  damaged.draft = DraftChoice::kAuto;
  EXPECT_EQ(LoadedModel(damaged).drafting().source, Drafting::Source::kLookup)
      << "a draft would read most of what a step reads";
  damaged.largest_mtp_share = 1;
  EXPECT_EQ(LoadedModel(damaged).drafting().source, Drafting::Source::kMtp);
  ChangedModel two;
  two.copy_mtp_layer();
  two.drop("model.layers.4.eh_proj.weight");
  damaged.directory = two.write();
  damaged.warn = [&](const std::string& line) { lines.push_back(line); };
  const LoadedModel loaded(damaged);
  EXPECT_EQ(loaded.drafting().source, Drafting::Source::kLookup);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(says(lines[0], "the layer for multi-token prediction is not used: ")) << lines[0];
  EXPECT_TRUE(says(lines[0], "model.layers.4.eh_proj.weight is missing")) << lines[0];
  damaged.draft = DraftChoice::kMtp;
  EXPECT_TRUE(
      says(error_of([&] { LoadedModel m(damaged); }), "model.layers.4.eh_proj.weight is missing"));
}

}  // namespace
}  // namespace tandem::test
