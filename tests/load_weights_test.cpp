// Weights from the packed cache equal weights from the checkpoint. After any defect of the cache
// the checkpoint is packed again and one line gives the reason.
#include "loader/weights/load_weights.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "io/packed_cache.h"
#include "loader/weights/pack_weights.h"
#include "model/checkpoint.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"
#include "tests/random_model.h"
#include "tests/topologies.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

const fs::path kSource = TANDEM_SOURCE_DIR;

struct Model {
  explicit Model(const fs::path& from) { fs::copy(from, dir.file("model")); }

  struct Result {
    std::unique_ptr<CpuWeights> home;
    LoadedWeights loaded;
    std::vector<std::string> warnings;
    std::string bytes() const {
      return {reinterpret_cast<const char*>(home->bytes().data()), home->bytes().size()};
    }
  };
  Result load(CacheUse use = CacheUse::kRead) const {
    const ModelConfig config = ModelConfig::from_directory(dir.file("model"));
    const WeightStore store(dir.file("model"));
    ModelWeights stored = stored_weights(store, config);
    Result result;
    result.home = std::make_unique<CpuWeights>(kernels, topology);
    const LoadPlan plan = {
        .layout = {kernels, experts},
        .cache_directory = cache_directory,
        .cache_use = use,
        .n_threads = 2,
        .progress = progress,
        .warn = [&](const std::string& line) { result.warnings.push_back(line); }};
    result.loaded = load_weights(store, stored, config, plan, *result.home);
    return result;
  }
  std::string cache_path() const {
    return packed_cache_path(cache_directory, dir.file("model"), {kernels, experts});
  }
  // Changes the last number of an F32 tensor on disk.
  void set_last_number(const std::string& tensor, float value) const {
    const WeightStore store(dir.file("model"));
    const StoredTensor* t = store.find(tensor);
    ASSERT_NE(t, nullptr);
    const MappedFile& file = store.files()[t->file];
    const int fd = open(file.path().c_str(), O_WRONLY);
    EXPECT_EQ(pwrite(fd, &value, 4, t->data + t->bytes - 4 - file.data()), 4);
    close(fd);
  }
  bool has_cache() const { return fs::exists(cache_path()); }

  TempDirectory dir;
  std::string cache_directory = dir.file("cache");
  cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  ExpertsLayout experts = {};
  Topology topology = {};
  LoadProgress progress = {};
};

// All views as offsets in their memory.
std::string places(const Model::Result& result, const fs::path& directory) {
  return manifest_of(result.loaded.weights, ModelConfig::from_directory(directory.string()),
                     *result.home);
}

void expect_same(const Model& model, const Model::Result& a, const Model::Result& b) {
  EXPECT_TRUE(a.bytes() == b.bytes());
  EXPECT_TRUE(places(a, model.dir.file("model")) == places(b, model.dir.file("model")));
}

void expect_second_start_reads(Model& model) {
  const auto first = model.load(CacheUse::kWrite);
  EXPECT_FALSE(first.loaded.report.from_cache);
  EXPECT_EQ(first.loaded.report.cache, model.cache_path());
  const auto second = model.load();
  EXPECT_TRUE(second.loaded.report.from_cache);
  EXPECT_EQ(second.loaded.report.bytes, static_cast<int64_t>(second.home->bytes().size()));
  EXPECT_EQ(second.loaded.report.cache, model.cache_path());
  for (const double seconds : {first.loaded.report.seconds, first.loaded.report.write_seconds,
                               second.loaded.report.seconds}) {
    EXPECT_GT(seconds, 0);
    EXPECT_LT(seconds, 100);
  }
  EXPECT_EQ(second.loaded.report.write_seconds, 0);
  EXPECT_TRUE(first.warnings.empty() && second.warnings.empty());
  expect_same(model, first, second);
}

TEST(LoadWeights, TheSecondStartReadsTheSame) {
  for (const char* directory : {"models/tiny-r1", "tests/golden/moonlight_tied",
                                "tests/golden/v3_1_fp8", "tests/golden/kimi_k2_thinking"})
    for (int isa = 0; isa <= static_cast<int>(cpu::best_isa()); ++isa) {
      SCOPED_TRACE(fmt::format("{} {}", directory, isa));
      Model model(kSource / directory);
      model.kernels = cpu::kernels_for(static_cast<cpu::Isa>(isa));
      expect_second_start_reads(model);
    }
}

TEST(LoadWeights, ConvertedExpertsAreKeptConverted) {
  Model model(kSource / "models/tiny-r1");
  const auto as_stored = model.load(CacheUse::kWrite);
  for (const WeightFormat format : {WeightFormat{DType::kI8, 0}, WeightFormat{DType::kI4, 32}}) {
    model.experts = format;
    EXPECT_FALSE(model.has_cache()) << "another format is another file";
    expect_second_start_reads(model);
  }
  model.experts = {};
  EXPECT_TRUE(model.load().loaded.report.from_cache);
}

// Layer 0 is dense, layers 1 and 2 have experts of 128 columns.
TEST(LoadWeights, EachLayerIsKeptInItsFormatAndCutAsItSays) {
  Model model(kSource / "models/tiny-r1");
  model.topology = test::topology_of({1, 1});
  const std::optional<WeightFormat> int8 = {{DType::kI8}}, int4 = {{DType::kI4, 32}};
  model.experts = ExpertsLayout({{}, int8, int4}, {0, 128});
  expect_second_start_reads(model);
  const auto mixed = model.load();
  EXPECT_EQ(mixed.loaded.weights.slices, (std::vector<Slice>{{0, 0}, {0, 128}}));
  const auto& layers = mixed.loaded.weights.layers;
  EXPECT_EQ(layers[1].experts[16].gate.q.dtype, DType::kI8);
  EXPECT_EQ(layers[2].experts[16].gate.q.dtype, DType::kI4);
  // A cache depends on the formats of the layers and on the slices of the experts.
  const std::string path = model.cache_path();
  model.experts = ExpertsLayout({{}, int4, int8}, {0, 128});
  EXPECT_NE(model.cache_path(), path);
  EXPECT_FALSE(model.load().loaded.report.from_cache);
  model.experts = ExpertsLayout({{}, int8, int4}, {128, 0});
  EXPECT_FALSE(model.load().loaded.report.from_cache);
  // A layer has the same bytes as in a model with one format in all layers.
  model.topology = {};
  model.experts = ExpertsLayout({{}, int8, int4}, {});
  const auto both = model.load();
  const auto expect_layer_as_in = [&](int layer, const ExpertsLayout& experts) {
    model.experts = experts;
    const auto alike = model.load();
    const auto bytes = [](const QuantView& w) {
      return std::string(static_cast<const char*>(w.q.data),
                         w.q.rows * w.q.cols * bits_of(w.q.dtype) / 8);
    };
    for (int e = 0; e < 16; ++e)
      EXPECT_EQ(bytes(both.loaded.weights.layers[layer].experts[e].down),
                bytes(alike.loaded.weights.layers[layer].experts[e].down));
  };
  expect_layer_as_in(1, *int8);
  expect_layer_as_in(2, *int4);
}

// Writes `bytes` into the data of a tensor.
void overwrite(const Model& model, const std::string& tensor, int64_t at, std::string_view bytes) {
  const WeightStore store(model.dir.file("model"));
  const StoredTensor* t = store.find(tensor);
  ASSERT_TRUE(t && at + static_cast<int64_t>(bytes.size()) <= t->bytes) << tensor;
  const MappedFile& file = store.files()[t->file];
  const int fd = open(file.path().c_str(), O_RDWR);
  EXPECT_EQ(pwrite(fd, bytes.data(), bytes.size(), t->data - file.data() + at),
            static_cast<ssize_t>(bytes.size()));
  close(fd);
}

TEST(LoadWeights, PackedInt4IsCheckedAsItComes) {
  const std::string up = "model.layers.1.mlp.experts.7.up_proj.weight";  // [64, 96]
  const auto error_after = [&](const std::string& part, int64_t at, std::string_view bytes,
                               std::optional<WeightFormat> experts = {}) {
    Model model(kSource / "tests/golden/kimi_k2_thinking");
    model.experts = experts;
    overwrite(model, up + part, at, bytes);
    return error_of([&] { model.load(); });
  };
  using namespace std::string_view_literals;
  EXPECT_EQ(error_after("_packed", 0, "any\xff"), "no error");
  EXPECT_TRUE(
      says(error_after("_shape", 8, "\x61"sv), up + "_shape says [64, 97], expected [64, 96]"));
  // Row 17, column 2 of [64, 3] is in the second panel.
  const int64_t at = (17 * 3 + 2) * 2;
  EXPECT_TRUE(says(error_after("_scale", at, "\xc0\x7f"sv), up + "_scale[17][2] is nan"));
  EXPECT_TRUE(says(error_after("_scale", at, "\x80\x7f"sv), up + "_scale[17][2] is inf"));
  EXPECT_TRUE(says(error_after("_scale", at, "\x80\xbf"sv), up + "_scale[17][2] is -1"));
  EXPECT_EQ(error_after("_scale", at, "\x00\x00"sv), "no error");
  for (const WeightFormat format : {WeightFormat{DType::kI8}, WeightFormat{DType::kBF16}})
    EXPECT_TRUE(says(error_after("_scale", at, "\xc0\x7f"sv, format), "_scale[17][2] is nan"));
}

// The scales of experts are widened in place, so the positions of later rows move.
TEST(LoadWeights, PackedInt4IsReadInPiecesOfRows) {
  ModelConfig config;
  config.vocab = config.n_layers = 1;
  config.n_dense_layers = config.n_shared_experts = config.n_mtp_layers = 0;
  config.mla = {.n_heads = 1, .q_rank = 0, .kv_rank = 1, .nope_dim = 1, .rope_dim = 2, .v_dim = 1};
  config.dim = 4096;
  config.expert_dim = 2112;  // 4.1 load jobs of codes, a little more than one of scales
  config.expert_group = 32;
  config.scale_block = 0;
  config.router = {.n_experts = 1, .n_active = 1, .n_groups = 1, .n_active_groups = 1};
  test::RandomModel model(config, DType::kBF16);
  for (const cpu::Isa isa : {cpu::Isa::kReference, cpu::best_isa()}) {
    const cpu::KernelTable kernels = cpu::kernels_for(isa);
    CpuWeights pieces(kernels), whole(kernels);
    const PackedModel packed = reserve_packed(model.stored, config, pieces);
    test::run_jobs(packed, pieces);
    EXPECT_GT(load_jobs(packed, pieces).rest.size(), 12u);
    const QuantView& stored = model.stored.layers[0].experts[0].up;
    const QuantView& got = packed.weights.layers[0].experts[0].up;
    whole.allocate(whole.packed_bytes(stored));
    const QuantView want = whole.reserve(stored);
    whole.pack_words_scales(stored.scale.data, want);
    whole.pack_words(stored.q.data, want, 0, stored.q.rows);
    EXPECT_EQ(std::memcmp(got.q.data, want.q.data, want.q.rows * want.q.cols / 2), 0);
    EXPECT_EQ(
        std::memcmp(got.scale.data, want.scale.data, want.scale.rows * want.scale.row_bytes()), 0);
    const TensorView& row = model.stored.embed.q;  // a matrix of one row
    EXPECT_EQ(std::memcmp(packed.weights.embed.q.data, row.data, row.row_bytes()), 0);
  }
}

// Loading an INT4 checkpoint reads its shapes first and its weights after them; progress counts
// both.
TEST(LoadWeights, ProgressCountsEveryByteOnce) {
  Model model(kSource / "tests/golden/kimi_k2_thinking");
  std::mutex mutex;
  std::vector<std::pair<int64_t, int64_t>> seen;
  model.progress = [&](int64_t done, int64_t total, double) {
    const std::lock_guard lock(mutex);
    seen.emplace_back(done, total);
  };
  const int64_t bytes = model.load().loaded.report.bytes;
  ASSERT_FALSE(seen.empty());
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].second, bytes);
    EXPECT_GE(seen[i].first, i > 0 ? seen[i - 1].first : 1);
  }
  EXPECT_EQ(seen.back().first, bytes);
}

TEST(LoadWeights, WritesOnlyWhenAsked) {
  const Model model(kSource / "models/tiny-r1");
  const auto result = model.load();
  EXPECT_EQ(result.loaded.report.cache, "");
  EXPECT_FALSE(fs::exists(model.cache_directory));
}

TEST(LoadWeights, WorksWithoutACache) {
  Model model(kSource / "models/tiny-r1");
  model.cache_directory = "";
  EXPECT_EQ(model.load(CacheUse::kWrite).loaded.report.cache, "");
  EXPECT_TRUE(says(error_of([&] { model.load(CacheUse::kRequire); }), "--cache"));
}

// Expects one warning, the checkpoint's weights, and a valid cache afterwards.
void expect_renewed(const Model& model, const std::string& words) {
  const auto result = model.load();
  EXPECT_FALSE(result.loaded.report.from_cache);
  ASSERT_EQ(result.warnings.size(), 1u);
  EXPECT_TRUE(says(result.warnings[0], words));
  EXPECT_TRUE(says(result.warnings[0], model.cache_path()));
  const auto next = model.load();
  EXPECT_TRUE(next.loaded.report.from_cache);
  EXPECT_TRUE(next.warnings.empty());
  expect_same(model, result, next);
}

TEST(LoadWeights, ADamagedCacheIsPackedAgain) {
  const Model model(kSource / "models/tiny-r1");
  const auto original = model.load(CacheUse::kWrite);
  const auto bytes = static_cast<int64_t>(fs::file_size(model.cache_path()));
  for (const int64_t at : {int64_t{0}, int64_t{70}, bytes / 2, bytes - 1}) {
    const int fd = open(model.cache_path().c_str(), O_RDWR);
    char byte = 0;
    ASSERT_EQ(pread(fd, &byte, 1, at), 1);
    byte = static_cast<char>(~byte);
    ASSERT_EQ(pwrite(fd, &byte, 1, at), 1);
    close(fd);
    expect_renewed(model, "is not used");
    expect_same(model, original, model.load());
  }
  fs::resize_file(model.cache_path(), bytes - 1);
  expect_renewed(model, "cut short");
}

TEST(LoadWeights, AnotherCheckpointIsPackedAgain) {
  const Model model(kSource / "models/tiny-r1");
  const std::string shard = model.dir.file("model/model.safetensors");
  model.load(CacheUse::kWrite);
  {  // a number of a tensor, the size stays
    const int fd = open(shard.c_str(), O_RDWR);
    const char byte = 7;
    ASSERT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(fs::file_size(shard)) - 1000), 1);
    close(fd);
  }
  expect_renewed(model, "model.safetensors");
  const std::string config = model.dir.file("model/config.json");
  std::ofstream(config, std::ios::app) << "\n";
  expect_renewed(model, "config.json");
}

// The key contains the slices, and one warning gives the reason. The same number of nodes reads the
// cache.
TEST(LoadWeights, ACacheForOtherNodesIsPackedAgain) {
  Model model(kSource / "models/tiny-r1");
  model.load(CacheUse::kWrite);
  model.topology = test::topology_of({1, 1});
  expect_renewed(model, "experts in slices of");
  model.topology = test::topology_of({4, 4});
  EXPECT_TRUE(model.load().loaded.report.from_cache);
  model.topology = {};
  expect_renewed(model, "experts in slices of");
}

// Every expert is stored once: each slice in the region of its node, or whole with one node.
TEST(LoadWeights, SlicesLieInTheRegionsOfTheirNodes) {
  for (const char* directory : {"models/tiny-r1", "tests/golden/v3_1_fp8"})
    for (const auto& topology : {test::topology_of({1}), test::topology_of({1, 2, 1}),
                                 test::topology_of({1, 1, 1, 1, 1, 1, 1, 1})}) {
      Model model(kSource / directory);
      model.topology = topology;
      const auto result = model.load(CacheUse::kWrite);
      const ModelConfig config = ModelConfig::from_directory(model.dir.file("model"));
      ModelWeights weights = result.loaded.weights;
      ASSERT_EQ(weights.slices.size(), topology.nodes.size());
      int64_t width = 0;
      for (const Slice& slice : weights.slices) width += slice.n;
      EXPECT_EQ(width, config.expert_dim);
      const std::span<std::byte> all = result.home->bytes();
      const std::byte* end = all.data();
      for (int i = 0; i < result.home->n_regions(); ++i) {
        const std::span<std::byte> region = result.home->region(i);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(region.data()) % 4096, 0U) << "they begin at pages";
        EXPECT_GE(region.data(), end);
        EXPECT_LT(region.data() - end, 4096);
        end = region.data() + region.size();
      }
      EXPECT_EQ(end, all.data() + all.size());
      for_each_weight(weights, config, [&](const WeightSpec& spec, const QuantView& w) {
        const auto region =
            result.home->region(spec.use == WeightUse::kExpert ? 1 + spec.slice : 0);
        for (const TensorView& view : {w.q, w.scale})
          EXPECT_TRUE(view.empty() ||
                      (view.data >= region.data() && view.data < region.data() + region.size()))
              << spec.name;
      });
      const auto second = model.load();
      EXPECT_TRUE(second.loaded.report.from_cache);
      expect_same(model, result, second);
    }
}

// The cache of a user: XDG_CACHE_HOME if it is absolute, as its specification says, or else a
// folder of the home directory.
TEST(LoadWeights, TheUsualFolderOfCaches) {
  const char* const home = std::getenv("HOME");
  const std::string before = home ? home : "";
  setenv("HOME", "/home/someone", 1);
  setenv("XDG_CACHE_HOME", "/caches", 1);
  EXPECT_EQ(default_cache_directory(), "/caches/tandem");
  for (const char* none : {"", "relative"}) {
    setenv("XDG_CACHE_HOME", none, 1);
    EXPECT_EQ(default_cache_directory(), "/home/someone/.cache/tandem");
  }
  unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(default_cache_directory(), "/home/someone/.cache/tandem");
  setenv("HOME", "", 1);
  EXPECT_EQ(default_cache_directory(), "");
  unsetenv("HOME");
  EXPECT_EQ(default_cache_directory(), "");
  if (home) setenv("HOME", before.c_str(), 1);
}

// The name of a cache says what is in it; what is too long to be said is a checksum.
TEST(LoadWeights, CachesHaveTheirContentInTheirNames) {
  const TempDirectory dir;
  fs::create_directory(dir.file("r1"));
  const cpu::KernelTable rows = cpu::kernels_for(cpu::Isa::kReference);
  const auto name_of = [&](const ExpertsLayout& experts) {
    const std::string path = packed_cache_path("/c", dir.file("r1"), {rows, experts});
    EXPECT_EQ(path.substr(0, 6), "/c/r1-");
    EXPECT_EQ(path.find('-', 6), 14U) << "eight digits";
    return path.substr(15);
  };
  EXPECT_EQ(name_of({}), "rows.tandempack");
  EXPECT_EQ(name_of(WeightFormat{DType::kI8}), "rows-I8.tandempack");
  EXPECT_EQ(name_of(WeightFormat{DType::kI4, 32}), "rows-I4-32.tandempack");
  const std::optional<WeightFormat> int8 = {{DType::kI8}};
  EXPECT_EQ(name_of(ExpertsLayout({int8, int8}, {})), "rows-I8.tandempack");
  const std::string mixed = name_of(ExpertsLayout({{}, int8}, {}));
  EXPECT_EQ(mixed.size(), std::string("rows-01234567.tandempack").size());
  EXPECT_NE(name_of(ExpertsLayout({int8, {}}, {})), mixed);
  ExpertsLayout part;
  part.keep_elsewhere({{{}, {true, false}}});
  const std::string first = name_of(part);
  EXPECT_EQ(first.substr(0, 10), "rows-part-");
  EXPECT_EQ(first.size(), std::string("rows-part-01234567.tandempack").size());
  part.keep_elsewhere({{{}, {false, true}}});
  EXPECT_NE(name_of(part), first);
  EXPECT_EQ(error_of([&] {
              packed_cache_path("/c", dir.file("none"), {rows, {}});
            }),
            dir.file("none") + ": No such file or directory");
}

// The layout of a table of kernels is part of the key, as a checksum of numbers in that layout.
// It differs from these only if the layout has changed, and then caches must be written anew.
TEST(LoadWeights, TheKeyKnowsTheLayout) {
  const TempDirectory dir;
  dir.write("config.json", "{}");
  write_safetensors(dir.file("model.safetensors"), {{"a", "BF16", {2, 3}}});
  fs::last_write_time(dir.file("model.safetensors"), fs::file_time_type());
  const auto key_of = [&](cpu::Isa isa, const ExpertsLayout& experts) {
    const std::string key = packed_cache_key(WeightStore(dir.path()),
                                             {cpu::kernels_for(isa), experts}, {{0, 64}, {64, 32}});
    const size_t end = key.find("\nconfig.json ");
    EXPECT_EQ(key.substr(end),
              "\nconfig.json 1349cde127705c16\ntensors ec189d7eb37aff0d\n"
              "model.safetensors 116 6437664000.000000000\n");
    return key.substr(0, end);
  };
  const std::string of = "experts in slices of 64 32\nlayout ";
  EXPECT_EQ(key_of(cpu::Isa::kReference, {}), of + "rows a6fa085c7e13936c");
  EXPECT_EQ(key_of(cpu::Isa::kReference, WeightFormat{DType::kI8}),
            of + "rows-I8 d208088adbfab6cf");
  EXPECT_EQ(key_of(cpu::Isa::kReference, WeightFormat{DType::kI4TwoLevel, 64}),
            of + "rows-I4 two-level-64 36a60da69a182602");
  for (int isa = 1; isa <= static_cast<int>(cpu::best_isa()); ++isa) {
    EXPECT_EQ(key_of(static_cast<cpu::Isa>(isa), {}), of + "panels 008fc66a9096b964");
    EXPECT_EQ(key_of(static_cast<cpu::Isa>(isa), WeightFormat{DType::kI4, 32}),
              of + "panels-I4-32 c6a13a74e851b709");
  }
}

// The files have the same size and time and different headers.
TEST(LoadWeights, TheKeyKnowsTheTensors) {
  const TempDirectory dir;
  dir.write("config.json", "{}");
  const auto key_of = [&](const FakeTensor& tensor) {
    const std::string shard = dir.file("model.safetensors");
    write_safetensors(shard, {tensor});
    fs::last_write_time(shard, fs::file_time_type());
    return packed_cache_key(WeightStore(dir.path()), {cpu::kernels_for(cpu::Isa::kReference), {}},
                            {{0, 64}});
  };
  const std::string key = key_of({"a", "BF16", {2, 3}});
  EXPECT_EQ(key, key_of({"a", "BF16", {2, 3}}));
  EXPECT_NE(key, key_of({"b", "BF16", {2, 3}}));
  EXPECT_NE(key, key_of({"a", "BF16", {3, 2}}));
}

TEST(LoadWeights, ScalesThatAreNoNumbersAreRefusedByName) {
  const std::string attention = "model.layers.1.self_attn.o_proj.weight_scale_inv",
                    expert = "model.layers.2.mlp.experts.3.up_proj.weight_scale_inv";
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), -0.5f})
    for (const std::string& name : {attention, expert})
      for (const bool converted : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name, bad, converted));
        Model model(kSource / "models/tiny-r1");
        if (converted) model.experts = WeightFormat{DType::kI8, 0};
        model.load(CacheUse::kWrite);
        model.set_last_number(name, bad);
        for (const char* start : {"with the cache of before", "without a cache"}) {
          const std::string error = error_of([&] { model.load(CacheUse::kWrite); });
          EXPECT_TRUE(says(error, name)) << start;
          EXPECT_TRUE(says(error, fmt::format("] is {}: a scale must", bad))) << start;
          EXPECT_FALSE(model.has_cache()) << start;
        }
      }
}

TEST(LoadWeights, APlaceThatCannotBeWrittenIsAWarningOrAnError) {
  Model model(kSource / "models/tiny-r1");
  model.cache_directory = "/proc/no-such-place";
  const auto result = model.load(CacheUse::kWrite);
  ASSERT_EQ(result.warnings.size(), 1u);
  EXPECT_TRUE(says(result.warnings[0], "no packed cache is written: /proc/no-such-place"));
  EXPECT_TRUE(says(error_of([&] { model.load(CacheUse::kRequire); }), "/proc/no-such-place"));
}

TEST(LoadWeights, StaleTemporariesAreRemoved) {
  const Model model(kSource / "models/tiny-r1");
  fs::create_directory(model.cache_directory);
  std::ofstream(model.cache_path() + ".tmp") << "half";
  model.load();
  EXPECT_FALSE(fs::exists(model.cache_path() + ".tmp"));
}

TEST(PackedManifest, IsCheckedAgainstTheModelAndItsMemory) {
  const Model model(kSource / "models/tiny-r1");
  const auto result = model.load();
  const ModelConfig config = ModelConfig::from_directory(model.dir.file("model"));
  const std::string manifest = places(result, model.dir.file("model"));
  const auto restore = [&](const std::string& changed, const CpuWeights& home) {
    return error_of([&] {
      weights_of(changed, config, result.loaded.weights.slices, home, model.kernels.layout);
    });
  };
  EXPECT_EQ(restore(manifest, *result.home), "no error");
  EXPECT_TRUE(says(restore(manifest.substr(0, 15), *result.home), "too short"));
  EXPECT_TRUE(says(restore(manifest.substr(0, 1600), *result.home), "ends before"));
  EXPECT_TRUE(says(restore(manifest + "x", *result.home), "more than the model"));
  for (const int64_t fewer : {0, 1}) {
    CpuWeights small(model.kernels);
    small.allocate({std::ssize(result.home->region(0)) - 64 * fewer,
                    std::ssize(result.home->region(1)) - 64 * (1 - fewer)});
    EXPECT_TRUE(says(restore(manifest, small), "outside")) << "region " << fewer;
  }
  constexpr size_t kRegions = 16, kRecord = 112, kScaleAt = 40;
  int n_scales = 0;
  for (size_t at = kRegions + kScaleAt; at < manifest.size(); at += kRecord) {
    int64_t offset = 0;
    std::memcpy(&offset, manifest.data() + at, 8);
    if (offset < 0) continue;
    ++n_scales;
    for (const int64_t value : {int64_t{-64}, INT64_MIN, INT64_MAX}) {
      std::string changed = manifest;
      std::memcpy(changed.data() + at, &value, 8);
      EXPECT_TRUE(says(restore(changed, *result.home), "outside"));
    }
  }
  EXPECT_GT(n_scales, 10);
  for (size_t at = 0; at + 8 <= manifest.size() && at < 2000; at += 8)
    for (const int64_t value : {int64_t{-2}, INT64_MIN, INT64_MAX, int64_t{1} << 40}) {
      std::string changed = manifest;
      std::memcpy(changed.data() + at, &value, 8);
      restore(changed, *result.home);  // any error, and no crash or overflow
    }
  std::string without_first = manifest;
  const int64_t none = -1;
  std::memcpy(without_first.data() + kRegions, &none, sizeof none);
  EXPECT_EQ(restore(without_first, *result.home),
            "its manifest has another shape of model.embed_tokens.weight");
  const int64_t bytes = std::ssize(result.home->bytes());
  const auto allocate = [&](const std::string& changed, int64_t data_bytes) {
    CpuWeights home(model.kernels);
    return error_of([&] { allocate_for(changed, data_bytes, home); });
  };
  EXPECT_EQ(allocate(manifest, bytes), "no error");
  EXPECT_TRUE(says(allocate(manifest.substr(0, 15), bytes), "too short"));
  EXPECT_TRUE(says(allocate(manifest, bytes - 1), "other sizes"));
  for (const size_t at : {0, 8})
    for (const int64_t value : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX, bytes}) {
      std::string changed = manifest;
      std::memcpy(changed.data() + at, &value, 8);
      EXPECT_TRUE(says(allocate(changed, bytes), "other sizes"));
    }
}

}  // namespace
}  // namespace tandem
