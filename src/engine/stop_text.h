// Stop strings in text that arrives in pieces: holds back what may be the beginning of one.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

// Length of the longest end of `text` that `mark` begins with, 0 to mark.size() - 1. The mark is
// not empty.
size_t partial_match_length(std::string_view text, std::string_view mark);

class StopText {
 public:
  // Empty strings stop nothing.
  explicit StopText(std::vector<std::string> stops, bool include_stop = false);

  // Text that can no longer belong to a stop string. Nothing after one has been met; the stop
  // string is part of it only when it is kept.
  std::string push(std::string_view text);
  // What was held back, when the text ends without a stop string.
  std::string flush();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  bool include_stop_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace tandem
