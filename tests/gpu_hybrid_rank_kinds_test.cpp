// Ranks of which some compute on emulated GPUs and others on CPUs, as threads: logits and answers
// of one process on the CPU, in every grid and way of exchanging rows, with all experts of a rank
// on its GPU and with some beside it.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>

#include "model/cost.h"
#include "offload/plan/placement_json.h"
#include "tests/expert_moves.h"
#include "tests/fake_checkpoint.h"
#include "tests/golden_file.h"
#include "tests/gpu_memory.h"
#include "tests/gpu_ranks.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"
#include "tests/setting.h"

namespace tandem::test {
namespace {

constexpr ExpertDispatch kAuto = ExpertDispatch::kAuto, kGather = ExpertDispatch::kGather,
                         kAllToAll = ExpertDispatch::kAllToAll,
                         kLowLatency = ExpertDispatch::kLowLatency;

// A GPU and a CPU have a replica each, divide one, or have a stage each; and larger grids.
const std::vector<RankGrid> kGrids = {
    {.dp = 2, .tp = 1, .dispatch = kGather, .gpus = "gc"},
    {.dp = 1, .tp = 2, .gpus = "gc"},
    {.dp = 1, .tp = 1, .pp = 2, .gpus = "gc"},
    {.dp = 2, .tp = 1, .dispatch = kAllToAll, .gpus = "cg"},
    {.dp = 1, .tp = 3, .gpus = "cgg"},
    {.dp = 1, .tp = 1, .pp = 2, .gpus = "cg"},
    {.dp = 3, .tp = 1, .dispatch = kLowLatency, .gpus = "gcg"},
    {.dp = 1, .tp = 2, .dispatch = kGather, .gpus = "cg"},
    {.dp = 1, .tp = 2, .pp = 2, .gpus = "ggcc"},
    {.dp = 2, .tp = 2, .dispatch = kAllToAll, .gpus = "gcgc"},
    {.dp = 1, .tp = 4, .gpus = "gccc"},
    {.dp = 2, .tp = 1, .pp = 2, .gpus = "gccc"},
    {.dp = 2, .tp = 2, .dispatch = kLowLatency, .gpus = "cccg"},
    {.dp = 4, .tp = 1, .dispatch = kAllToAll, .hosts = {2, 2}, .gpus = "gcgc"},
    {.dp = 1, .tp = 2, .pp = 2, .gpus = "gccg"},
    {.dp = 2, .tp = 4, .dispatch = kGather, .gpus = "ggccgccc"},
    {.dp = 8, .tp = 1, .dispatch = kLowLatency, .gpus = "gcgcgcgc"},
    {.dp = 2, .tp = 2, .dispatch = kAllToAll, .pp = 2, .gpus = "gcccccgg"},
};

class RanksOfTwoKinds : public testing::TestWithParam<std::string> {};

// Every family has a third of the grids, and each grid both sizes of memory; make test-long
// computes the others.
TEST_P(RanksOfTwoKinds, HaveTheLogitsOfTheCpu) {
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_at_once(cpu, tokens, 1, 0)[0];
  const std::vector<std::string> families = families_without_ties(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  ModelOptions options = reference_of(directory);
  options.device = DeviceChoice::kCuda;
  const int64_t few = bytes_for_experts([&] { return LoadedModel(options).device(); }, 0.25, 1000);
  for (size_t i = 0; i < kGrids.size(); ++i) {
    if ((i % 3 == family % 3) == is_long()) continue;
    const int64_t bytes = (i / 3 + family / 3) % 2 == 0 ? few : kEnough;
    const LimitedGpuMemory memory(bytes);
    on_grid(kGrids[i], options, [&](LoadedModel& loaded) {
      SCOPED_TRACE(fmt::format("{}, {} bytes", kGrids[i].name(), bytes));
      EXPECT_TRUE(says(loaded.arithmetic(), ", GPUs on ranks "));
      for (const Logits& rows : logits_at_once(loaded, tokens, kGrids[i].dp + 1, 0))
        expect_close_logits(rows, want, 2e-2);
    });
  }
}

// Each rank's GPU or CPU with a part of the backbone, several GPUs of a host or on hosts of their
// own, and experts on these GPUs and on the CPUs beside and between them, also several times where
// replicas exchange rows.
Placement random_placement_of_kinds(const ModelConfig& c, const RankGrid& grid,
                                    std::mt19937& random) {
  Placement p = backbone_on_gpu(c, kContext);
  p.stages.clear();
  DeviceId device = {-1, -1};
  const int n_of_stage = grid.dp * grid.tp;
  for (int i = 0; i < grid.pp; ++i) {
    Stage& stage = p.stages.emplace_back(
        Stage{c.n_layers * i / grid.pp, c.n_layers * (i + 1) / grid.pp - 1, {}, grid.tp});
    for (int k = 0; k < n_of_stage; ++k) {
      const bool on_gpu = grid.gpus[i * n_of_stage + k] == 'g';
      if (on_gpu && !device.is_cpu() && random() % 2 == 0)
        ++device.gpu;
      else
        device = {device.host + 1, on_gpu ? 0 : -1};
      stage.devices.push_back(device);
    }
    for (int l = stage.first; l <= stage.last; ++l) {
      if (!c.is_moe(l)) continue;
      LayerExperts layer = {l, l, {}};
      for (int e = 0; e < c.router.n_experts; ++e) {
        std::vector<DeviceId> owners;
        do {
          DeviceId owner = stage.devices[random() % n_of_stage];
          if (random() % 2 == 0) owner.gpu = -1;
          if (std::ranges::find(owners, owner) == owners.end()) owners.push_back(owner);
        } while (grid.dp > 1 && random() % 3 == 0);
        layer.groups.push_back({{e}, stored_expert_format(c), owners});
      }
      p.layers.push_back(layer);
    }
  }
  p.embedding_on_cpu = random() % 2;
  p.head_on_cpu = device.is_cpu();
  p.prefill_chunk_tokens = 1 + static_cast<int>(random() % 30);
  return p;
}

TEST_P(RanksOfTwoKinds, HaveTheLogitsOfTheCpuAsPlaced) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_at_once(cpu, tokens, 1, 0)[0];
  std::mt19937 random(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  const std::vector<RankGrid> grids = {
      {.dp = 2, .tp = 1, .gpus = "gc"},
      {.dp = 1, .tp = 1, .pp = 2, .gpus = "cg"},
      {.dp = 3, .tp = 1, .dispatch = kAllToAll, .gpus = "ggc"},
      {.dp = 1, .tp = 2, .pp = 2, .gpus = "ggcc"},
      {.dp = 2, .tp = 2, .dispatch = kLowLatency, .gpus = "ccgg"},
      {.dp = 2, .tp = 1, .dispatch = kGather, .pp = 2, .gpus = "gcgg"}};
  const std::vector<std::string> families = families_without_ties(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  for (size_t i = 0; i < grids.size(); ++i) {
    if ((i % 3 == family % 3) == is_long()) continue;
    const RankGrid& grid = grids[i];
    const Placement placement = random_placement_of_kinds(cpu.config(), grid, random);
    const PlacementFile file(placement);
    ModelOptions options = as_placed(directory, file);
    options.device = DeviceChoice::kAuto;
    options.isa = cpu::Isa::kReference;
    RankGrid as_placed = grid;
    as_placed.gpus.clear();
    on_grid(as_placed, options, [&](LoadedModel& loaded) {
      SCOPED_TRACE(grid.name() + "\n" + placement_to_json(placement).dump());
      EXPECT_TRUE(says(loaded.arithmetic(), ", GPUs on ranks "));
      for (const Logits& rows : logits_at_once(loaded, tokens, grid.dp + 1, 0))
        expect_close_logits(rows, want, 2e-2);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RanksOfTwoKinds,
                         testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// Pairs of equal experts with scores so near to each other that a GPU and a CPU choose differently
// among them; a token has an odd number of experts.
void make_near_ties(std::vector<FakeTensor>& tensors) {
  std::mt19937 random(3);
  const auto named = [&](std::string name) {
    return std::ranges::find_if(tensors, [&](const FakeTensor& t) { return t.name == name; });
  };
  for (FakeTensor& t : tensors) {
    const std::string router = "mlp.gate.weight", bias = "mlp.gate.e_score_correction_bias";
    if (t.name.ends_with(bias)) t.data.assign(t.data.size(), 0);
    if (const size_t at = t.name.find(".experts."); at != std::string::npos) {
      const int expert = std::stoi(t.name.substr(at + 9));
      const std::string rest = t.name.substr(t.name.find('.', at + 9));
      if (expert % 2 == 1)
        t.data = named(t.name.substr(0, at + 9) + std::to_string(expert - 1) + rest)->data;
    }
    if (!t.name.ends_with(router)) continue;
    t.dtype = "F32";
    const int64_t n = t.shape[0], dim = t.shape[1];
    std::vector<float> rows(n * dim);
    std::normal_distribution<float> draw(0, 1 / std::sqrt(float(dim)));
    for (int64_t i = 0; i < n * dim; ++i)
      rows[i] = i / dim % 2 == 0 ? draw(random)
                                 : std::nextafter(rows[i - dim], random() % 2 == 0 ? 9.f : -9.f);
    t.data.assign(reinterpret_cast<const char*>(rows.data()), n * dim * sizeof(float));
  }
}

TEST(RanksWithAndWithoutGpus, ChooseTheSameExperts) {
  const LimitedGpuMemory memory(kEnough);
  const TempDirectory dir;
  write_random_model(dir,
                     {{"num_hidden_layers", 3},
                      {"first_k_dense_replace", 0},
                      {"intermediate_size", 128},
                      {"moe_intermediate_size", 64},
                      {"hidden_size", 256},
                      {"vocab_size", 160},
                      {"num_experts_per_tok", 3},
                      {"n_group", 1},
                      {"num_attention_heads", 4},
                      {"kv_lora_rank", 64},
                      {"qk_nope_head_dim", 32},
                      {"qk_rope_head_dim", 32},
                      {"v_head_dim", 64}},
                     make_near_ties);
  std::vector<int32_t> tokens(33);
  std::iota(tokens.begin(), tokens.end(), 100);
  const ModelOptions options = reference_of(dir.path());
  LoadedModel cpu(options);
  const Logits want = logits_at_once(cpu, tokens, 1, 0)[0];
  for (const char* gpus : {"gc", "cg"})
    on_grid({.dp = 1, .tp = 2, .gpus = gpus}, options, [&](LoadedModel& loaded) {
      SCOPED_TRACE(gpus);
      expect_close_logits(logits_at_once(loaded, tokens, 1, 0)[0], want, 2e-2);
    });
}

// The only GPU of the host is the second rank's, which is the first that may use one.
TEST(RanksWithAndWithoutGpus, CountTheGpusOfTheirHost) {
  const Setting one("TANDEM_GPU_COUNT", "1");
  const LimitedGpuMemory memory(kEnough);
  on_grid({.dp = 2, .tp = 1, .gpus = "cg"}, reference_of(kGolden + "v3_bf16"),
          [](LoadedModel& loaded) { EXPECT_EQ(loaded.device(), "cpu, other ranks on GPUs"); });
}

TEST(RanksWithAndWithoutGpus, RefuseWhatNeedsOneKind) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + "v3_bf16";
  std::mt19937 random(1);
  const RankGrid grid = {.dp = 2, .tp = 1, .gpus = "gc"};
  const PlacementFile file(
      random_placement_of_kinds(ModelConfig::from_directory(directory), grid, random));
  const auto refusal = [&](const auto& change) {
    return refusal_of_ranks(2, [&](int) {
      ModelOptions options = as_placed(directory, file);
      change(options);
      return options;
    });
  };
  EXPECT_TRUE(
      says(refusal([](ModelOptions& o) { o.micro_batches = 2; }),
           "places ranks on GPUs and on CPUs, and --micro-batches needs ranks of one kind"));
  EXPECT_TRUE(says(refusal([](ModelOptions& o) { o.moves_experts = true; }), "--rebalance"));
  EXPECT_TRUE(says(refusal([](ModelOptions& o) { o.device = DeviceChoice::kCpu; }),
                   "or with --device cuda"));
}

// Experts on the GPU of rank 0 that has some beside it; nothing where it has none beside it.
std::optional<int> n_on_gpu(LoadedModel& loaded) {
  const std::string text = loaded.arithmetic();
  const std::string before = " with ";
  const size_t at = text.find(before);
  if (at == std::string::npos) return {};
  return std::stoi(text.substr(at + before.size()));
}

// GPU memory with which rank 0 of the grid has some of its experts on its GPU, and some beside it.
int64_t bytes_for_some_experts(const RankGrid& grid, const ModelOptions& options) {
  const auto on_gpu_with = [&](int64_t bytes) -> std::optional<int> {
    const LimitedGpuMemory memory(bytes);
    std::optional<int> n = 0;  // also where the GPU does not take its part
    try {
      on_grid(grid, options, [&](LoadedModel& loaded) { n = n_on_gpu(loaded); });
    } catch (const Error&) {
    }
    return n;
  };
  const std::optional<int> all = on_gpu_with(kEnough);
  int64_t too_few = 0, too_many = kEnough;
  for (int64_t bytes = 1 << 20;;
       bytes = too_many == kEnough ? 2 * bytes : (too_few + too_many) / 2) {
    const std::optional<int> n = on_gpu_with(bytes);
    if (n && *n > 0 && n != all) return bytes;
    (n == 0 ? too_few : too_many) = bytes;
  }
}

// Questions of greedy and of random sampling, with penalties and log-probabilities, with drafts by
// the MTP layer or by lookup: the tokens of one process.
TEST(RanksWithAndWithoutGpus, GiveTheSameAnswers) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> requests = sampled_questions(tokenizer, 5);
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.max_logits = 16;
  options.kv_fraction = 0.01;
  options.max_kv_tokens = 2048;
  LoadedModel one(options);
  const std::vector<std::vector<int32_t>> want = tokens_of(one, tokenizer, requests, 3);
  struct Case {
    RankGrid grid;
    DraftChoice draft;
  };
  for (const auto& [grid, draft] :
       {Case{{.dp = 2, .tp = 1, .dispatch = kGather, .gpus = "gc"}, DraftChoice::kMtp},
        Case{{.dp = 1, .tp = 2, .gpus = "gc"}, DraftChoice::kMtp},
        Case{{.dp = 1, .tp = 1, .pp = 2, .gpus = "gc"}, DraftChoice::kLookup},
        Case{{.dp = 2, .tp = 2, .dispatch = kAllToAll, .gpus = "gccg"}, DraftChoice::kAuto}}) {
    options.draft = draft;
    const bool some = draft == DraftChoice::kMtp;
    const LimitedGpuMemory memory(some ? bytes_for_some_experts(grid, options) : kEnough);
    on_grid(grid, options, [&](LoadedModel& loaded) {
      SCOPED_TRACE(grid.name());
      EXPECT_EQ(tokens_of(loaded, tokenizer, requests, 3), want);
    });
  }
}

// Over all replicas every expert is read once, and the backbone by each of them.
TEST(RanksWithAndWithoutGpus, ReadEveryExpertOnce) {
  const LimitedGpuMemory memory(kEnough);
  const ModelOptions options = reference_of(kGolden + "v3_fp8");
  // of_rank: -1 for the sum of all.
  const auto bytes_of = [&](const RankGrid& grid, int of_rank = -1) {
    std::atomic<int64_t> bytes = 0;
    on_grid(
        grid, options, [](LoadedModel&) {},
        [&](LoadedModel& loaded, int rank) {
          if (of_rank < 0 || of_rank == rank) bytes += loaded.load_report().bytes;
        });
    return bytes.load();
  };
  const int64_t one = bytes_of({.dp = 1, .tp = 1});
  const int64_t of_gpu = bytes_of({.dp = 2, .tp = 1, .gpus = "gc"}) - one;
  const int64_t of_cpu = bytes_of({.dp = 2, .tp = 1, .gpus = "cc"}) - one;
  for (const int64_t backbone : {of_gpu, of_cpu}) {
    EXPECT_GT(backbone, 0);
    EXPECT_LT(backbone, one);
  }
  EXPECT_EQ(bytes_of({.dp = 4, .tp = 1, .gpus = "gcgc"}) - one, 2 * of_gpu + of_cpu);
  // A CPU beside the GPU of its replica has no part of what they divide.
  EXPECT_LT(bytes_of({.dp = 1, .tp = 2, .gpus = "gc"}, 1),
            bytes_of({.dp = 1, .tp = 2, .gpus = "cc"}, 1));
}

}  // namespace
}  // namespace tandem::test
