// Answers of servers that are not trusted: whole, in pieces, and broken in every way.
// clang-format off
#include "http/response_reader.h"  // works around a defect of Boost 1.74 (http/awaitable.h)
// clang-format on

#include <gtest/gtest.h>

#include <random>

#include "core/check.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

struct Read {
  int status = 0;
  std::string body;
  bool complete = false;
  size_t n_left = 0;
};

// Reads the bytes in pieces of `n`, then the end of the connection if `ends`.
Read read(std::string_view bytes, size_t n = 1 << 20, bool ends = false, bool head = false) {
  ResponseReader reader(head);
  Read result;
  std::string waiting;
  size_t given = 0;
  while (!reader.is_complete()) {
    const size_t used = reader.consume(waiting);
    waiting.erase(0, used);
    if (reader.has_head()) result.body += reader.take_body();
    if (used > 0) continue;
    if (given == bytes.size()) break;
    waiting += bytes.substr(given, n);
    given = std::min(given + n, bytes.size());
  }
  if (ends && !reader.is_complete()) reader.end_of_input();
  result.status = reader.status();
  result.complete = reader.is_complete();
  result.n_left = waiting.size() + bytes.size() - given;
  return result;
}

const std::string kOk = "HTTP/1.1 200 OK\r\n";

TEST(ResponseReader, ReadsEveryKindOfBody) {
  struct Case {
    std::string bytes, body;
    bool ends = false, head = false;
  };
  const Case cases[] = {
      {kOk + "Content-Length: 5\r\n\r\nhello", "hello"},
      {kOk + "Content-Length: 0\r\n\r\n", ""},
      {kOk + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nA: b\r\n\r\n",
       "abcde"},
      {kOk + "\r\nuntil the end", "until the end", true},
      {"HTTP/1.1 100 Continue\r\n\r\n" + kOk + "Content-Length: 1\r\n\r\nx", "x"},
      {kOk + "Content-Length: 5\r\n\r\n", "", false, true},
      {"HTTP/1.1 204 No Content\r\n\r\n", ""}};
  for (const Case& c : cases)
    for (size_t n = 1; n < c.bytes.size() + 1; ++n) {
      const Read r = read(c.bytes, n, c.ends, c.head);
      EXPECT_TRUE(r.complete) << c.bytes;
      EXPECT_EQ(r.body, c.body) << c.bytes << n;
      EXPECT_EQ(r.n_left, 0u);
    }
  EXPECT_EQ(read(kOk + "Content-Length: 1\r\n\r\nxyz").n_left, 2u);
}

TEST(ResponseReader, FieldsAndPersistence) {
  ResponseReader reader(false);
  const std::string bytes =
      kOk + "Content-Type: text/x\r\nContent-Length: 0\r\nA: 1\r\na: 2\r\n\r\n";
  while (reader.consume(bytes) == 0 && !reader.is_complete()) continue;
  EXPECT_EQ(reader.field("content-type"), "text/x");
  EXPECT_EQ(reader.field("A"), "1");
  EXPECT_EQ(reader.field("b"), "");
  EXPECT_EQ(reader.fields().size(), 4u);
  EXPECT_EQ(reader.length(), 0u);
  EXPECT_TRUE(reader.keeps_alive());
  ResponseReader closes(false);
  closes.consume(kOk + "Connection: close\r\nContent-Length: 0\r\n\r\n");
  EXPECT_TRUE(closes.is_complete());
  EXPECT_FALSE(closes.keeps_alive());
}

TEST(ResponseReader, RefusesWhatIsNotAResponse) {
  const std::string endless(ResponseReader::kMaxHeaderBytes, 'a');
  std::string informational;
  for (int i = 0; i <= ResponseReader::kMaxInformational; ++i)
    informational += "HTTP/1.1 103 Early Hints\r\n\r\n";
  for (const std::string& bytes : std::vector<std::string>{
           "SSH-2.0-OpenSSH\r\n\r\n", "HTTP/1.1 abc OK\r\n\r\n", std::string(100, '\0'),
           "HTTP/1.1 999 Odd\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n",
           kOk + "A: " + endless + "\r\n\r\n", kOk + "A" + endless, informational + kOk + "\r\n",
           kOk + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nx",
           kOk + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
           kOk + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
           kOk + "Content-Length: -1\r\n\r\n", kOk + "Content-Length: 9999999999999999\r\n\r\nx",
           kOk + "Content-Length: 99999999999999999999999\r\n\r\nx",
           kOk + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
           kOk + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nab",
           kOk + "Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n"})
    for (const size_t n : {size_t{1}, size_t{7}, size_t{1} << 20})
      EXPECT_NE(error_of([&] { read(bytes, n, true); }), "no error") << bytes.substr(0, 80);
}

TEST(ResponseReader, RefusesAnImpossibleLengthAtOnce) {
  EXPECT_EQ(error_of([] { read(kOk + "Content-Length: 9999999999999999\r\n\r\n"); }),
            "the answer's length is 9999999999999999 bytes");
}

TEST(ResponseReader, AnswersMayNotBreakOff) {
  for (const std::string& bytes :
       std::vector<std::string>{"", kOk, kOk + "Content-Length: 5\r\n\r\nhell",
                                kOk + "Transfer-Encoding: chunked\r\n\r\n5\r\nhell",
                                kOk + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"})
    EXPECT_TRUE(says(error_of([&] { read(bytes, 3, true); }), "breaks off")) << bytes;
}

// A length that is only announced takes no memory.
TEST(ResponseReader, ALargeLengthIsNotReserved) {
  ResponseReader reader(false);
  const std::string head = kOk + "Content-Length: 1000000000000\r\n\r\n";
  reader.consume(head);
  EXPECT_TRUE(reader.has_head());
  reader.consume("abc");
  EXPECT_EQ(reader.take_body(), "abc");
  EXPECT_FALSE(reader.is_complete());
}

// Answers with random changes are read or refused, in whatever pieces they arrive, alike.
TEST(ResponseReader, RandomChanges) {
  const std::string answers[] = {
      kOk +
          "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
          "c\r\ndata: hello\n\r\n1\r\n\n\r\n0\r\n\r\n",
      kOk + "Content-Length: 12\r\nConnection: keep-alive\r\n\r\n{\"a\": \"b\"}\r\n",
      "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 503 Busy\r\nRetry-After: 5\r\n\r\nlater"};
  const std::string alphabet = "\r\n :;,0123456789abcdefgHTP/.\x01\xff-";
  std::mt19937 random(1);
  int n_read = 0, n_refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = answers[random() % std::size(answers)];
    for (size_t n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % bytes.size();
      const char c = alphabet[random() % alphabet.size()];
      switch (random() % 3) {
        case 0:
          bytes[at] = c;
          break;
        case 1:
          bytes.insert(at, 1, c);
          break;
        default:
          bytes.erase(at, 1 + random() % 3);
          break;
      }
    }
    Read whole, pieces;
    const std::string error = error_of([&] { whole = read(bytes, bytes.size(), true); });
    const std::string again = error_of([&] { pieces = read(bytes, 1 + random() % 5, true); });
    EXPECT_EQ(error == "no error", again == "no error") << bytes;
    EXPECT_EQ(whole.body, pieces.body) << bytes;
    ++(error == "no error" ? n_read : n_refused);
  }
  EXPECT_GT(n_read, 2000);
  EXPECT_GT(n_refused, 2000);
}

}  // namespace
}  // namespace tandem
