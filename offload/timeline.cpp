#include "offload/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTracks[] = {"GPU", "hand-off", "CPU", "network"};

struct Sum {
  double seconds = 0;
  int n = 0;
};
using Sums = std::map<std::string, Sum>;  // by name of the part

Json mean_parts(const Timeline& timeline, const std::vector<PlannedLayer>& planned);
Json beside_planned(const Sums& sums, const LayerTime& planned);

}  // namespace

void Timeline::start_step(int n_tokens) {
  if (n_steps_ < kMaxSteps) n_tokens_[n_steps_++] = n_tokens;
}

void Timeline::add(Span span) {
  span.step = n_steps_ - 1;
  if (std::ssize(spans_) < kMaxSpans && n_steps_ < kMaxSteps) spans_.push_back(span);
}

double Timeline::first_begin() const {
  double first = std::numeric_limits<double>::infinity();
  for (const Span& s : spans_) first = std::min(first, s.begin);
  return first;
}

std::string timeline_json(const Timeline& timeline, const std::vector<PlannedLayer>& planned) {
  return timeline_json(timeline, planned,
                       trace_events(timeline, {.start = timeline.first_begin()}));
}

std::string timeline_json(const Timeline& timeline, const std::vector<PlannedLayer>& planned,
                          const std::string& events) {
  return fmt::format(R"({{"traceEvents":[{}],"mean_seconds_a_layer":{}}})", events,
                     mean_parts(timeline, planned).dump());
}

std::string trace_events(const Timeline& timeline, const TraceProcess& process) {
  std::string text;
  const auto add = [&](const Json& event) { text += (text.empty() ? "" : ",") + event.dump(); };
  const auto add_name = [&](const char* what, int track, const std::string& name) {
    add({{"name", what},
         {"ph", "M"},
         {"pid", process.number},
         {"tid", track},
         {"args", {{"name", name}}}});
  };
  if (!process.name.empty()) add_name("process_name", 0, process.name);
  for (int track = 0; track < static_cast<int>(std::size(kTracks)); ++track)
    add_name("thread_name", track, kTracks[track]);
  for (const Timeline::Span& s : timeline.spans())
    add({{"name", s.name},
         {"ph", "X"},
         {"pid", process.number},
         {"tid", static_cast<int>(s.track)},
         {"ts", (s.begin - process.start) * 1e6},
         {"dur", (s.end - s.begin) * 1e6},
         {"args",
          {{"layer", s.layer},
           {"half", s.half},
           {"step", s.step},
           {"tokens", timeline.n_tokens(s.step)}}}});
  return text;
}

namespace {

Json mean_parts(const Timeline& timeline, const std::vector<PlannedLayer>& planned) {
  std::map<int, Sums> sums;  // by the step's number of tokens
  for (const Timeline::Span& s : timeline.spans()) {
    Sum& sum = sums[timeline.n_tokens(s.step)]
                   [std::string(kTracks[static_cast<int>(s.track)]) + ": " + s.name];
    sum.seconds += s.end - s.begin;
    if (s.half == 0) ++sum.n;  // layers
  }
  Json means = Json::array();
  for (const auto& [n_tokens, parts] : sums) {
    Json of_parts = Json::object();
    for (const auto& [name, sum] : parts) of_parts[name] = sum.seconds / sum.n;
    means.push_back({{"tokens", n_tokens}, {"parts", of_parts}});
    for (const PlannedLayer& layer : planned)
      if (layer.tokens == n_tokens)
        means.back()["beside_planned"] = beside_planned(parts, layer.time);
  }
  return means;
}

// Parts of the planner and the spans that measure them.
struct Beside {
  const char* name;
  std::vector<Part> planned;
  std::vector<const char*> measured;
};
const std::vector<Beside>& comparisons() {
  static const std::vector<Beside> all = {
      {"attention_and_router",
       {Part::kProjections, Part::kAttention, Part::kRouter},
       {"GPU: attention and router"}},
      {"shared", {Part::kShared}, {"GPU: shared expert"}},
      {"gpu_experts", {Part::kGpuExperts}, {"GPU: experts, gate and up", "GPU: experts, down"}},
      {"cpu_experts", {Part::kCpuExperts}, {"CPU: experts"}},
      {"streaming", {Part::kStreaming}, {"GPU: experts of host memory"}},
      {"exchange",
       {Part::kExchange},
       {"GPU: hands down", "hand-off: down", "hand-off: up", "GPU: adds the CPU's sum"}}};
  return all;
}

Sum sum_of(const Sums& sums, const char* part) {
  const auto it = sums.find(part);
  return it == sums.end() ? Sum() : it->second;
}

// The GPU's spans follow one another and together form the layer. Null if no whole layer was
// recorded.
Json beside_planned(const Sums& sums, const LayerTime& planned) {
  const int n_layers = sum_of(sums, "GPU: shared expert").n;
  if (n_layers == 0) return nullptr;
  const auto pair_of = [&](double measured, double predicted) {
    return Json{{"measured", measured / n_layers}, {"predicted", predicted}};
  };
  Json pairs = Json::object();
  for (const Beside& b : comparisons()) {
    double measured = 0, predicted = 0;
    for (const char* span : b.measured) measured += sum_of(sums, span).seconds;
    for (const Part part : b.planned) predicted += planned[part];
    if (measured > 0 || predicted > 0) pairs[b.name] = pair_of(measured, predicted);
  }
  double layer = 0;
  for (const auto& [name, sum] : sums)
    if (name.starts_with("GPU: ")) layer += sum.seconds;
  pairs["layer"] = pair_of(layer, planned.seconds);
  return pairs;
}

}  // namespace
}  // namespace tandem
