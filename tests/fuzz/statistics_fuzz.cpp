// Arbitrary bytes as routing statistics give an Error of one line, or shares that the planner can
// use.
#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "offload/plan/workload.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  ModelConfig config;
  config.n_layers = 3;
  config.n_dense_layers = 1;
  config.router.n_experts = 4;
  config.router.n_active = 2;
  try {
    const RoutingStatistics routing(config, {reinterpret_cast<const char*>(data), size}, "s.json");
    for (int layer = 1; layer < 3; ++layer)
      for (int e = 0; e < 4; ++e) {
        check(routing.share(layer, e) >= 0 && routing.share(layer, e) <= 1, "a share");
        const double chance = routing.chance(layer, e, 8);
        check(chance >= 0 && chance <= 1, "a chance");
      }
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
  }
  return 0;
}
