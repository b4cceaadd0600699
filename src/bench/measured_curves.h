// How close the kernels come to the roofline, taken from rows that `tandem bench` printed: what the
// planner then uses for this machine.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/machine.h"

namespace tandem {

// `text`: rows of `tandem bench experts|mlp|attention --json`, a line each or as one JSON array
// (report.json of tools/bench_report.sh); other rows are passed over, and of several models' rows
// of one kind the first model's count. Throws Error when it is broken or has none that `isa`
// measured.
std::vector<EfficiencyCurve> measured_curves(std::string_view text, const std::string& source,
                                             const std::string& isa);

}  // namespace tandem
