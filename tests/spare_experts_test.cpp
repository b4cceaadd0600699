// Experts that come to a model later are packed as those it was loaded with: after many exchanges
// every expert that is here has the bytes of a fresh load, in the same memory.
#include "loader/weights/spare_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>

#include "loader/weights/loading_mover.h"
#include "model/checkpoint.h"
#include "tests/error_of.h"
#include "tests/random_model.h"
#include "tests/repository.h"
#include "tests/temp_directory.h"
#include "tests/topologies.h"

namespace tandem::test {
namespace {

// What changes mean for a rank of a stage, of which other stages' layers are no part.
TEST(MovesOf, AreThoseOfTheLayersOfAStage) {
  const std::vector<ExpertChange> changes = {{1, 0, {1}}, {4, 0, {0, 1}}, {4, 1, {0}},
                                             {2, 3, {1}}, {5, 2, {0}},    {5, 3, {0}}};
  const auto is_here = [](ExpertId id) { return id.expert == 1 || id.expert == 2; };
  const ExpertMoves moves = moves_of(changes, {4, 2}, 1, is_here);
  const auto numbers = [](const std::vector<ExpertId>& ids) {
    std::vector<std::pair<int, int>> all;
    for (const auto& [layer, expert] : ids) all.emplace_back(layer, expert);
    return all;
  };
  using Numbers = std::vector<std::pair<int, int>>;
  EXPECT_EQ(numbers(moves.arriving), (Numbers{{4, 0}}));
  EXPECT_EQ(numbers(moves.leaving), (Numbers{{4, 1}, {5, 2}}));
}

std::shared_ptr<OpenCheckpoint> open_checkpoint(const std::string& directory,
                                                const ModelConfig& config) {
  auto opened = std::make_shared<OpenCheckpoint>();
  opened->store = std::make_unique<WeightStore>(directory);
  opened->stored = stored_weights(*opened->store, config);
  return opened;
}

struct Case {
  std::string family;
  std::optional<WeightFormat> format;
  Topology topology;
};

// A model of which some experts are kept here.
struct Kept {
  Kept(const std::string& directory, const ModelConfig& config, const cpu::KernelTable& kernels,
       const Case& of, std::vector<std::vector<bool>> elsewhere)
      : home(kernels, of.topology), experts(of.format) {
    experts.keep_elsewhere({.experts = std::move(elsewhere), .backbone = false});
    const WeightStore store(directory);
    ModelWeights stored = stored_weights(store, config);
    weights = load_weights(store, stored, config,
                           {.layout = {kernels, experts}, .cache_directory = {}}, home)
                  .weights;
  }
  CpuWeights home;
  ExpertsLayout experts;
  ModelWeights weights;
};

std::string bytes_of(const TensorView& view, int64_t rows_of_stride) {
  if (view.empty()) return {};
  const int64_t n = (view.rows + rows_of_stride - 1) / rows_of_stride;
  return {static_cast<const char*>(view.data), static_cast<size_t>(n * view.row_bytes())};
}

void expect_same_experts(const ModelWeights& a, const ModelWeights& b, cpu::Layout layout) {
  const int64_t rows = layout == cpu::Layout::kPanels ? kPackRows : 1;
  int n_same = 0;
  for (size_t l = 0; l < a.layers.size(); ++l)
    for (size_t e = 0; e < a.layers[l].experts.size(); ++e)
      for (const auto which : {&FfnWeights::gate, &FfnWeights::up, &FfnWeights::down}) {
        const QuantView &x = a.layers[l].experts[e].*which, &y = b.layers[l].experts[e].*which;
        ASSERT_EQ(x.empty(), y.empty()) << "layer " << l << ", expert " << e;
        if (x.empty()) continue;
        ++n_same;
        EXPECT_TRUE(bytes_of(x.q, rows) == bytes_of(y.q, rows)) << "layer " << l << ", " << e;
        EXPECT_TRUE(bytes_of(x.scale, 1) == bytes_of(y.scale, 1)) << "layer " << l << ", " << e;
        EXPECT_EQ(std::tuple(x.block_rows, x.block_cols, x.row0, x.col0, x.q.rows, x.q.cols),
                  std::tuple(y.block_rows, y.block_cols, y.row0, y.col0, y.q.rows, y.q.cols));
      }
  EXPECT_GT(n_same, 0);
}

TEST(SpareExperts, HaveTheBytesOfAFreshLoad) {
  std::mt19937 random(3);
  const std::vector<Case> cases = {{"v3_fp8", {}, topology_of({1})},
                                   {"v3_1_fp8", {}, topology_of({1, 1})},  // two slices
                                   {"tiny-r1", weight_format("int8"), topology_of({1, 1})},
                                   {"tiny-r1", weight_format("int4"), topology_of({2})},
                                   {"v2_lite", {}, topology_of({1, 2})},
                                   {"kimi_k2_thinking", {}, topology_of({1, 1})}};
  for (const cpu::Isa isa : {cpu::Isa::kReference, cpu::best_isa()})
    for (const Case& of : cases) {
      SCOPED_TRACE(of.family + (of.format ? " as " + format_name(*of.format) : ""));
      const std::string directory =
          of.family == "tiny-r1" ? kTinyR1 : kRoot + "/tests/golden/" + of.family;
      const cpu::KernelTable kernels = cpu::kernels_for(isa);
      const ModelConfig config = ModelConfig::from_directory(directory);
      const int n_experts = config.router.n_experts;
      std::vector<std::vector<bool>> elsewhere(config.n_all_layers());
      for (int l = 0; l < config.n_all_layers(); ++l)
        for (int e = 0; config.is_moe(l) && e < n_experts; ++e) elsewhere[l].push_back(e % 2 == 0);
      Kept model(directory, config, kernels, of, elsewhere);
      const PackedLayout layout{kernels, model.experts};
      SpareExperts spare(open_checkpoint(directory, config), config, layout, of.topology,
                         model.weights, most_of_layer(model.experts, config));
      for (int wave = 0; wave < 12; ++wave) {
        std::vector<ExpertId> arriving, leaving;
        for (int l = 0; l < config.n_all_layers(); ++l) {
          if (!config.is_moe(l) || (wave + l) % 2 == 0) continue;
          std::vector<int> here, there;
          for (int e = 0; e < n_experts; ++e) (elsewhere[l][e] ? there : here).push_back(e);
          std::shuffle(here.begin(), here.end(), random);
          std::shuffle(there.begin(), there.end(), random);
          const size_t n = 1 + random() % std::min(here.size(), there.size());
          for (size_t i = 0; i < n && arriving.size() < here.size(); ++i) {
            arriving.push_back({l, there[i]});
            leaving.push_back({l, here[i]});
          }
        }
        const int64_t bytes = spare.load(arriving, {});
        EXPECT_GT(bytes, 0);
        if (wave % 4 == 1) {  // given up
          spare.drop();
          continue;
        }
        spare.exchange(leaving, model.weights);
        for (size_t i = 0; i < arriving.size(); ++i) {
          elsewhere[arriving[i].layer][arriving[i].expert] = false;
          elsewhere[leaving[i].layer][leaving[i].expert] = true;
        }
      }
      const Kept fresh(directory, config, kernels, of, elsewhere);
      expect_same_experts(model.weights, fresh.weights, kernels.layout);
    }
}

TEST(SpareExperts, TakeTheMemoryThatIsPlanned) {
  const std::string directory = kRoot + "/tests/golden/v3_fp8";
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const ModelConfig config = ModelConfig::from_directory(directory);
  const auto opened = open_checkpoint(directory, config);
  const CpuWeights home(kernels, topology_of({1}));
  ExpertsLayout experts;
  const auto bytes = [&] {
    return SpareExperts::bytes_for(opened->stored, config, home, experts,
                                   most_of_layer(experts, config));
  };
  const int64_t all = bytes();
  ASSERT_GT(all, 0);
  EXPECT_EQ(all % config.router.n_experts, 0);
  std::vector<std::vector<bool>> elsewhere(config.n_all_layers());
  for (int l = 0; l < config.n_all_layers(); ++l)
    if (config.is_moe(l)) elsewhere[l].assign(config.router.n_experts, true);
  elsewhere.back()[1] = elsewhere.back()[2] = elsewhere.back()[4] = false;
  experts.keep_elsewhere({.experts = elsewhere, .backbone = false});
  EXPECT_EQ(bytes(), 3 * all / config.router.n_experts);
}

TEST(SpareExperts, NothingIsLoadedAfterAnError) {
  const TempDirectory dir;
  std::filesystem::copy(kRoot + "/tests/golden/v3_fp8", dir.file("model"));
  const std::string file = dir.file("model/model.safetensors");
  ASSERT_TRUE(std::filesystem::exists(file));
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const ModelConfig config = ModelConfig::from_directory(dir.file("model"));
  std::vector<std::vector<bool>> elsewhere(config.n_all_layers());
  for (int l = 0; l < config.n_all_layers(); ++l)
    for (int e = 0; config.is_moe(l) && e < config.router.n_experts; ++e)
      elsewhere[l].push_back(e > 0);
  const Case of = {"v3_fp8", {}, topology_of({1})};
  Kept model(dir.file("model"), config, kernels, of, elsewhere);
  SpareExperts spare(open_checkpoint(dir.file("model"), config), config, {kernels, model.experts},
                     of.topology, model.weights, 1);
  const int layer = config.n_layers - 1;
  const std::vector<ExpertId> arriving = {{layer, 1}}, leaving = {{layer, 0}};
  const auto size = std::filesystem::file_size(file);
  std::filesystem::resize_file(file, size - 100);
  for (int i = 0; i < 3; ++i)  // there is room for one expert only, which every failure gives back
    EXPECT_TRUE(says(error_of([&] { spare.load(arriving, {}); }), "when it was opened"));
  std::filesystem::resize_file(file, size);
  for (int i = 0; i < 3; ++i)
    EXPECT_THROW(spare.load(arriving, {.progress = [](int64_t, int64_t, double) { throw 5; }}),
                 int);
  std::filesystem::copy_file(kRoot + "/tests/golden/v3_fp8/model.safetensors", file,
                             std::filesystem::copy_options::overwrite_existing);
  spare.load(arriving, {});
  spare.exchange(leaving, model.weights);
  elsewhere[layer][0] = true;
  elsewhere[layer][1] = false;
  const Kept fresh(dir.file("model"), config, kernels, of, elsewhere);
  expect_same_experts(model.weights, fresh.weights, kernels.layout);
}

}  // namespace
}  // namespace tandem::test
