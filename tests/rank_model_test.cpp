// A model on several ranks, which are threads here: golden logits, the embedded model's answers,
// and what each rank reads.
#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "cli/conversation.h"
#include "cli/options.h"
#include "comm/local_ranks.h"
#include "io/weight_store.h"
#include "loader/grid_groups.h"
#include "loader/loaded_model.h"
#include "model/checkpoint.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/plain_engine.h"
#include "tests/rank_grids.h"
#include "tests/repository.h"
#include "tests/whole_models.h"
#include "text/chat_format.h"

namespace tandem::test {
namespace {

// Runs `work` on every rank, which is numbered from 0.
void on_ranks(int n, const std::function<void(Group&)>& work) { run_local_ranks({n}, work); }

class RankModel : public testing::TestWithParam<std::string> {};

TEST_P(RankModel, HasTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const ModelOptions options = {
      .directory = directory,
      // t1 has near ties between experts, which only float32 decides as the golden values do.
      .isa = GetParam() == "t1" ? std::optional(cpu::Isa::kReference) : std::nullopt,
      .context = 256,
      .max_logits = 64};
  for (const int n_ranks : {2, 3, 8}) {
    SCOPED_TRACE(n_ranks);
    std::vector<std::vector<float>> of_rank(n_ranks);
    on_ranks(n_ranks, [&](Group& group) {
      LoadedModel loaded(on_rank(options, group));
      for (const int length : {5, 17, 40}) {
        const std::string suffix = "_" + std::to_string(length);
        if (!golden.has("tokens" + suffix)) continue;
        const std::vector<float> want = golden.floats("logits" + suffix);
        const auto n_rows = std::ssize(want) / loaded.config().vocab;
        score(loaded.model(), loaded.cache(), golden.ints("tokens" + suffix), length - n_rows,
              [&](int64_t, std::span<const float> row) {
                std::vector<float>& all = of_rank[group.rank()];
                all.insert(all.end(), row.begin(), row.end());
              });
      }
    });
    std::vector<float> want;
    for (const int length : {5, 17, 40}) {
      const std::string name = "logits_" + std::to_string(length);
      if (!golden.has(name)) continue;
      const std::vector<float> logits = golden.floats(name);
      want.insert(want.end(), logits.begin(), logits.end());
    }
    ASSERT_FALSE(want.empty());
    expect_close(of_rank[0], want, (GetParam() == "t1" ? 2e-4 : 3e-2) * largest(want));
    for (int rank = 1; rank < n_ranks; ++rank) EXPECT_EQ(of_rank[rank], of_rank[0]) << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RankModel, testing::ValuesIn(golden_families(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// Bytes that each of n ranks reads, and 0 ranks: those of a process alone.
std::vector<int64_t> bytes_read(int n, const std::string& family) {
  const ModelOptions options = {.directory = kGolden + family, .context = 64};
  if (n == 0) return {LoadedModel(options).load_report().bytes};
  std::vector<int64_t> bytes(n);
  on_ranks(n, [&](Group& group) {
    bytes[group.rank()] = LoadedModel(on_rank(options, group)).load_report().bytes;
  });
  return bytes;
}

// How often the ranks together read a tensor. Divided rows are read once, as experts are. Of
// matrices whose columns are divided, and of scales, every rank that has a part reads all. Vectors
// are not counted.
int times_read(const std::string& name, const ModelConfig& config, int n_ranks) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("norm") || has("e_score_correction_bias")) return 0;
  if (has("_shape")) return n_ranks;
  if (has("mlp.experts.")) return 1;
  const bool rows = has("q_proj") || has("q_b_proj") || has("kv_b_proj") || has("gate_proj") ||
                    has("up_proj") || has("lm_head");
  if (rows && !has("_scale_inv")) return 1;
  int n_with_part = 0;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const BackboneShare share = share_of_rank(config, rank, n_ranks);
    const Slice part = has("shared_experts.")             ? share.shared
                       : has("mlp.") && !has("mlp.gate.") ? share.dense
                       : has("lm_head")                   ? share.vocab[rank]
                       : has("o_proj") || rows            ? share.heads
                                                          : Slice{0, 1};
    n_with_part += part.n > 0;
  }
  return n_with_part;
}

TEST(RankModels, ReadOnlyTheirParts) {
  for (const char* family : {"v2_lite", "v3_bf16", "v3_fp8", "kimi_k2_thinking"})
    for (const int n_ranks : {2, 3, 8}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", family, n_ranks));
      const WeightStore store(kGolden + family);
      const ModelConfig config = ModelConfig::from_directory(store.directory());
      int64_t want = 0;
      for (const StoredTensor& t : store.tensors())
        if (!is_passed_over(t.name, config))
          want += t.bytes * times_read(std::string(t.name), config, n_ranks);
      const std::vector<int64_t> bytes = bytes_read(n_ranks, family);
      EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}), want);
      EXPECT_LT(*std::max_element(bytes.begin(), bytes.end()), bytes_read(0, family)[0]);
    }
}

TEST(RankModels, GiveTheSameAnswers) {
  const std::string directory = kTinyR1;
  const Tokenizer tokenizer = Tokenizer::from_directory(directory);
  const ChatFormat format(directory, tokenizer);
  std::ifstream file(kRoot + "/tests/data/tiny_r1_questions.json");
  const nlohmann::json questions = nlohmann::json::parse(file);
  // make test asks every eighth question (sanitizers fewer), make test-long all 240.
  const size_t every = is_long() ? 1 : 8;
  const size_t wanted = TANDEM_SANITIZED ? 8 : questions.size() / every;
  std::vector<Request> requests;
  for (size_t i = 0; i < wanted; ++i) {
    const auto& q = questions[i * every];
    GenerateOptions generate;
    generate.max_new_tokens = 160;
    generate.sampling.temperature = requests.size() % 2 == 0 ? 0 : 0.7f;
    generate.sampling.seed = requests.size();
    requests.push_back(make_request(
        generate, tokenizer, format.prompt(first_messages("", q["question"].get<std::string>()))));
  }
  ASSERT_GE(requests.size(), TANDEM_SANITIZED ? 8u : 30u);
  // A part is enough for drafts that are decided while it runs.
  const std::vector<Request> some(requests.begin(),
                                  requests.begin() + std::min<size_t>(48, requests.size()));
  const auto texts = [&](const ModelOptions& options) {
    LoadedModel loaded(options);
    Engine engine = engine_for(loaded, tokenizer);
    std::vector<std::string> all;
    const bool decides = options.draft == DraftChoice::kAuto;
    for (const Completion& c : complete(engine, decides ? some : requests))
      all.push_back(tokenizer.decode(c.tokens));
    return all;
  };
  for (const DraftChoice draft : {DraftChoice::kAuto, DraftChoice::kMtp}) {
    const ModelOptions options = {
        .directory = directory, .context = 8192, .max_logits = 16, .draft = draft};
    const std::vector<std::string> want = texts(options);
    on_ranks(4, [&](Group& group) {
      StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
      const ModelOptions mine = on_rank(options, group, &steps);
      if (mine.ranks.follow()) {
        LoadedModel loaded(mine);
        return steps.follow();
      }
      EXPECT_EQ(texts(mine), want);
      steps.end();
    });
  }
}

// Every rank has as many experts of a layer as another one, and as many of each routing group.
TEST(RankModels, HaveEquallyManyExperts) {
  const ModelConfig config = ModelConfig::from_directory(kRoot + "/models/tiny-r1");
  const int in_group = config.router.n_experts / config.router.n_groups;
  for (const int n_ranks : {1, 2, 3, 4}) {
    const ExpertOwners owners = even_owners(config, n_ranks);
    for (int first = 0; first < config.router.n_experts; first += in_group) {
      std::vector<int> n_of(n_ranks);
      for (int e = first; e < first + in_group; ++e) {
        ASSERT_EQ(owners.ranks(1, e).size(), 1u);
        ++n_of.at(owners.ranks(1, e)[0]);
      }
      const auto [least, most] = std::minmax_element(n_of.begin(), n_of.end());
      EXPECT_LE(*most - *least, 1);
    }
    EXPECT_TRUE(owners.ranks(0, 0).empty()) << "a dense layer";
  }
}

// A placement that deals experts unevenly is obeyed: what each rank reads, and tokens.
TEST(RankModels, ObeyAPlacement) {
  const std::string directory = kRoot + "/models/tiny-r1";
  const Tokenizer tokenizer = Tokenizer::from_directory(directory);
  const std::string file = testing::TempDir() + "two_ranks.json";
  const auto place = [&](const char* of_first, const char* of_second) {
    std::ofstream(file) << fmt::format(
        R"({{"model": "tiny-r1", "machine": "two hosts",
            "backbone": {{"format": "fp8", "stages": [{{"layers": "0-2", "tp": 2,
                          "devices": ["host0.cpu", "host1.cpu"]}}]}},
            "embedding": {{"on": "cpu"}}, "head": {{"on": "cpu", "replicated": true}},
            "kv": {{"tokens": 1024, "type": "bf16"}},
            "experts": {{"layers": [{{"layers": "1-2", "groups": [
              {{"experts": "{}", "format": "fp8", "owners": ["host0.cpu"]}},
              {{"experts": "{}", "format": "fp8", "owners": ["host1.cpu"]}}]}}]}},
            "prefill": {{"chunk_tokens": 64, "stream_from_tokens": 0}},
            "micro_batches": 1, "micro_batches_from_sequences": 2}})",
        of_first, of_second);
  };
  const auto answer = [&](const ModelOptions& options) {
    LoadedModel loaded(options);
    Engine engine = engine_for(loaded, tokenizer);
    Request request;
    request.prompt = tokenizer.encode("What is 3 + 4?");
    request.max_new_tokens = 100;
    return complete(engine, std::span(&request, 1))[0].tokens;
  };
  const std::vector<int32_t> want = answer({.directory = directory, .context = 1024});
  std::array<int64_t, 2> bytes_before{};
  for (const auto& [first, second] : {std::pair("0-14", "15"), std::pair("0,2,4", "1,3,5-15")}) {
    place(first, second);
    std::array<int64_t, 2> bytes{};
    on_ranks(2, [&](Group& group) {
      const ModelOptions options = on_rank({.directory = directory, .placement = file}, group);
      bytes[group.rank()] = LoadedModel(options).load_report().bytes;
      EXPECT_EQ(answer(options), want) << first;
    });
    if (bytes_before[0] > 0) {
      // Twelve experts of two layers: three matrices of 128 x 128 FP8, each with a scale.
      EXPECT_EQ(bytes_before[0] - bytes[0], 12 * 2 * 3 * (128 * 128 + 4));
      EXPECT_EQ(bytes[1] - bytes_before[1], 12 * 2 * 3 * (128 * 128 + 4));
    }
    bytes_before = bytes;
  }
}

// What is split from a group has its patience of that time, which is long while models are loaded.
TEST(RankModels, GroupsOfAGridNoticeALostRank) {
  std::atomic<int> n_noticed{0};
  on_ranks(4, [&](Group& group) {
    group.set_patience(kLoadPatience);
    GridGroups groups(group, {.n_replicas = 1, .tp = 2, .n_stages = 2});
    groups.set_patience({std::chrono::milliseconds(300)});
    if (group.rank() == 3) {  // it stops
      while (n_noticed < 3) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      return;
    }
    try {  // rank 2 waits in its replica, rank 1 for the next stage, and rank 0 in its stage for 1
      if (group.rank() == 2) groups.replica().barrier();
      if (group.rank() == 1) groups.after()->barrier();
      if (group.rank() == 0) groups.stage().barrier();
      ADD_FAILURE() << "rank " << group.rank() << " goes on";
    } catch (const GroupError& error) {
      EXPECT_EQ(error.lost, 3);
    }
    ++n_noticed;
  });
}

TEST(RankModels, RefuseWhatRanksDoNotShare) {
  const ModelOptions usual = {.directory = kGolden + "v2_lite", .context = 64};
  const auto with = [&](auto change) {
    return refusal_of_ranks(3, [&](int rank) {
      ModelOptions options = usual;
      change(options, rank);
      return options;
    });
  };
  using Options = ModelOptions&;
  EXPECT_NE(with([](Options o, int) {
              o.device = DeviceChoice::kCuda;
            }).find("rank 0, which is number 0 on its host, needs a GPU of its own: this program"),
            std::string::npos);
  EXPECT_NE(with([](Options o, int) { o.placement = "none.json"; }).find("none.json"),
            std::string::npos);
  EXPECT_NE(with([](Options o, int rank) {
              if (rank == 2) o.isa = cpu::Isa::kReference;
            })
                .find("the CPU, model, placement or routing of rank 2 differs from that of rank 0: "
                      "\"kernels reference"),
            std::string::npos);
  EXPECT_NE(with([](Options o, int rank) {
              if (rank == 1) o.directory = kGolden + "v3_fp8";
            }).find("the CPU, model, placement or routing of rank 1 differs"),
            std::string::npos);
  EXPECT_NE(with([](Options o, int rank) {
              if (rank == 1) o.directory = kGolden + "none";
            }).find("none"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::test
