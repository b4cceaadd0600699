// Records when GPU and CPU worked on what in hybrid steps, or CPU and network of a rank that
// exchanges rows, in memory of fixed size, and writes it as JSON for a Chrome trace viewer
// (chrome://tracing, ui.perfetto.dev). ranks/rank_timelines.h joins those of several ranks.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "offload/plan/placement_json.h"

namespace tandem {

class Timeline {
 public:
  enum class Track : uint8_t { kGpu, kHandOff, kCpu, kNetwork };
  struct Span {
    const char* name;  // name of the part, a string literal
    Track track;
    int layer;
    int half;           // number of the micro-batch
    double begin, end;  // seconds on one clock
    int step = 0;
  };

  Timeline() { spans_.reserve(kMaxSpans); }

  void start_step(int n_tokens);
  // Adds a span to the step started last. Spans beyond the capacity are dropped.
  void add(Span span);

  // The least begin of all spans; infinity if there is none.
  double first_begin() const;
  const std::vector<Span>& spans() const { return spans_; }
  int n_tokens(int step) const { return n_tokens_[step]; }
  int n_steps() const { return n_steps_; }

 private:
  static constexpr int kMaxSpans = 1 << 18, kMaxSteps = 1 << 14;
  std::vector<Span> spans_;
  std::vector<int> n_tokens_ = std::vector<int>(kMaxSteps);
  int n_steps_ = 0;
};

// A process of the trace.
struct TraceProcess {
  int number = 0;
  std::string name = {};  // empty: it has none
  double start = 0;       // the time of the timeline's clock that is 0 in the trace
};
// The spans as trace events with commas between them.
std::string trace_events(const Timeline& timeline, const TraceProcess& process);

// The whole text: `events`, and for each number of tokens per step the mean seconds of every part
// of a layer and, if a layer with as many tokens was planned, its planned parts for comparison.
std::string timeline_json(const Timeline& timeline, const std::vector<PlannedLayer>& planned,
                          const std::string& events);
// The same with the events of this process alone.
std::string timeline_json(const Timeline& timeline, const std::vector<PlannedLayer>& planned = {});

}  // namespace tandem
