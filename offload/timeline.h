// What GPU and CPU did when, in steps that they share: a record of fixed size, and its form for a
// Chrome trace viewer (chrome://tracing, ui.perfetto.dev).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "offload/plan/placement_json.h"

namespace tandem {

class Timeline {
 public:
  enum class Track : uint8_t { kGpu, kHandOff, kCpu };
  struct Span {
    const char* name;  // of a part: lives as long as the program
    Track track;
    int layer;
    int half;           // of a step in two, else 0
    double begin, end;  // seconds of one clock
    int step = 0;
  };

  Timeline() { spans_.reserve(kMaxSpans); }

  void start_step(int n_tokens);
  // Of the step that was started last. What is beyond the room is left out.
  void add(Span span);

  const std::vector<Span>& spans() const { return spans_; }
  int n_tokens(int step) const { return n_tokens_[step]; }
  int n_steps() const { return n_steps_; }

 private:
  static constexpr int kMaxSpans = 1 << 18, kMaxSteps = 1 << 14;
  std::vector<Span> spans_;
  std::vector<int> n_tokens_ = std::vector<int>(kMaxSteps);
  int n_steps_ = 0;
};

// Spans as trace events; beside them, of steps of as many tokens each, the mean seconds a layer of
// every part, and where a layer of as many tokens was planned, its parts beside the measured ones.
std::string timeline_json(const Timeline& timeline, const std::vector<PlannedLayer>& planned = {});

}  // namespace tandem
