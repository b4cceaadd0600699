// Whole models whose experts workers compute, which are threads here: golden logits, the embedded
// model's answers while workers end and begin, and what is refused.
#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "cli/conversation.h"
#include "loader/arithmetic.h"
#include "loader/expert_workers.h"
#include "loader/weights/model_identity.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/temp_directory.h"
#include "tests/whole_models.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

std::vector<float> golden_logits(const GoldenFile& golden, const ModelOptions& options) {
  LoadedModel loaded(options);
  std::vector<float> all;
  for (const int length : {5, 17, 40}) {
    const std::string suffix = "_" + std::to_string(length);
    if (!golden.has("tokens" + suffix)) continue;
    const auto n_rows = std::ssize(golden.floats("logits" + suffix)) / loaded.config().vocab;
    score(loaded.model(), loaded.cache(), golden.ints("tokens" + suffix), length - n_rows,
          [&](int64_t, std::span<const float> row) {
            all.insert(all.end(), row.begin(), row.end());
          });
  }
  return all;
}

class WorkerModel : public testing::TestWithParam<std::string> {};

TEST_P(WorkerModel, HasTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  // t1 has near ties between experts, which only float32 decides as the golden values do.
  const auto isa = GetParam() == "t1" ? std::optional(cpu::Isa::kReference) : std::nullopt;
  const int n_experts = ModelConfig::from_directory(directory).router.n_experts;
  if (n_experts == 0) GTEST_SKIP() << "there are no routed experts";
  ModelOptions options = {.directory = directory, .isa = isa, .context = 256, .max_logits = 64};
  const std::vector<float> alone = golden_logits(golden, options);
  std::vector<float> want;
  for (const int length : {5, 17, 40}) {
    const std::string name = "logits_" + std::to_string(length);
    if (!golden.has(name)) continue;
    const std::vector<float> logits = golden.floats(name);
    want.insert(want.end(), logits.begin(), logits.end());
  }
  ASSERT_FALSE(want.empty());
  const int half = n_experts / 2;
  const std::string first = fmt::format("0-{}", half - 1),
                    last = fmt::format("{}-{}", half, n_experts - 1);
  std::vector<std::string> four;
  for (int i = 0; i < 4; ++i)
    four.push_back(fmt::format("{}-{}", n_experts * i / 4, n_experts * (i + 1) / 4 - 1));
  for (const auto& division : std::vector<std::vector<std::string>>{
           {"auto"}, {"auto", "auto"}, {first, last}, {last, first, first, last}, four, {first}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    LoadedExpertsOptions of_worker = served(directory, "");
    of_worker.isa = isa;
    const Workers workers(of_worker, division);
    options.workers.addresses = workers.addresses;
    const std::vector<float> got = golden_logits(golden, options);
    expect_close(got, want, (GetParam() == "t1" ? 2e-4 : 3e-2) * largest(want));
    if (division[0] == "auto") {
      EXPECT_EQ(got, alone) << "one shard is added as one process adds its experts";
    }
  }
}

// Prompts are cut into micro-batches. With one form of attention no bit changes.
TEST_P(WorkerModel, HasTheSameBitsInMicroBatches) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const int n_experts = ModelConfig::from_directory(directory).router.n_experts;
  if (n_experts == 0) GTEST_SKIP() << "there are no routed experts";
  ModelOptions options = {.directory = directory,
                          .context = 256,
                          .max_logits = 64,
                          .attention = AttentionForm::kAbsorbed};
  const std::vector<float> alone = golden_logits(golden, options);
  const std::string first = fmt::format("0-{}", n_experts / 2 - 1),
                    last = fmt::format("{}-{}", n_experts / 2, n_experts - 1);
  for (const auto& division : std::vector<std::vector<std::string>>{
           {"auto"}, {"auto", "auto"}, {first, last}, {last, first, first, last}, {first}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    const Workers workers(served(directory, ""), division);
    ModelOptions with = options;
    with.workers.addresses = workers.addresses;
    with.micro_batches = 1;
    const std::vector<float> whole = golden_logits(golden, with);
    if (division[0] == "auto") {
      EXPECT_EQ(whole, alone);
    }
    for (const int n : {2, 4, 0}) {
      with.micro_batches = n;
      EXPECT_EQ(golden_logits(golden, with), whole) << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, WorkerModel, testing::ValuesIn(golden_families(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// Owners come and go while answers are computed. The shards stay, and so does every bit.
void expect_same_logits_whoever_answers(int micro_batches) {
  const std::string directory = kGolden + "v3_fp8";
  const std::vector<std::string> experts = {"0-4", "0-4", "5-7", "5-7"};
  Workers workers(served(directory, ""), experts);
  ModelOptions options = {.directory = directory,
                          .context = 256,
                          .max_logits = 64,
                          .attention = AttentionForm::kAbsorbed,
                          .micro_batches = micro_batches};
  options.workers.addresses = workers.addresses;
  LoadedModel loaded(options);
  std::vector<int32_t> tokens(40);
  for (int i = 0; i < 40; ++i) tokens[i] = (i * 37 + 5) % 120;
  const Logits want = logits_after(loaded, tokens);
  const auto is_up = [&](int worker) { return loaded.model().workers()[worker].is_up; };
  for (int round = 0; round < 6; ++round) {
    const int worker = round % 4;
    const std::string address = workers.addresses[worker];
    std::thread change([&] { workers.threads[worker].reset(); });
    for (int i = 0; i < 3; ++i) EXPECT_EQ(logits_after(loaded, tokens), want);
    change.join();
    EXPECT_EQ(logits_after(loaded, tokens), want);
    LoadedExpertsOptions again = served(directory, experts[worker]);
    workers.threads[worker] =
        std::make_unique<WorkerThread>(again, ExpertServer::Options{.address = address});
    for (int i = 0; i < 2000 && !is_up(worker); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ASSERT_TRUE(is_up(worker));
  }
}

TEST(WorkerModels, GiveTheSameLogitsWhoeverAnswers) { expect_same_logits_whoever_answers(1); }

TEST(WorkerModels, GiveTheSameLogitsInMicroBatchesToo) { expect_same_logits_whoever_answers(2); }

// Workers that keep their experts in different formats.
struct MixedWorkers {
  Workers stored, converted;
  std::vector<std::string> addresses;

  MixedWorkers(const std::string& directory, const std::vector<std::string>& as_stored,
               const std::vector<std::string>& as_int8)
      : stored(served(directory, ""), as_stored), converted(in_int8(directory), as_int8) {
    addresses = stored.addresses;
    addresses.insert(addresses.end(), converted.addresses.begin(), converted.addresses.end());
  }
  static LoadedExpertsOptions in_int8(const std::string& directory) {
    LoadedExpertsOptions options = served(directory, "");
    options.format = WeightFormat{DType::kI8};
    return options;
  }
};

// Each sum is that of a process which has all experts in the worker's format.
TEST(WorkersOfTwoFormats, GiveTheSumsOfEach) {
  LoadedExpertsOptions all_in_int8 = MixedWorkers::in_int8(kServedModel);
  all_in_int8.experts = "auto";
  Local as_stored, in_int8(all_in_int8);
  for (const auto& [stored, int8] :
       {std::pair<std::vector<std::string>, std::vector<std::string>>{{"0-3"}, {"4-7"}},
        {{"1,4-5", "1,4-5"}, {"0,2-3", "6-7", "6-7"}},
        {{}, {"4-7"}}}) {
    const MixedWorkers workers(kServedModel, stored, int8);
    Backbone backbone(as_stored, workers.addresses);
    const int n_stored = static_cast<int>(stored.size());
    for (const int n : {1, 5, kMostTokens}) {
      Inputs inputs(n, as_stored.dim, n);
      std::vector<float> want(inputs.n * as_stored.dim, 0.5f);
      for (const Shard& shard : backbone.shards())
        (shard.owners.empty() || shard.owners[0] < n_stored ? as_stored : in_int8)
            .add_shard(inputs, 1, shard, want);
      EXPECT_EQ(backbone.sums(inputs, 1), want) << n;
      EXPECT_NE(as_stored.sums(inputs, 1, backbone.shards()), want) << "INT8 has other bits";
    }
  }
}

// Whoever has an expert, also the backbone, the logits depend on its format alone.
TEST(WorkersOfTwoFormats, GiveTheSameLogitsWhoeverHasThem) {
  for (const std::string family : {"v3_fp8", "v3_bf16"}) {
    SCOPED_TRACE(family);
    const std::string directory = kGolden + family;
    const GoldenFile golden(directory + "/golden.safetensors");
    ModelOptions options = {.directory = directory,
                            .context = 256,
                            .max_logits = 64,
                            .attention = AttentionForm::kAbsorbed};
    const std::vector<float> alone = golden_logits(golden, options);
    const auto with = [&](const std::vector<std::string>& stored,
                          const std::vector<std::string>& int8, ModelOptions own) {
      const MixedWorkers workers(directory, stored, int8);
      own.workers.addresses = workers.addresses;
      return golden_logits(golden, own);
    };
    const int n = ModelConfig::from_directory(directory).router.n_experts;
    const std::string first = fmt::format("0-{}", n / 2 - 1),
                      last = fmt::format("{}-{}", n / 2, n - 1);
    ModelOptions in_int8 = options;
    in_int8.experts = WeightFormat{DType::kI8};
    const std::vector<float> want = with({first}, {last}, options);
    EXPECT_NE(want, alone);
    EXPECT_EQ(with({}, {"auto"}, options), golden_logits(golden, in_int8));
    expect_close(want, alone, 3e-2 * largest(alone));
    EXPECT_EQ(with({first, first}, {last, last}, options), want) << "replicas";
    EXPECT_EQ(with({first}, {}, in_int8), want) << "the backbone has experts in INT8";
    EXPECT_EQ(with({}, {last}, options), want) << "the backbone has experts as stored";
  }
}

TEST(WorkersOfTwoFormats, AnswerAsOneProcess) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  const std::vector<std::vector<int32_t>> want = answers(options, 6);
  const MixedWorkers workers(kTinyR1, {"0-3", "4-7", "0-7"}, {"8-15", "8-15"});
  options.workers.addresses = workers.addresses;
  EXPECT_EQ(answers(options, 6), want);
  // One that takes floats is the first, and the last one would take BF16.
  std::reverse(options.workers.addresses.begin(), options.workers.addresses.end());
  EXPECT_EQ(answers(options, 6), want);
}

TEST(WorkersOfTwoFormats, AreNamedLayerByLayer) {
  const ModelConfig config = ModelConfig::from_directory(kServedModel);  // layer 0 is dense
  const auto text = [&](const std::vector<std::optional<WeightFormat>>& of_layers) {
    const ExpertsLayout layout(of_layers, {});
    const std::string all =
        arithmetic_text(cpu::kernels_for(cpu::Isa::kReference), layout, {}, config);
    return all.substr(all.find("experts"));
  };
  const std::optional<WeightFormat> stored, int8 = WeightFormat{DType::kI8};
  EXPECT_TRUE(says(text({int8, int8, int8}), "experts int8, columns"));
  EXPECT_TRUE(says(text({int8, int8, stored}),
                   "experts int8 from layer 1 on, as stored from layer 2 on, columns"));
  EXPECT_TRUE(says(text({stored, int8, int8}), "experts int8 from layer 1 on, columns"));
}

TEST(WorkersOfTwoFormats, MayNotHaveTheSameExperts) {
  const MixedWorkers workers(kServedModel, {"0-4"}, {"3-7"});
  ModelOptions options = {.directory = kServedModel, .context = 64};
  options.workers.addresses = workers.addresses;
  const std::string refusal = error_of([&] { LoadedModel loaded(options); });
  EXPECT_TRUE(says(refusal, "both have experts 3-4, and would compute different sums")) << refusal;
  EXPECT_TRUE(says(refusal, "experts as stored")) << refusal;
  EXPECT_TRUE(says(refusal, "experts int8")) << refusal;
}

// Decode steps of several sequences, and prompts beside them.
TEST(WorkerModels, AnswerTheSameInMicroBatches) {
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.attention = AttentionForm::kAbsorbed;
  const std::vector<std::vector<int32_t>> want = answers(options, 6);
  const Workers workers(served(kTinyR1, ""), {"auto", "auto"});
  options.workers.addresses = workers.addresses;
  for (const int n : {2, 3, 4, 0}) {
    options.micro_batches = n;
    EXPECT_EQ(answers(options, 6), want) << n;
  }
}

// Steps that wait for their workers are tried in micro-batches.
TEST(WorkerModels, DividesStepsAsMeasured) {
  constexpr int kSteps = 20;
  SlowWorker worker(milliseconds(1));
  ModelOptions options = {.directory = kServedModel, .context = 64, .max_logits = 64};
  options.workers.addresses = {worker.address()};
  const std::vector<int32_t> tokens(40, 5);
  for (const int n : {1, 2, 0}) {
    options.micro_batches = n;
    LoadedModel loaded(options);
    for (int i = 0; i < kSteps; ++i)
      score(loaded.model(), loaded.cache(), tokens, 39, [](int64_t, std::span<const float>) {});
    const int64_t n_requests = loaded.model().workers()[0].n_requests;
    if (n > 0) {
      EXPECT_EQ(n_requests, n * 2 * kSteps) << "of two layers";
    } else {
      EXPECT_GT(n_requests, 2 * kSteps) << "some steps are tried in micro-batches";
    }
  }
}

TEST(WorkerModels, AreMeasuredByBenchOverlap) {
  const Workers workers(served(kTinyR1, ""), {"auto"});
  const Benchmark benchmark = overlap_benchmark();
  BenchOptions o{.tokens = {12}, .seconds = 1e-3, .model = kTinyR1};
  o.workers.addresses = workers.addresses;
  std::vector<nlohmann::ordered_json> rows;
  run_benchmark(benchmark, checked_input(benchmark, o),
                [&](const nlohmann::ordered_json& row) { rows.push_back(row); });
  ASSERT_EQ(rows.size(), 2u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["workers"], 1);
    EXPECT_GT(row["seconds_2"].get<double>(), 0);
  }
  EXPECT_TRUE(says(benchmark.header(rows[0]), "1 worker\n"));
  o.timeline = "timeline.json";
  EXPECT_TRUE(
      says(error_of([&] { checked_input(benchmark, o); }), "--timeline shows several ranks"));
}

TEST(WorkerModels, AnEngineGoesOnAfterAFailedStep) {
  const ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  expect_answers_after_failed_steps(options, answers(options, 4));
}

std::string refusal(const ModelOptions& options) {
  return error_of([&] { LoadedModel loaded(options); });
}

TEST(WorkerModels, RefuseWorkersThatDoNotFit) {
  const Workers workers(served(kGolden + "v3_fp8", ""), {"0-3", "auto"});
  LoadedExpertsOptions reference = served(kGolden + "v3_fp8", "auto");
  reference.isa = cpu::Isa::kReference;
  const WorkerThread other_kernels(reference);
  LoadedExpertsOptions few_rows = served(kGolden + "v3_fp8", "auto");
  few_rows.max_rows = 4;
  const WorkerThread small(few_rows);
  const auto with = [&](const std::vector<std::string>& addresses, auto change) {
    ModelOptions options = {.directory = kGolden + "v3_fp8", .context = 64};
    options.workers.addresses = addresses;
    options.workers.patience = std::chrono::milliseconds(300);
    change(options);
    return refusal(options);
  };
  const auto nothing = [](ModelOptions&) {};
  const std::string &a = workers.addresses[0], &b = workers.addresses[1];
  EXPECT_EQ(with({a, b}, nothing), "no error");
  EXPECT_TRUE(says(with({a}, [](ModelOptions& o) { o.directory = kGolden + "v3_bf16"; }),
                   "the worker " + a + " has another model than"));
  EXPECT_TRUE(says(with({a, a}, nothing), "is there twice"));
  EXPECT_TRUE(
      says(with({a, other_kernels.address()}, nothing), "both have experts 0-3, and would"));
  EXPECT_TRUE(says(with({small.address()}, nothing), "takes 4 rows: start it with --chunk"));
  EXPECT_TRUE(says(with({"127.0.0.1:1"}, nothing), "does not answer: Connection refused"));
  EXPECT_TRUE(says(with({"nonsense"}, nothing), "an address is HOST:PORT"));
  EXPECT_TRUE(
      says(with({a}, [](ModelOptions& o) { o.placement = "none.json"; }), "cannot open none.json"));
  EXPECT_TRUE(says(with({a}, [](ModelOptions& o) { o.workers.secret.file = "/none"; }),
                   "/none: cannot be read"));
}

// A copy of a checkpoint is the same model, and one byte of its configuration makes it another one.
TEST(WorkerModels, AreKnownByTheirContent) {
  const TempDirectory copy;
  std::filesystem::copy(kGolden + "v3_fp8", copy.path());
  const auto identity = [](const std::string& directory) {
    return model_identity(WeightStore(directory));
  };
  const uint64_t same = identity(kGolden + "v3_fp8");
  EXPECT_EQ(identity(copy.path()), same);
  EXPECT_NE(identity(kGolden + "v3_bf16"), same);
  std::ofstream(copy.file("config.json"), std::ios::app) << " ";
  EXPECT_NE(identity(copy.path()), same);
}

// The worker reads its experts, and the backbone everything else.
TEST(WorkerModels, ReadOnlyTheirParts) {
  const std::string directory = kGolden + "v3_fp8";
  const int64_t all = LoadedModel({.directory = directory, .context = 64}).load_report().bytes;
  const int64_t half = LoadedExperts(served(directory, "0-3")).load_report().bytes;
  EXPECT_EQ(LoadedExperts(served(directory, "4-7")).load_report().bytes, half);
  EXPECT_EQ(LoadedExperts(served(directory, "auto")).load_report().bytes, 2 * half);
  const Workers workers(served(directory, ""), {"0-3"});
  ModelOptions options = {.directory = directory, .context = 64};
  options.workers.addresses = workers.addresses;
  EXPECT_EQ(LoadedModel(options).load_report().bytes, all - half);
}

}  // namespace
}  // namespace tandem::test
