// The report of `tandem inspect`: the fields that scripts read, and the text.
#include "cli/inspect.h"

#include <gtest/gtest.h>

#include <chrono>
#include <sstream>

#include "model/kv_layout.h"
#include "model/parameters.h"
#include "tests/config_families.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

// A checkpoint with all headers of R1 and without data: 163 sparse files, 688 GB.
struct R1 {
  const ModelConfig config;
  const TempDirectory dir;
  R1() { write_checkpoint(dir.path(), tensors_of(config), 163); }
};
const R1& shared_r1() {
  static const R1 r1;
  return r1;
}

int64_t sum(const nlohmann::ordered_json& parts) {
  int64_t total = 0;
  for (const auto& [name, n] : parts.items()) total += n.get<int64_t>();
  return total;
}

int64_t columns(const std::string& line) {
  return std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

// The counts follow from the shapes of R1's config.json; the published total is 671B (DeepSeek-V3,
// arXiv 2412.19437, abstract).
TEST(Inspect, ReportsR1) {
  const R1& r1 = shared_r1();
  const WeightStore store(r1.dir.path());
  const auto report = inspect_report(r1.config, store);
  EXPECT_EQ(report.at("architecture"), "DeepseekV3ForCausalLM");
  EXPECT_EQ(report.at("layers"), 61);
  EXPECT_EQ(report.at("n_tensors"), 91'991);
  EXPECT_EQ(report.at("files"), 163);
  EXPECT_EQ(report.at("kv_bytes_per_token"), 70'272);
  EXPECT_EQ(report.at("total_bytes"), 688'574'839'360);

  const auto& p = report.at("parameters");
  EXPECT_EQ(p.at("total"), 671'026'419'200);
  EXPECT_EQ(p.at("activated"), 36'625'618'432);
  EXPECT_EQ(p.at("routed_experts"), 58 * 256 * 44'040'192ll);
  EXPECT_EQ(p.at("attention"), 61 * 187'107'328ll);
  EXPECT_EQ(p.at("shared_experts"), 58 * 44'040'192ll);
  EXPECT_EQ(p.at("dense_mlp"), 3 * 396'361'728ll);
  EXPECT_EQ(p.at("embedding"), 926'679'040);
  EXPECT_EQ(p.at("head"), 926'679'040);
  EXPECT_EQ(p.at("router"), 58 * 1'835'264ll);
  EXPECT_EQ(p.at("mtp"), 11'610'068'224);
  EXPECT_EQ(p.at("mtp_stored"), 13'463'426'304);

  const auto& bytes = report.at("bytes");
  EXPECT_EQ(bytes.at("F8_E4M3"), 680'571'043'840);
  EXPECT_EQ(bytes.at("BF16"), 2 * 3'918'786'560);
  EXPECT_EQ(bytes.at("F32"), 4 * 41'555'600);
  const auto& by_class = report.at("bytes_by_class");
  EXPECT_EQ(sum(by_class), 688'574'839'360);
  EXPECT_EQ(sum(by_class) - by_class.at("not_loaded").get<int64_t>(), 673'150'611'808);
  EXPECT_EQ(by_class.at("routed_experts"), 58 * 256 * 44'050'944ll);
  EXPECT_FALSE(report.contains("tensors"));
}

TEST(Inspect, TakesUnderTwoSecondsForR1) {
#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a bound for optimised builds";
#endif
  const R1& r1 = shared_r1();
  const auto start = std::chrono::steady_clock::now();
  const WeightStore store(r1.dir.path());
  inspect_report(r1.config, store);
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  EXPECT_LT(spent.count(), 2.0);
}

// The checkpoint has 594 GB.
TEST(Inspect, ReportsKimiK2Thinking) {
  const ModelConfig config = parse(family("k2-thinking"));
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(config), 62);
  const WeightStore store(dir.path());
  const auto report = inspect_report(config, store);
  EXPECT_EQ(report.at("config").at("expert_int4_group"), 32);
  const int64_t experts = 60ll * 384 * 44'040'192;
  EXPECT_EQ(report.at("parameters").at("routed_experts"), experts);
  EXPECT_EQ(report.at("bytes_by_class").at("routed_experts"), experts / 2 + experts / 32 * 2);
  EXPECT_EQ(report.at("bytes").at("I32"), experts / 2);
  EXPECT_EQ(report.at("bytes").at("I64"), 60 * 384 * 3 * 16);
  EXPECT_EQ(report.at("bytes_by_class").at("not_loaded"), 60 * 384 * 3 * 16);
  EXPECT_EQ(report.at("total_bytes").get<int64_t>() / 1'000'000'000, 594);
  const std::string text = inspect_text(report);
  EXPECT_TRUE(says(text, "  routed experts in INT4 with a scale for each 32 columns of a row\n"));
  EXPECT_TRUE(says(text, "parameters: 1.03 T, of which a token uses 31.69 B"));
}

ModelConfig tiny() {
  ModelConfig c;
  c.dim = 12;
  c.vocab = 1000;
  c.n_layers = 2;
  c.n_dense_layers = 1;
  c.dense_dim = 10;
  c.expert_dim = 6;
  c.n_mtp_layers = 0;
  c.scale_block = 0;
  c.rope.yarn = false;
  c.mla = {.n_heads = 2, .q_rank = 0, .kv_rank = 5, .nope_dim = 3, .rope_dim = 2, .v_dim = 4};
  c.router.n_experts = 4;
  c.router.n_active = 2;
  c.router.n_groups = c.router.n_active_groups = 1;
  return c;
}

TEST(Inspect, PartsAddUpAndTensorsAreListed) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(tiny()), 2);
  const WeightStore store(dir.path());
  const auto report = inspect_report(tiny(), store, true);
  auto parts = report.at("parameters");
  for (const char* other : {"total", "activated", "mtp", "mtp_stored"}) parts.erase(other);
  EXPECT_EQ(sum(parts), report.at("parameters").at("total"));
  EXPECT_EQ(sum(report.at("bytes")), store.total_bytes());
  ASSERT_EQ(report.at("tensors").size(), store.tensors().size());
  const auto& first = report.at("tensors")[0];
  EXPECT_EQ(first.at("name"), "model.embed_tokens.weight");
  EXPECT_EQ(first.at("dtype"), "BF16");
  EXPECT_EQ(first.at("shape"), (std::vector<int64_t>{1000, 12}));
  EXPECT_EQ(first.at("bytes"), 24'000);
  EXPECT_EQ(first.at("file"), dir.file("model-00001-of-000002.safetensors"));
}

TEST(Inspect, TextFitsATerminalAndSaysTheNumbers) {
  const R1& r1 = shared_r1();
  const WeightStore store(r1.dir.path());
  const std::string text = inspect_text(inspect_report(r1.config, store));
  EXPECT_TRUE(says(text, "163 files, 91,991 tensors, 688.6 GB"));
  EXPECT_TRUE(says(text, "parameters: 671.0 B, of which a token uses 36.63 B"));
  EXPECT_TRUE(says(text, "experts: 8 of 256 a token, width 2,048, 1 shared, from 4 of 8 groups"));
  EXPECT_TRUE(says(text, "YaRN factor 40"));
  EXPECT_TRUE(says(text, "  F8_E4M3               680,571,043,840   680.6 GB"));
  // 61 layers; 128 heads of 128 + 128 numbers, 8 groups, 1 head; restored keys have 64 more.
  EXPECT_TRUE(
      says(text, "  latents (stored)           70,272        11.51 GB             1.00x\n"));
  EXPECT_TRUE(
      says(text, "  restored K and V        4,997,120        818.7 GB            71.11x\n"));
  EXPECT_TRUE(
      says(text, "  multi-head              3,997,696        655.0 GB            56.89x\n"));
  EXPECT_TRUE(
      says(text, "  grouped-query, 8          249,856        40.94 GB             3.56x\n"));
  EXPECT_TRUE(
      says(text, "  multi-query                31,232         5.12 GB             0.44x\n"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool has_path = line.starts_with(r1.dir.path());
    EXPECT_LE(has_path ? 0 : columns(line), 79) << line;
  }
}

TEST(Inspect, TextOfASmallModelWithItsTensorsAndWarnings) {
  auto tensors = tensors_of(tiny());
  for (FakeTensor& t : tensors)
    if (t.name.ends_with("correction_bias")) t.dtype = "F16";
  const TempDirectory dir;
  write_safetensors(dir.file("model.safetensors"), tensors);
  const WeightStore store(dir.path());
  const std::string text = inspect_text(inspect_report(tiny(), store, true));
  EXPECT_TRUE(says(text, "1 file, "));
  EXPECT_TRUE(says(text, "none for queries"));
  EXPECT_TRUE(says(text, "warning: the router biases"));
  EXPECT_TRUE(
      says(text, "  BF16     [1000,12]                     24,000  model.embed_tokens.weight"));
  EXPECT_EQ(text.find("YaRN"), std::string::npos);
  EXPECT_EQ(text.find("multi-token"), std::string::npos);
}

TEST(Inspect, RefusesACheckpointOfAnotherModel) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(tiny()), 1);
  const WeightStore store(dir.path());
  ModelConfig other = tiny();
  other.dim = 13;
  EXPECT_TRUE(says(error_of([&] { inspect_report(other, store); }), "expected F8_E4M3, BF16"));
}

}  // namespace
}  // namespace tandem
