// Hundreds of steps of changing batches with experts on GPU, real or emulated, and CPU give the CPU
// engine's tokens.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/changing_batches.h"
#include "tests/error_of.h"
#include "tests/hybrid_placements.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

// The model on the CPU and on both devices, with a placement that leads to all kinds of steps:
// recorded in one micro-batch and in two, prompts, streamed steps.
struct Both {
  Both(const ModelOptions& options, int n_sequences, unsigned seed)
      : file(placement(options, seed)),
        on_cpu(options),
        on_both(with(options, file.path())),
        cpu(on_cpu.model(), on_cpu.cache(), 1, n_sequences),
        both(on_both.model(), on_both.cache(), 2, n_sequences) {
    EXPECT_TRUE(says(on_both.device(), "experts also on the cpu"));
  }

  static Placement placement(const ModelOptions& options, unsigned seed) {
    std::mt19937 rng(seed);
    Placement p = random_placement(ModelConfig::from_directory(options.directory), rng);
    p.kv_tokens = options.context;
    p.prefill_chunk_tokens = 64;
    p.stream_from_tokens = 25;  // some steps are streamed
    p.micro_batches = 2;
    p.micro_batches_from_sequences = 3;  // steps of two sequences have one micro-batch
    return p;
  }
  static ModelOptions with(ModelOptions options, const std::string& path) {
    options.device = DeviceChoice::kCuda;
    options.placement = path;
    return options;
  }

  const LimitedGpuMemory memory{kEnough};
  const PlacementFile file;
  LoadedModel on_cpu, on_both;
  Conversations cpu, both;
};

// The first layers of a golden model. An emulated layer takes 0.04 s a step.
class Shallow {
 public:
  Shallow(const std::string& family, int n_layers)
      : folder_(std::filesystem::temp_directory_path() /
                fmt::format("tandem-shallow-{}", getpid())) {
    std::filesystem::create_directory(folder_);
    for (const auto& file : std::filesystem::directory_iterator(kGolden + family))
      if (file.path().filename() != "config.json")
        std::filesystem::create_symlink(file.path(), folder_ / file.path().filename());
    std::ifstream in(kGolden + family + "/config.json");
    auto config = nlohmann::json::parse(in);
    config["num_nextn_predict_layers"] = config["num_hidden_layers"].get<int>() - n_layers;
    config["num_hidden_layers"] = n_layers;  // loading skips the other layers
    std::ofstream(folder_ / "config.json") << config;
  }
  ~Shallow() { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_.string(); }

 private:
  const std::filesystem::path folder_;
};

// Fewer steps under ThreadSanitizer, where they take minutes.
#ifdef __SANITIZE_THREAD__
constexpr int kSteps = 50;
#else
constexpr int kSteps = 400;
#endif

TEST(HybridEngineSteps, HundredsOfStepsGiveTheCpusTokens) {
  constexpr int kSequences = 3;
  const Shallow model("v2_lite", 2);
  Both on({.directory = model.path(), .n_threads = 1, .context = 1024, .max_logits = kSequences},
          kSequences, 12);
  const Followed seen =
      follow(on.cpu, on.both,
             {.seed = 12,
              .n_sequences = kSequences,
              .n_steps = kSteps,
              .end = 80,
              .out_of = 3,
              .prompt = [&](std::mt19937& rng) { return random_prompt(rng, on.cpu.vocab()); }});
  EXPECT_GE(seen.n_decoded, kSteps * 3 / 2);
  EXPECT_LE(seen.n_far, seen.n_rows / 50);
  EXPECT_LE(seen.n_near, seen.n_rows / 25);
}

// A trained model has few near ties.
TEST(HybridEngineSteps, TinyR1GivesTheCpusTokens) {
  constexpr int kSequences = 2;
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.context = 512;
  Both on(options, kSequences, 3);
  const Sums sums(options.directory);
  const Followed seen = follow(on.cpu, on.both,
                               {.seed = 6,
                                .n_sequences = kSequences,
                                .n_steps = kSteps / 25,
                                .end = 120,
                                .out_of = 4,
                                .prompt = std::ref(sums),
                                .last_tokens = sums.last_tokens()});
  EXPECT_GE(seen.n_decoded, kSteps / 40);
  EXPECT_LE(seen.n_far, 1);
  EXPECT_LE(seen.n_near, 1);
}

}  // namespace
}  // namespace tandem::test
