// Finds stop strings in text that arrives in pieces: holds back what may be the beginning of one.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

// Length of the longest suffix of `text` that is a prefix of `mark`, 0 to mark.size() - 1. The mark
// is not empty.
size_t partial_match_length(std::string_view text, std::string_view mark);

class StopText {
 public:
  // Empty strings are ignored.
  explicit StopText(std::vector<std::string> stops, bool include_stop = false);

  // Returns the text that can no longer belong to a stop string, and nothing after a stop string.
  // The stop string itself is returned only with include_stop.
  std::string push(std::string_view text);
  // The text that was held back, for when the text ends without a stop string.
  std::string flush();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  bool include_stop_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace tandem
