#include "server/tool_calls.h"

#include <algorithm>
#include <utility>

#include "engine/stop_text.h"

namespace tandem {

// V3 and R1: function SEPARATOR NAME, a line ```json, the arguments, a line ```.
// V3.1: NAME SEPARATOR arguments.
const ToolMarks kDeepSeekTools = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                                  "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"};
// functions.NAME:NUMBER SEPARATOR arguments.
const ToolMarks kKimiTools = {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
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
  held_ += text;
  find_section(parts);
  while (marks_ && take_call(parts)) find_section(parts);
  return parts;
}

ToolCallParser::Parts ToolCallParser::flush() {
  const ToolMarks* marks = std::exchange(marks_, nullptr);
  const std::string rest = std::exchange(held_, {});
  if (!marks) return {.content = rest, .calls = {}};
  const size_t begin = rest.find(marks->call_begin);
  if (begin == rest.npos)
    return {.content =
                trimmed(rest.substr(0, rest.size() - partial_mark_length(rest, marks->call_begin))),
            .calls = {}};
  Parts parts;
  const std::string_view call = std::string_view(rest).substr(begin + marks->call_begin.size());
  if (auto cut = truncated_call_in(*marks, call)) parts.calls.push_back(*std::move(cut));
  return parts;
}

// Moves the text before a section to `parts`, except what may be the beginning of a section's mark.
void ToolCallParser::find_section(Parts& parts) {
  if (marks_) return;
  size_t end = held_.size();
  for (const ToolMarks* marks : {&kDeepSeekTools, &kKimiTools}) {
    const size_t at = held_.find(marks->section_begin);
    if (at < end) {
      end = at;
      marks_ = marks;
    }
  }
  if (!marks_)
    end -= std::max(partial_mark_length(held_, kDeepSeekTools.section_begin),
                    partial_mark_length(held_, kKimiTools.section_begin));
  parts.content += held_.substr(0, end);
  held_.erase(0, end + (marks_ ? marks_->section_begin.size() : 0));
}

// Consumes the next call or the end of the section. False if neither is complete.
bool ToolCallParser::take_call(Parts& parts) {
  const size_t call_end = held_.find(marks_->call_end);
  const size_t section_end = held_.find(marks_->section_end);
  if (section_end < call_end) {
    held_.erase(0, section_end + marks_->section_end.size());
    marks_ = nullptr;
    return true;
  }
  if (call_end == std::string::npos) return false;
  const size_t begin = held_.find(marks_->call_begin);
  if (begin < call_end) {
    const size_t first = begin + marks_->call_begin.size();
    parts.calls.push_back(
        call_in(*marks_, std::string_view(held_).substr(first, call_end - first)));
  }
  held_.erase(0, call_end + marks_->call_end.size());
  return true;
}

ToolCall ToolCallParser::call_in(const ToolMarks& marks, std::string_view text) {
  constexpr std::string_view kFence = "```", kJson = "json";
  const size_t separator = std::min(text.find(marks.separator), text.size());
  const std::string head = trimmed(text.substr(0, separator));
  std::string_view rest = text.substr(std::min(text.size(), separator + marks.separator.size()));
  if (&marks == &kKimiTools) {
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
// call_in() can parse the call.
std::optional<ToolCall> ToolCallParser::truncated_call_in(const ToolMarks& marks,
                                                          std::string_view text) {
  constexpr std::string_view kOpening = "```json\n", kClosing = "\n```";
  text.remove_suffix(partial_mark_length(text, marks.call_end));
  const size_t separator = text.find(marks.separator);
  if (separator == text.npos) return {};
  if (&marks == &kKimiTools || trimmed(text.substr(0, separator)) != "function")
    return call_in(marks, text);
  const size_t line = text.find('\n', separator);
  if (line == text.npos) return {};
  const std::string_view fenced = text.substr(line + 1);
  std::string whole(text);
  if (kOpening.starts_with(fenced)) whole += kOpening.substr(fenced.size());
  whole.erase(whole.size() - partial_mark_length(whole, kClosing));
  if (!whole.ends_with(kClosing)) whole += kClosing;
  return call_in(marks, whole);
}

}  // namespace tandem
