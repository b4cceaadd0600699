#include "offload/plan/planned_layers.h"

#include "io/json.h"
#include "io/json_fields.h"

namespace tandem {

std::vector<PlannedLayer> planned_layers(std::string_view placement, const std::string& source) {
  constexpr double kTokenLimit = 1e9, kSecondsLimit = 1e6;
  const nlohmann::json tree = parse_json(placement, source);
  std::vector<PlannedLayer> layers;
  JsonFields fields(tree, source);
  if (!fields.has("predicted")) return layers;
  JsonFields predicted = fields.object("predicted");
  for (const char* phase : {"decode", "prefill"}) {
    JsonFields step = predicted.object(phase);
    if (!step.has("moe_layer")) continue;
    PlannedLayer planned = {step.positive("tokens", kTokenLimit), {}};
    JsonFields layer = step.object("moe_layer");
    planned.time.seconds = layer.positive("seconds", kSecondsLimit);
    JsonFields parts = layer.object("parts");
    for (int i = 0; i < kNumParts; ++i)
      planned.time.parts[i] = parts.positive(name_of(static_cast<Part>(i)), kSecondsLimit, 0);
    parts.refuse_others();
    layers.push_back(planned);
  }
  return layers;
}

}  // namespace tandem
