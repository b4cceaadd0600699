// Efficiency curves from rows of `tandem bench`.
#include "bench/measured_curves.h"

#include <gtest/gtest.h>

#include "io/json.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

using Points = std::vector<std::pair<double, double>>;

const EfficiencyCurve& curve(const std::vector<EfficiencyCurve>& curves, const std::string& work,
                             const std::string& format) {
  for (const EfficiencyCurve& c : curves)
    if (c.work == work && c.format == format) return c;
  ADD_FAILURE() << work << " " << format << " is missing";
  static const EfficiencyCurve none;
  return none;
}

TEST(MeasuredCurves, RowsByHand) {
  const std::string rows =
      R"({"bench": "experts", "config": "r1", "format": "fp8", "isa": "avx512", "routing": "uniform", "rows_per_expert": 4, "unhidden_ratio": 0.5}
{"bench": "experts", "config": "r1", "format": "fp8", "isa": "avx512", "routing": "skewed", "rows_per_expert": 9, "unhidden_ratio": 0.1}

{"bench": "experts", "config": "r1", "format": "fp8", "isa": "avx512", "routing": "uniform", "rows_per_expert": 1, "unhidden_ratio": 2.25}
{"bench": "experts", "config": "k2", "format": "fp8", "isa": "avx512", "routing": "uniform", "rows_per_expert": 2, "unhidden_ratio": 0.9}
{"bench": "experts", "config": "r1", "format": "fp8", "isa": "avx2", "routing": "uniform", "rows_per_expert": 2, "unhidden_ratio": 0.3}
{"bench": "experts", "config": "k2", "format": "int4-32", "isa": "avx512", "routing": "uniform", "rows_per_expert": 1, "unhidden_ratio": 0.7}
{"bench": "mlp", "config": "r1", "format": "bf16", "isa": "avx512", "what": "gate", "tokens": 8, "unhidden_ratio": 0.6}
{"bench": "mlp", "config": "r1", "format": "bf16", "isa": "avx512", "what": "feed-forward", "tokens": 8, "unhidden_ratio": 0.8}
{"bench": "attention", "config": "r1", "format": "BF16", "isa": "avx512", "what": "decode, absorbed", "context": 512, "unhidden_ratio": 0.4}
{"bench": "attention", "config": "r1", "format": "BF16", "isa": "avx512", "what": "decode, absorbed", "tokens": 4, "context": 512, "unhidden_ratio": 0.9}
{"bench": "attention", "config": "r1", "format": "BF16", "isa": "avx512", "what": "A_CC", "context": 4096, "unhidden_ratio": 0.3}
{"bench": "attention", "config": "r1", "format": "BF16", "isa": "avx512", "what": "prefill, restored", "tokens": 512, "context": 4096, "unhidden_ratio": 0.6}
{"bench": "attention", "config": "r1", "format": "BF16", "isa": "avx512", "what": "prefill, restored", "tokens": 64, "context": 4096, "unhidden_ratio": 0.2}
{"bench": "machine", "isa": "avx512"}
)";
  const auto curves = measured_curves(rows, "rows.json", "avx512");
  ASSERT_EQ(curves.size(), 5u);
  EXPECT_EQ(curve(curves, "experts", "fp8").points, (Points{{1, 2.0}, {4, 0.5}}));
  EXPECT_EQ(curve(curves, "experts", "int4").points, (Points{{1, 0.7}}));
  EXPECT_EQ(curve(curves, "dense", "bf16").points, (Points{{8, 0.7}}));
  EXPECT_EQ(curve(curves, "absorbed", "").points, (Points{{512, 0.4}}));
  EXPECT_EQ(curve(curves, "restored", "").points, (Points{{4096, 0.6}}));
}

// An incomplete or edited report must not give a curve without points.
TEST(MeasuredCurves, RowsWithoutTokensAreRefused) {
  const std::string row =
      R"({"bench": "experts", "config": "r1", "format": "fp8", "isa": "avx512", "routing": "uniform", "rows_per_expert": 0, "unhidden_ratio": 0.5})";
  EXPECT_TRUE(says(error_of([&] { measured_curves(row, "rows.json", "avx512"); }), "no row of"));
}

TEST(MeasuredCurves, AReportOfThisRepository) {
  const std::string path =
      TANDEM_SOURCE_DIR "/docs/measurements/amd-epyc-family-25-model-17/report.json";
  const auto curves = measured_curves(read_text_file(path, 1 << 22), path, "avx512");
  for (const char* format : {"fp8", "bf16", "int8", "int4"})
    EXPECT_GE(curve(curves, "experts", format).points.size(), 5u) << format;
  EXPECT_EQ(curve(curves, "dense", "fp8").points.size(), 4u);
  EXPECT_EQ(curve(curves, "absorbed", "").points.size(), 3u);
  EXPECT_EQ(curve(curves, "restored", "").points.size(), 3u);
}

TEST(MeasuredCurves, RefusesWhatIsNoMeasurement) {
  const auto refusal = [](const char* text) {
    return error_of([&] { measured_curves(text, "rows.json", "avx512"); });
  };
  EXPECT_TRUE(says(refusal(""), "rows.json: no row of `tandem bench experts`"));
  EXPECT_TRUE(says(refusal("[]"), "and avx512"));
  EXPECT_TRUE(says(refusal(R"({"bench": "experts", "isa": "avx2"})"), "and avx512"));
  EXPECT_TRUE(says(refusal("{"), "broken JSON"));
  EXPECT_TRUE(says(refusal("[[1]"), "broken JSON"));
  EXPECT_TRUE(says(refusal(R"({"bench": "mlp", "isa": "avx512", "format": "fp8"})"),
                   "rows.json: no row of `tandem bench`"));
  EXPECT_TRUE(says(refusal(R"({"isa": 5})"), "rows.json: no row of `tandem bench`"));
}

}  // namespace
}  // namespace tandem
