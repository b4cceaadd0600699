// Arbitrary bytes as rows of `tandem bench` give an Error of one line, or curves that the planner
// can use.
#include <cstdint>
#include <string_view>

#include "bench/measured_curves.h"
#include "core/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    for (const EfficiencyCurve& curve : measured_curves(text, "rows.json", "avx512")) {
      double before = 0;
      check(!curve.points.empty(), "a point");
      for (const auto& [x, ratio] : curve.points) {
        check(x > before, "ascending");
        check(ratio > 0 && ratio <= kMaxEfficiency, "a ratio");
        before = x;
      }
    }
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
  }
  return 0;
}
