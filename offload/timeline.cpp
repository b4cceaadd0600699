#include "offload/timeline.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTracks[] = {"GPU", "hand-off", "CPU"};

Json mean_parts(const Timeline& timeline);

}  // namespace

void Timeline::start_step(int n_tokens) {
  if (n_steps_ < kMaxSteps) n_tokens_[n_steps_++] = n_tokens;
}

void Timeline::add(const char* name, Track track, int layer, double begin, double end) {
  if (std::ssize(spans_) < kMaxSpans && n_steps_ < kMaxSteps)
    spans_.push_back({name, track, layer, n_steps_ - 1, begin, end});
}

std::string timeline_json(const Timeline& timeline) {
  double start = 0;
  for (const Timeline::Span& s : timeline.spans())
    start = start == 0 ? s.begin : std::min(start, s.begin);
  Json events = Json::array();
  for (int track = 0; track < 3; ++track)
    events.push_back({{"name", "thread_name"},
                      {"ph", "M"},
                      {"pid", 0},
                      {"tid", track},
                      {"args", {{"name", kTracks[track]}}}});
  for (const Timeline::Span& s : timeline.spans())
    events.push_back(
        {{"name", s.name},
         {"ph", "X"},
         {"pid", 0},
         {"tid", static_cast<int>(s.track)},
         {"ts", (s.begin - start) * 1e6},
         {"dur", (s.end - s.begin) * 1e6},
         {"args", {{"layer", s.layer}, {"step", s.step}, {"tokens", timeline.n_tokens(s.step)}}}});
  return Json{{"traceEvents", events}, {"mean_seconds_a_layer", mean_parts(timeline)}}.dump();
}

namespace {

Json mean_parts(const Timeline& timeline) {
  struct Sum {
    double seconds = 0;
    int n = 0;
  };
  std::map<int, std::map<std::string, Sum>> sums;  // by tokens of a step, by part
  for (const Timeline::Span& s : timeline.spans()) {
    Sum& sum = sums[timeline.n_tokens(s.step)]
                   [std::string(kTracks[static_cast<int>(s.track)]) + ": " + s.name];
    sum.seconds += s.end - s.begin;
    ++sum.n;
  }
  Json means = Json::array();
  for (const auto& [n_tokens, parts] : sums) {
    Json of_parts = Json::object();
    for (const auto& [name, sum] : parts) of_parts[name] = sum.seconds / sum.n;
    means.push_back({{"tokens", n_tokens}, {"parts", of_parts}});
  }
  return means;
}

}  // namespace
}  // namespace tandem
