#include "scheduling/stop_text.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

// The output when `text` arrives in pieces of n bytes.
std::string run(const std::vector<std::string>& stops, std::string_view text, size_t n) {
  StopText stop(stops);
  std::string out;
  for (size_t at = 0; at < text.size(); at += n) out += stop.push(text.substr(at, n));
  return stop.stopped() ? out : out + stop.flush();
}

TEST(StopText, EndsBeforeTheStopStringHoweverItArrives) {
  for (size_t n = 1; n < 12; ++n) {
    EXPECT_EQ(run({"END"}, "the END of it", n), "the ");
    EXPECT_EQ(run({"\n\n", "of"}, "the END of it\n\n", n), "the END ");
    EXPECT_EQ(run({"ababc"}, "abababc", n), "ab") << "a false start inside the stop string";
    EXPECT_EQ(run({"xyz", ""}, "the END", n), "the END");
    EXPECT_EQ(run({"END!"}, "the END", n), "the END");
    EXPECT_EQ(run({}, "text", n), "text");
  }
}

TEST(StopText, TheEarliestOfSeveralWins) { EXPECT_EQ(run({"c", "ab"}, "xxabc", 5), "xx"); }

TEST(StopText, HoldsBackOnlyWhatMayBeABeginning) {
  StopText stop({"stop"});
  EXPECT_EQ(stop.push("a st"), "a ");
  EXPECT_EQ(stop.push("ay"), "stay");
  EXPECT_EQ(stop.push("stop"), "");
  EXPECT_TRUE(stop.stopped());
  EXPECT_EQ(stop.push("more"), "");
}

TEST(StopText, TheStopStringIsKeptWhereAskedFor) {
  StopText stop({"ab", "abc", "xyz"}, true);
  EXPECT_EQ(stop.push("1a"), "1");
  EXPECT_EQ(stop.push("bcd"), "ab");
  EXPECT_TRUE(stop.stopped());
}

}  // namespace
}  // namespace tandem
