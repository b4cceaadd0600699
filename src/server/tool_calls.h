// Calls of tools in the text of an answer, as DeepSeek-V3 and R1, V3.1 and Kimi-K2 write them.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct ToolCall {
  std::string id;  // Kimi-K2's own; else empty
  std::string name, arguments;
};

// The marks around calls, each often a token of its own.
struct ToolMarks {
  std::string_view section_begin, section_end, call_begin, call_end, separator;
};
extern const ToolMarks kDeepSeekTools, kKimiTools;

class ToolCallParser {
 public:
  struct Parts {
    std::string content;          // text that belongs to no call
    std::vector<ToolCall> calls;  // that are complete
  };

  // Of a text that arrives in pieces.
  Parts push(std::string_view text);
  // When the text ends: what was held back. A call that was cut has the arguments that there are;
  // one without a whole name is left out.
  Parts flush();

 private:
  static ToolCall call_in(const ToolMarks& marks, std::string_view text);
  static std::optional<ToolCall> cut_call_in(const ToolMarks& marks, std::string_view text);
  void find_section(Parts& parts);
  bool take_call(Parts& parts);

  const ToolMarks* marks_ = nullptr;  // of the section that the text is in; null: none
  std::string held_;
};

}  // namespace tandem
