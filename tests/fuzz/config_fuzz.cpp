// Arbitrary bytes as config.json give an Error or a configuration with valid sizes, frequencies and
// counts.
#include <cmath>
#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "model/kv_layout.h"
#include "model/parameters.h"
#include "model/rope.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  ModelConfig config;
  try {
    config = ModelConfig::from_json({reinterpret_cast<const char*>(data), size}, "config.json");
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
    return 0;
  }
  const ParameterCounts counts = count_parameters(config);
  check(counts.total > 0 && counts.activated > 0, "counts");
  check(counts.mtp_stored >= counts.mtp && kv_bytes_per_token(config) > 0, "counts");
  check(std::isfinite(softmax_scale(config)), "softmax scale");
  if (config.mla.rope_dim <= 1024)
    for (const float f : rope_frequencies(config.rope, config.mla.rope_dim))
      check(std::isfinite(f) && f >= 0, "frequency");
  return 0;
}
