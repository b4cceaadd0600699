// Finds tool calls in the text of an answer, in the syntax of DeepSeek-V3 and R1, V3.1 or Kimi-K2.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct ToolCall {
  std::string id;  // as written by Kimi-K2; empty for other models
  std::string name, arguments;
};

// The marks around calls; in most models each is one added token.
struct ToolCallMarkers {
  std::string_view section_begin, section_end, call_begin, call_end, separator;
};
extern const ToolCallMarkers kDeepSeekMarkers, kKimiMarkers;

class ToolCallParser {
 public:
  struct Parts {
    std::string content;          // text outside of calls
    std::vector<ToolCall> calls;  // complete calls
  };

  // Parses the next piece of the text.
  Parts push(std::string_view text);
  // Ends the text and returns what was held back. A truncated call is returned with its incomplete
  // arguments, or omitted if its name is incomplete.
  Parts flush();

 private:
  static ToolCall read_call(const ToolCallMarkers& markers, std::string_view text);
  static std::optional<ToolCall> read_truncated_call(const ToolCallMarkers& markers,
                                                     std::string_view text);
  void find_section(Parts& parts);
  bool parse_call(Parts& parts);

  const ToolCallMarkers* markers_ = nullptr;  // markers of the open section; null: none
  std::string buffer_;
};

}  // namespace tandem
