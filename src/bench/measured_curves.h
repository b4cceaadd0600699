// Efficiency curves of the kernels, from rows of `tandem bench`, for the planner's predictions of
// this machine.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/machine.h"

namespace tandem {

// `text` has rows of `tandem bench experts|mlp|attention --json`, one per line or as one JSON array
// (report.json of tools/bench_report.sh). Other rows are skipped; of several models' rows of one
// kind only the first model's are used. Throws Error when it is malformed or has no row measured
// with `isa`.
std::vector<EfficiencyCurve> measured_curves(std::string_view text, const std::string& source,
                                             const std::string& isa);

}  // namespace tandem
