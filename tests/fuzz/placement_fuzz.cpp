// Arbitrary bytes as a placement give an Error, or a placement that is refused or can be predicted.
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/check.h"
#include "io/machine_json.h"
#include "offload/plan/placement_json.h"
#include "offload/plan/predict.h"

namespace {

tandem::Machine two_gpus() {
  tandem::Machine m;
  m.name = "fuzz";
  m.isa = "avx512";
  m.nodes = {{8, int64_t{1} << 40, 1e11}, {8, int64_t{1} << 40, 1e11}};
  m.one_thread_read_bytes_per_second = 1e10;
  m.cross_read_bytes_per_second = 5e10;
  m.peak = {1e12, 1e12, 0, 1e12};
  m.gpus = {2, {"gpu", int64_t{1} << 40, 1e12, {1e14, 1e14, 1e14, 1e14}, 1e10, 1e10, 1e9, 1e9}};
  m.gpu_link = {1e11, 1e-6};
  return m;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  const ModelConfig config;  // R1's shapes
  const Machine machine = two_gpus();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    for (const PlannedLayer& layer : planned_layers(text, "placement.json"))
      check(std::isfinite(layer.time.seconds), "seconds of a layer");
  } catch (const Error&) {  // the placement may still be valid
  }
  try {
    const Placement p = placement_from_json(text, "placement.json");
    check_placement(config, machine, p);
    const Workload workload;
    const RoutingStatistics routing(config);
    const Prediction prediction = predict({config, machine, workload, routing}, p);
    check(std::isfinite(prediction.request_seconds) && prediction.request_seconds > 0, "seconds");
    placement_to_json(p);
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
  }
  return 0;
}
