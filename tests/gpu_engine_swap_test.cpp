// Sequences that do not fit the GPU's cache are offloaded to host memory and return: the same bits,
// the same text, and no token is computed twice.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "engine/engine.h"
#include "gpu_kernels/runtime.h"
#include "tests/error_of.h"
#include "tests/hybrid_placements.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

constexpr int64_t kFewTokens = 5 * kPageSize;

// A small model on the GPU, with a cache of `context` tokens and host pages for up to
// kv_tokens.
ModelOptions options_for(int64_t context, int64_t kv_tokens, std::optional<DType> kv = {}) {
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.directory = kGolden + "v2_lite";
  options.context = context;
  options.max_kv_tokens = kv_tokens;
  options.step_tokens = 256;
  options.max_logits = 4;
  options.kv = kv;
  return options;
}

using Bytes = std::vector<std::byte>;

// The bytes of every page, in all layers.
std::vector<Bytes> read(LoadedModel& loaded) {
  std::vector<Bytes> pages(loaded.cache().n_pages());
  for (size_t page = 0; page < pages.size(); ++page)
    loaded.cache().for_each_piece(static_cast<int32_t>(page), [&](std::span<std::byte> from) {
      Bytes part(from.size());
      loaded.model().device().copy(from.data(), std::ssize(part), part.data());
      loaded.model().device().wait();
      pages[page].insert(pages[page].end(), part.begin(), part.end());
    });
  return pages;
}

void fill_with_noise(LoadedModel& loaded, unsigned seed) {
  std::mt19937 rng(seed);
  for (int page = 0; page < loaded.cache().n_pages(); ++page)
    loaded.cache().for_each_piece(page, [&](std::span<std::byte> to) {
      Bytes noise(to.size());
      for (std::byte& b : noise) b = static_cast<std::byte>(rng());
      loaded.model().device().copy(noise.data(), std::ssize(noise), to.data());
      loaded.model().device().wait();
    });
}

// The cache takes more than one sequence as far as requested and as fits beside the weights. Where
// experts share the GPU, they get the rest.
TEST(GpuCache, TakesTheRemainingMemory) {
  const auto pages = [](double fraction, int64_t kv_tokens, int64_t memory, bool shared) {
    setenv("TANDEM_GPU_MEMORY", std::to_string(memory).c_str(), 1);
    ModelOptions options = options_for(kFewTokens, kv_tokens);
    options.kv_fraction = fraction;
    LoadedModel loaded(options);
    unsetenv("TANDEM_GPU_MEMORY");
    EXPECT_EQ(loaded.device().find("experts also on the cpu") != std::string::npos, shared);
    return loaded.cache().n_pages();
  };
  constexpr int64_t kPlenty = 8'000'000'000;
  EXPECT_EQ(pages(0, 0, kPlenty, false), 5);
  EXPECT_EQ(pages(0.8, 0, kPlenty, false), 5) << "one sequence at a time";
  EXPECT_EQ(pages(0.8, 40 * kPageSize, kPlenty, false), 40);
  // Finds the smallest memory that takes the whole model.
  const auto is_shared = [](int64_t memory) {
    setenv("TANDEM_GPU_MEMORY", std::to_string(memory).c_str(), 1);
    const LoadedModel loaded(options_for(kFewTokens, 0));
    unsetenv("TANDEM_GPU_MEMORY");
    return loaded.device().find("experts also on the cpu") != std::string::npos;
  };
  int64_t whole = kPlenty, less = 1'000'000;
  while (whole - less > 20'000) {
    const int64_t middle = (whole + less) / 2;
    bool fits = false;
    error_of([&] { fits = !is_shared(middle); });
    (fits ? whole : less) = middle;
  }
  const int64_t page =
      KvCache::bytes_for(ModelConfig::from_directory(kGolden + "v2_lite"), kPageSize, DType::kBF16);
  const int few = pages(0.8, 4000 * kPageSize, whole + 20 * page, false);
  EXPECT_GE(few, 5 + 15);
  EXPECT_LE(few, 5 + 20 + 20'000 / page);
  // A real GPU needs memory for streamed experts, more than all experts of this small model.
  if (!gpu::open_gpu().emulated) return;
  const int beside_experts = pages(0.8, 4000 * kPageSize, whole - 20'000, true);
  EXPECT_GT(beside_experts, 5);
  EXPECT_EQ(pages(1, 6 * kPageSize, whole - 20'000, true), 6) << "as asked for";
}

TEST(GpuSwap, PagesReturnBitByBit) {
  using Way = PageCopy::Way;
  for (const DType kv : {DType::kBF16, DType::kF8E4M3}) {
    SCOPED_TRACE(format_name({kv}));
    LoadedModel loaded(options_for(kFewTokens, 3 * kFewTokens, kv));
    ASSERT_NE(loaded.model().host_pages(), nullptr);
    HostPages& host = *loaded.model().host_pages();
    ASSERT_EQ(host.n_pages(), 10);
    EXPECT_EQ(host.rates().page_bytes,
              KvCache::bytes_for(loaded.config(), kPageSize, loaded.cache_type()));
    EXPECT_GT(host.rates().to_host_bytes_per_second, 0);
    EXPECT_GT(host.rates().to_gpu_bytes_per_second, 0);

    fill_with_noise(loaded, 1);
    const std::vector<Bytes> first = read(loaded);
    for (const PageCopy& copy :
         {PageCopy{0, 7, Way::kToHost}, {1, 0, Way::kToHost}, {3, 2, Way::kToHost}})
      host.copy(copy);
    fill_with_noise(loaded, 2);
    const std::vector<Bytes> second = read(loaded);
    for (const PageCopy& copy :
         {PageCopy{3, 7, Way::kFromHost}, {0, 2, Way::kFromHost}, {2, 0, Way::kFromHost}})
      host.copy(copy);
    const std::vector<Bytes> third = read(loaded);
    EXPECT_EQ(third[3], first[0]);
    EXPECT_EQ(third[0], first[3]);
    EXPECT_EQ(third[2], first[1]);
    EXPECT_EQ(third[1], second[1]);
    EXPECT_NE(first[1], second[1]);
  }
}

TEST(GpuSwap, OnlyACacheThatMayOverflowHasHostPages) {
  EXPECT_EQ(LoadedModel(options_for(kFewTokens, 0)).model().host_pages(), nullptr);
  EXPECT_EQ(LoadedModel(options_for(kFewTokens, kFewTokens)).model().host_pages(), nullptr);
  EXPECT_EQ(LoadedModel(options_for(kFewTokens, 100 * kFewTokens)).model().host_pages()->n_pages(),
            20);
  ModelOptions on_cpu = options_for(kFewTokens, 3 * kFewTokens);
  on_cpu.device = DeviceChoice::kCpu;
  on_cpu.kv_fraction = 0.5;
  EXPECT_EQ(LoadedModel(on_cpu).model().host_pages(), nullptr);
}

// Lengths of prompts and answers. All prompts are in the first step, so a preemption changes the
// batch composition of single-token steps only, which changes no bits while contexts are short.
using Lengths = std::vector<std::pair<int, int>>;

// On five pages the third sequence is preempted with a full page, for the second pages of the
// others.
const Lengths kThree = {{63, 8}, {62, 8}, {61, 8}};
// On four pages the second sequence is preempted within its second page, for the third page of the
// first.
const Lengths kTwo = {{100, 30}, {50, 32}};

struct Play {
  ModelOptions options = options_for(kFewTokens, 6 * kFewTokens);
  Lengths lengths = kThree;
  bool keeps_pages = false;
  bool aborts = false;  // aborts all but one as soon as one is in host memory
};
struct Played {
  std::vector<std::vector<int32_t>> tokens;
  int survivor = -1;
  EngineCounts counts;
};

// Runs the engine on the calling thread, so that all steps are reproducible.
Played play(const Play& how) {
  LoadedModel loaded(how.options);
  const int vocab = loaded.config().vocab;
  const Tokenizer tokenizer = Tokenizer::from_directory(kRoot + "/models/tiny-r1");
  Engine engine(loaded.model(), loaded.cache(), vocabulary_of(tokenizer, vocab), loaded.context(),
                {.max_running = 4, .keeps_pages = how.keeps_pages, .drafting = loaded.drafting()});
  const auto n_answers = static_cast<int>(how.lengths.size());
  Played played;
  played.tokens.resize(n_answers);
  std::set<int> left;
  for (int i = 0; i < n_answers; ++i) {
    EngineRequest r;
    const auto& [n_prompt, n_new] = how.lengths[i];
    for (int t = 0; t < n_prompt; ++t) r.request.prompt.push_back((t * t + 7 * i) % vocab);
    r.request.max_new_tokens = n_new;
    r.request.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
    r.request.sampling.seed = i;
    r.on_event = [&, i](const TokenEvent& event) {
      if (event.token) played.tokens[i].push_back(*event.token);
      if (event.finish) left.erase(i);
      if (left.empty()) engine.stop();
      if (!how.aborts || left.size() == 1 || left.count(i) == 0) return true;
      if (engine.counts().scheduler.n_swapped == 0) return true;
      for (const int other : left)
        if (other != i) engine.abort(other + 1);
      left = {played.survivor = i};
      return true;
    };
    left.insert(i);
    EXPECT_EQ(engine.submit(std::move(r)), static_cast<SequenceId>(i + 1));
  }
  engine.run();
  played.counts = engine.counts();
  return played;
}

// The result with enough pages.
const Played& roomy() {
  static const Played played = play({.options = options_for(6 * kFewTokens, 0)});
  return played;
}

void expect_swapped_once(const Played& tight, const Played& with_room) {
  EXPECT_EQ(with_room.counts.scheduler.n_preemptions, 0);
  EXPECT_EQ(tight.tokens, with_room.tokens);
  const Scheduler::Counts& c = tight.counts.scheduler;
  EXPECT_EQ(c.n_preemptions, 1);
  EXPECT_EQ(c.n_swaps_out, 1);
  EXPECT_EQ(c.n_swaps_in, 1);
  EXPECT_EQ(c.n_free_host_pages, c.n_host_pages);
  EXPECT_EQ(tight.counts.n_computed_tokens, with_room.counts.n_computed_tokens);
}

TEST(GpuSwap, TheSameText) { expect_swapped_once(play({}), roomy()); }

TEST(GpuSwap, TheSameTextWithThePrefixCache) {
  expect_swapped_once(play({.keeps_pages = true}), roomy());
}

TEST(GpuSwap, TheSameTextWithACacheInFp8) {
  expect_swapped_once(play({.options = options_for(kFewTokens, 6 * kFewTokens, DType::kF8E4M3)}),
                      play({.options = options_for(6 * kFewTokens, 0, DType::kF8E4M3)}));
}

TEST(GpuSwap, TheSameTextAfterPreemptionWithinAPage) {
  constexpr int64_t kFour = 4 * kPageSize;
  expect_swapped_once(play({.options = options_for(kFour, 6 * kFour), .lengths = kTwo}),
                      play({.options = options_for(6 * kFour, 0), .lengths = kTwo}));
}

// The rows of the MTP layer are swapped with the others, and drafts change no text.
TEST(GpuSwap, TheSameTextWithDrafts) {
  const auto with = [](int64_t context, int64_t kv_tokens, DraftChoice draft) {
    ModelOptions options = options_for(context, kv_tokens);
    options.directory = kRoot + "/models/tiny-r1";
    options.draft = draft;
    options.draft_tokens = 2;
    options.max_logits = 16;
    return options;
  };
  const Played want = play({.options = with(6 * kFewTokens, 0, DraftChoice::kOff)});
  const Played roomy = play({.options = with(6 * kFewTokens, 0, DraftChoice::kMtp)});
  const Played tight = play({.options = with(kFewTokens, 6 * kFewTokens, DraftChoice::kMtp)});
  EXPECT_EQ(roomy.tokens, want.tokens);
  EXPECT_EQ(tight.tokens, want.tokens);
  EXPECT_EQ(roomy.counts.scheduler.n_preemptions, 0);
  const Scheduler::Counts& c = tight.counts.scheduler;
  EXPECT_GE(c.n_swaps_out, 1);
  EXPECT_EQ(c.n_swaps_in, c.n_swaps_out);
  EXPECT_EQ(c.n_free_host_pages, c.n_host_pages);
  EXPECT_GT(c.n_drafted_tokens, 0);
}

// Pages are copied between steps that the CPU takes part in, with two micro-batches.
TEST(GpuSwap, TheSameTextWithExpertsOnTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  std::mt19937 rng(4);
  Placement placement = random_placement(ModelConfig::from_directory(kGolden + "v2_lite"), rng);
  placement.prefill_chunk_tokens = 256;
  placement.micro_batches = 2;
  const auto play_shared = [&](ModelOptions options) {
    placement.kv_tokens = options.context;
    const PlacementFile file(placement);
    options.placement = file.path();
    return play({.options = options});
  };
  expect_swapped_once(play_shared(options_for(kFewTokens, 6 * kFewTokens)),
                      play_shared(options_for(6 * kFewTokens, 0)));
}

// The third sequence has two pages and host memory has one.
TEST(GpuSwap, WithoutHostMemoryTokensAreRecomputed) {
  constexpr int64_t kSix = 6 * kPageSize;
  const Played little = play(
      {.options = options_for(kSix, kSix + kPageSize), .lengths = {{63, 8}, {62, 8}, {125, 8}}});
  EXPECT_EQ(little.counts.scheduler.n_host_pages, 1);
  EXPECT_EQ(little.counts.scheduler.n_preemptions, 1);
  EXPECT_EQ(little.counts.scheduler.n_swaps_out, 0);
  EXPECT_EQ(little.counts.n_computed_tokens, 63 + 62 + 125 + 3 * 7 + 128);
  for (const auto& tokens : little.tokens) EXPECT_EQ(tokens.size(), 8u);
}

TEST(GpuSwap, AnAbortedRequestFreesHostMemory) {
  const Played alone = play({.aborts = true});
  ASSERT_GE(alone.survivor, 0);
  EXPECT_EQ(alone.tokens[alone.survivor], roomy().tokens[alone.survivor]);
  const Scheduler::Counts& c = alone.counts.scheduler;
  EXPECT_EQ(c.n_swapped, 0);
  EXPECT_EQ(c.n_swaps_in, 0);
  EXPECT_EQ(c.n_free_host_pages, c.n_host_pages);
  EXPECT_EQ(c.n_available_pages, c.n_pages);
}

}  // namespace
}  // namespace tandem::test
