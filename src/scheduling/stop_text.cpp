#include "scheduling/stop_text.h"

#include <algorithm>
#include <utility>

namespace tandem {

size_t partial_match_length(std::string_view text, std::string_view mark) {
  for (size_t n = std::min(mark.size() - 1, text.size()); n > 0; --n)
    if (text.substr(text.size() - n) == mark.substr(0, n)) return n;
  return 0;
}

StopText::StopText(std::vector<std::string> stops, bool include_stop)
    : stops_(std::move(stops)), include_stop_(include_stop) {
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
    kept = include_stop_ ? stop.size() : 0;
  }
  if (end != std::string::npos) {
    stopped_ = true;
    held_.resize(end + kept);
    return std::exchange(held_, {});
  }
  size_t keep = 0;
  for (const std::string& stop : stops_) keep = std::max(keep, partial_match_length(held_, stop));
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopText::flush() { return std::exchange(held_, {}); }

}  // namespace tandem
