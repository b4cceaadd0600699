#include "engine/stop_text.h"

#include <algorithm>
#include <utility>

namespace tandem {

StopText::StopText(std::vector<std::string> stops, bool keeps_stop)
    : stops_(std::move(stops)), keeps_stop_(keeps_stop) {
  std::erase_if(stops_, [](const std::string& s) { return s.empty(); });
}

std::string StopText::push(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  size_t end = std::string::npos, kept = 0;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at >= end) continue;
    end = at;
    kept = keeps_stop_ ? stop.size() : 0;
  }
  if (end != std::string::npos) {
    stopped_ = true;
    held_.resize(end + kept);
    return std::exchange(held_, {});
  }
  size_t keep = 0;  // the longest end of held_ that begins a stop string
  for (const std::string& stop : stops_)
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n)
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopText::flush() { return std::exchange(held_, {}); }

}  // namespace tandem
