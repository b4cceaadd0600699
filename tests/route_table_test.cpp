// What a router knows of prompts, and how it reads requests and lists of backends.
#include <gtest/gtest.h>

#include "core/check.h"
#include "router/backend_list.h"
#include "router/forwarding.h"
#include "router/request_summary.h"
#include "tests/error_of.h"
#include "text/prefix_table.h"

namespace tandem {
namespace {

using Map = std::map<int, size_t>;

std::string text(size_t n, char c = 'x') { return std::string(n, c); }

TEST(PrefixHashes, AreOfWholeBlocks) {
  EXPECT_TRUE(prefix_hashes(text(kPrefixBlockBytes - 1)).empty());
  EXPECT_EQ(prefix_hashes(text(kPrefixBlockBytes)).size(), 1u);
  EXPECT_EQ(prefix_hashes(text(10 * kPrefixBlockBytes - 1)).size(), 9u);
  EXPECT_EQ(prefix_hashes(text(10'000 * kPrefixBlockBytes)).size(), kMaxPrefixBlocks);
}

// A hash stands for everything before it, not for its block alone.
TEST(PrefixHashes, AreOfTheWholeBeginning) {
  const std::string a = text(256, 'a'), b = text(256, 'b');
  const auto ab = prefix_hashes(a + b), ba = prefix_hashes(b + a), aa = prefix_hashes(a + a);
  EXPECT_EQ(ab[0], aa[0]);
  EXPECT_NE(ab[1], aa[1]);
  EXPECT_NE(ba[1], aa[1]);
  EXPECT_NE(aa[0], aa[1]);
}

TEST(PrefixTable, FindsTheLongestBeginningOfEachBackend) {
  PrefixTable table;
  EXPECT_EQ(table.find({1, 2, 3}), Map());
  table.add({1, 2, 3}, 7);
  table.add({1, 2, 4}, 8);
  EXPECT_EQ(table.find({1, 2, 3, 5}), (Map{{7, 3}, {8, 2}}));
  EXPECT_EQ(table.find({1, 9}), (Map{{7, 1}, {8, 1}}));
  EXPECT_EQ(table.find({2, 3}), (Map{{7, 2}, {8, 1}}));
  EXPECT_EQ(table.find({9, 2}), Map());
  table.forget(7);
  EXPECT_EQ(table.find({1, 2, 3, 5}), (Map{{8, 2}}));
  EXPECT_EQ(table.size(), 3u);  // block 3 was the other backend's alone
  table.forget(8);
  EXPECT_EQ(table.size(), 0u);
}

TEST(PrefixTable, ABlockIsOfFewBackends) {
  PrefixTable table;
  for (int backend = 0; backend < 6; ++backend) table.add({1}, backend);
  EXPECT_EQ(table.find({1}), (Map{{2, 1}, {3, 1}, {4, 1}, {5, 1}}));
  table.add({1}, 2);  // used again
  table.add({1}, 6);
  EXPECT_EQ(table.find({1}), (Map{{2, 1}, {4, 1}, {5, 1}, {6, 1}}));
}

TEST(PrefixTable, ForgetsWhatWasUsedLeastRecently) {
  PrefixTable table(4);
  table.add({1, 2}, 0);
  table.add({3, 4}, 0);
  table.add({1, 2}, 0);
  table.add({5}, 0);
  EXPECT_EQ(table.size(), 4u);
  EXPECT_EQ(table.find({1, 2}), (Map{{0, 2}}));
  EXPECT_EQ(table.find({3, 4}), (Map{{0, 1}}));  // its end is forgotten first
  table.add({6, 7, 8, 9, 10, 11}, 1);
  EXPECT_EQ(table.size(), 4u);
  EXPECT_EQ(table.find({6, 7, 8, 9, 10, 11}), (Map{{1, 4}}));
}

TEST(RequestSummary, HasTheModelAndThePrompt) {
  const std::string x = text(600);
  const auto chat = summary_of(R"({"model": "m", "messages": [{"role": "user", "content": ")" + x +
                               R"("}], "seed": 1})");
  EXPECT_EQ(chat.model, "m");
  EXPECT_EQ(chat.prefixes.size(), 2u);
  // Other fields and later messages change nothing of the beginning.
  const auto longer = summary_of(R"({"seed": 2, "messages": [{"role": "user", "content": ")" + x +
                                 R"("}, {"role": "assistant", "content": "yes"}]})");
  EXPECT_EQ(longer.model, "");
  EXPECT_EQ(longer.prefixes, chat.prefixes);
  EXPECT_GT(longer.prompt_bytes, chat.prompt_bytes);
  const auto tools =
      summary_of(R"({"tools": ["t"], "messages": [{"role": "user", "content": ")" + x + R"("}]})");
  EXPECT_NE(tools.prefixes, chat.prefixes);
  EXPECT_EQ(summary_of(R"({"prompt": ")" + x + R"("})").prefixes.size(), 2u);
  EXPECT_EQ(summary_of(R"({"prompt": [")" + x + R"("]})").prefixes,
            summary_of(R"({"prompt": ")" + x + R"("})").prefixes);
  EXPECT_EQ(summary_of(R"({"text": ")" + x + R"("})").prefixes.size(), 2u);
}

TEST(RequestSummary, OfWhatIsNoRequestIsEmpty) {
  for (const char* body : {"", "{", "[]", "1", "null", R"({"model": 5, "messages": null})",
                           R"({"a": 1, "a": 2, "model": "m"})"}) {
    const RequestSummary summary = summary_of(body);
    EXPECT_EQ(summary.model, "") << body;
    EXPECT_TRUE(summary.prefixes.empty()) << body;
  }
}

std::string addresses(const std::vector<HttpAddress>& list) {
  std::string all;
  for (const HttpAddress& a : list) all += a.url() + " ";
  return all;
}

TEST(BackendList, IsReadFromAnOptionAndAFile) {
  EXPECT_EQ(addresses(parse_backends("http://127.0.0.1:8001, HTTP://Name.example/,http://[::1]:5")),
            "http://127.0.0.1:8001 http://name.example:80 http://[::1]:5 ");
  EXPECT_EQ(addresses(parse_backends("https://a:1,HTTPS://B/")), "https://a:1 https://b:443 ");
  EXPECT_EQ(addresses(parse_backends_file("# all\n\n http://a:1 # first\r\nhttp://b:2", "f")),
            "http://a:1 http://b:2 ");
  EXPECT_EQ(addresses(parse_backends_file("", "f")), "");
}

TEST(BackendList, SaysWhatIsWrong) {
  const auto error = [](const std::string& list) {
    return error_of([&] { parse_backends(list); });
  };
  EXPECT_EQ(error("127.0.0.1:8001"),
            "--backends \"127.0.0.1:8001\": must be http://HOST:PORT or https://HOST:PORT");
  EXPECT_EQ(error("http://a:1,"), "--backends \"\": must be http://HOST:PORT or https://HOST:PORT");
  EXPECT_EQ(error("ftp://a:1"),
            "--backends \"ftp://a:1\": must be http://HOST:PORT or https://HOST:PORT");
  EXPECT_EQ(error("http://a:1,https://a:1"), "--backends https://a:1: is there twice");
  EXPECT_EQ(error("http://a:1,http://A:1"), "--backends http://a:1: is there twice");
  for (const char* bad : {"http://", "http://:80", "http://a/path", "http://u@a", "http://a b",
                          "http://[::1", "http://[::1]x", "http://::1", "http://[]:1"})
    EXPECT_TRUE(says(error(bad), std::string(bad) + "\"")) << bad << ": " << error(bad);
  for (const char* bad : {"http://a:0", "http://a:65536", "http://a:", "http://a:1x", "http://a:-1",
                          "http://a:99999999999", "http://a:80/v1"})
    EXPECT_TRUE(says(error(bad), "port must be between 1 and 65535")) << error(bad);
  EXPECT_EQ(error_of([] { parse_backends_file("http://a:1\n\nb\n", "list.txt"); }),
            "list.txt line 3: \"b\": must be http://HOST:PORT or https://HOST:PORT");
}

TEST(ForwardedFields, LeaveOutWhatConcernsOneConnection) {
  EXPECT_EQ(forwarded_fields({{"Host", "x"},
                              {"Accept", "a"},
                              {"CONNECTION", "close, X-Mine"},
                              {"x-mine", "1"},
                              {"X-Other", "2"},
                              {"Content-Length", "5"},
                              {"Transfer-Encoding", "chunked"},
                              {"Authorization", "k"},
                              {"Expect", "100-continue"},
                              {"Accept", "b"}},
                             {"authorization"}),
            "Accept: a\r\nX-Other: 2\r\nAccept: b\r\n");
}

}  // namespace
}  // namespace tandem
