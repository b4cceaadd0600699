#include "server/tool_calls.h"

#include <algorithm>
#include <utility>

#include "scheduling/stop_text.h"

namespace tandem {

// V3 and R1: function SEPARATOR NAME, a line ```json, the arguments, a line ```.
// V3.1: NAME SEPARATOR arguments.
const ToolCallMarkers kDeepSeekMarkers = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                                          "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                                          "<｜tool▁sep｜>"};
// functions.NAME:NUMBER SEPARATOR arguments.
const ToolCallMarkers kKimiMarkers = {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                                      "<|tool_call_begin|>", "<|tool_call_end|>",
                                      "<|tool_call_argument_begin|>"};

namespace {

std::string trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \n\t");
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(" \n\t") + 1 - begin));
}

}  // namespace

ToolCallParser::Parts ToolCallParser::push(std::string_view text) {
  Parts parts;
  buffer_ += text;
  find_section(parts);
  while (markers_ && parse_call(parts)) find_section(parts);
  return parts;
}

ToolCallParser::Parts ToolCallParser::flush() {
  const ToolCallMarkers* markers = std::exchange(markers_, nullptr);
  const std::string rest = std::exchange(buffer_, {});
  if (!markers) return {.content = rest, .calls = {}};
  const size_t begin = rest.find(markers->call_begin);
  if (begin == rest.npos)
    return {.content = trimmed(
                rest.substr(0, rest.size() - partial_match_length(rest, markers->call_begin))),
            .calls = {}};
  Parts parts;
  const std::string_view call = std::string_view(rest).substr(begin + markers->call_begin.size());
  if (auto cut = read_truncated_call(*markers, call)) parts.calls.push_back(*std::move(cut));
  return parts;
}

// Moves the text before a section to `parts`, except what may be the beginning of a section's
// marker.
void ToolCallParser::find_section(Parts& parts) {
  if (markers_) return;
  size_t end = buffer_.size();
  for (const ToolCallMarkers* markers : {&kDeepSeekMarkers, &kKimiMarkers}) {
    const size_t at = buffer_.find(markers->section_begin);
    if (at < end) {
      end = at;
      markers_ = markers;
    }
  }
  if (!markers_)
    end -= std::max(partial_match_length(buffer_, kDeepSeekMarkers.section_begin),
                    partial_match_length(buffer_, kKimiMarkers.section_begin));
  parts.content += buffer_.substr(0, end);
  buffer_.erase(0, end + (markers_ ? markers_->section_begin.size() : 0));
}

// Consumes the next call or the end of the section. False if neither is complete.
bool ToolCallParser::parse_call(Parts& parts) {
  const size_t call_end = buffer_.find(markers_->call_end);
  const size_t section_end = buffer_.find(markers_->section_end);
  if (section_end < call_end) {
    buffer_.erase(0, section_end + markers_->section_end.size());
    markers_ = nullptr;
    return true;
  }
  if (call_end == std::string::npos) return false;
  const size_t begin = buffer_.find(markers_->call_begin);
  if (begin < call_end) {
    const size_t first = begin + markers_->call_begin.size();
    parts.calls.push_back(
        read_call(*markers_, std::string_view(buffer_).substr(first, call_end - first)));
  }
  buffer_.erase(0, call_end + markers_->call_end.size());
  return true;
}

ToolCall ToolCallParser::read_call(const ToolCallMarkers& markers, std::string_view text) {
  constexpr std::string_view kFence = "```", kJson = "json";
  const size_t separator = std::min(text.find(markers.separator), text.size());
  const std::string head = trimmed(text.substr(0, separator));
  std::string_view rest = text.substr(std::min(text.size(), separator + markers.separator.size()));
  if (&markers == &kKimiMarkers) {
    const std::string_view prefix = "functions.";
    std::string name = head.substr(0, head.rfind(':'));
    if (name.compare(0, prefix.size(), prefix) == 0) name.erase(0, prefix.size());
    return {.id = head, .name = std::move(name), .arguments = trimmed(rest)};
  }
  const size_t fence = rest.find(kFence);
  const size_t line = rest.find('\n');
  if (head != "function" || fence == std::string_view::npos || line > fence)
    return {.id = {}, .name = head, .arguments = trimmed(rest)};
  std::string name = trimmed(rest.substr(0, line));
  rest.remove_prefix(fence + kFence.size());
  if (rest.substr(0, kJson.size()) == kJson) rest.remove_prefix(kJson.size());
  return {
      .id = {}, .name = std::move(name), .arguments = trimmed(rest.substr(0, rest.rfind(kFence)))};
}

// Parses a truncated call: for V3 and R1 it completes the code block around the arguments, so that
// read_call() can parse the call.
std::optional<ToolCall> ToolCallParser::read_truncated_call(const ToolCallMarkers& markers,
                                                            std::string_view text) {
  constexpr std::string_view kOpening = "```json\n", kClosing = "\n```";
  text.remove_suffix(partial_match_length(text, markers.call_end));
  const size_t separator = text.find(markers.separator);
  if (separator == text.npos) return {};
  if (&markers == &kKimiMarkers || trimmed(text.substr(0, separator)) != "function")
    return read_call(markers, text);
  const size_t line = text.find('\n', separator);
  if (line == text.npos) return {};
  const std::string_view fenced = text.substr(line + 1);
  std::string whole(text);
  if (kOpening.starts_with(fenced)) whole += kOpening.substr(fenced.size());
  whole.erase(whole.size() - partial_match_length(whole, kClosing));
  if (!whole.ends_with(kClosing)) whole += kClosing;
  return read_call(markers, whole);
}

}  // namespace tandem
