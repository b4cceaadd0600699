// Calls of tools in the text of an answer, as DeepSeek-V3 and R1, V3.1 and Kimi-K2 write them.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct ToolCall {
  std::string id;  // Kimi-K2's own; else empty
  std::string name, arguments;
};

class ToolCallParser {
 public:
  struct Parts {
    std::string content;          // text that belongs to no call
    std::vector<ToolCall> calls;  // that are complete
  };

  // Of a text that arrives in pieces.
  Parts push(std::string_view text);
  // When the text ends: what was held back. A call that was not finished is content.
  Parts flush();

 private:
  struct Marks;
  static const Marks kDeepSeek, kKimi;
  static ToolCall call_in(const Marks& marks, std::string_view text);
  void find_section(Parts& parts);
  bool take_call(Parts& parts);

  const Marks* marks_ = nullptr;  // of the section that the text is in; null: none
  std::string held_;
};

}  // namespace tandem
