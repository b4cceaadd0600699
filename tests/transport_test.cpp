// Messages on this machine, over TCP and by UCX: bodies of many parts, connections that end,
// strangers, and the proof of a shared secret.
#include "transport/transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <cstring>
#include <numeric>
#include <thread>

#include "core/clock.h"
#include "tests/error_of.h"
#include "tests/kept_messages.h"
#include "tests/temp_directory.h"
#include "tests/ucx_of_tests.h"
#include "transport/secret.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

using std::chrono::milliseconds;

enum class Kind { kTcp, kUcx };

struct Pair {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<MessageListener> listener = transport->listen("127.0.0.1:0");
  std::unique_ptr<MessageWaiter> waiter = transport->waiter();
  std::unique_ptr<MessageConnection> client, server;
  Kept to_client, to_server;

  explicit Pair(Kind kind, bool uses_path = true)
      : transport(kind == Kind::kTcp ? tcp_transport() : ucx_transport(UcxReach::kThisHost)) {
    client = transport->connect(address(), milliseconds(5000));
    while (!(server = listener->accept())) waiter->wait({}, listener.get(), milliseconds(1000));
    if (kind == Kind::kTcp || !uses_path) return;
    client->find_path(server->path_address());
    server->find_path(client->path_address());
    client->use_path();
    server->use_path();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(listener->port()); }
  // Until so many messages have come to the server and the client.
  void exchange(size_t n_to_server, size_t n_to_client) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (to_server.messages.size() < n_to_server || to_client.messages.size() < n_to_client) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      client->progress(to_client);
      server->progress(to_server);
      MessageConnection* const both[] = {client.get(), server.get()};
      waiter->wait(both, nullptr, milliseconds(10));
    }
  }
};

class Transports : public testing::TestWithParam<Kind> {
  void SetUp() override {
    if (GetParam() == Kind::kTcp) return;
    const std::string why_not =
        TANDEM_SANITIZED ? "sanitizers do not know what UCX does" : why_no_ucx();
    if (!why_not.empty()) GTEST_SKIP() << why_not;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Transports, testing::Values(Kind::kTcp, Kind::kUcx),
                         [](const auto& test) { return test.param == Kind::kTcp ? "Tcp" : "Ucx"; });
class Ucx : public Transports {};
INSTANTIATE_TEST_SUITE_P(, Ucx, testing::Values(Kind::kUcx), [](const auto&) { return "Ucx"; });

TEST_P(Transports, CarriesMessagesOfManyPartsInOrder) {
  Pair pair(GetParam());
  const std::vector<std::byte> all = pattern(300'000, 7);
  std::vector<MessageBytes> parts;  // 300 of them, and some are empty
  for (size_t i = 0; i < 300; ++i) {
    parts.push_back(std::span(all).subspan(i * 1000, 1000));
    if (i % 50 == 0) parts.push_back({});
  }
  const std::vector<std::byte> large = pattern(9'000'001, 3);
  const MessageBytes large_part = large;
  pair.client->send(MessageKind::kRequest, 5, parts);
  pair.client->send(MessageKind::kBeat, 0, {});
  pair.client->send(MessageKind::kRequest, 6, std::span(&large_part, 1));
  EXPECT_FALSE(pair.client->is_sent()) << "the sockets do not hold 9 MB";
  pair.server->send(MessageKind::kAnswer, 1ULL << 40, std::span(&large_part, 1));
  pair.exchange(3, 1);
  EXPECT_TRUE(pair.client->is_sent());
  const auto& got = pair.to_server.messages;
  EXPECT_EQ(got[0].header.kind, MessageKind::kRequest);
  EXPECT_EQ(got[0].header.number, 5u);
  EXPECT_EQ(got[0].body, all);
  EXPECT_EQ(got[1].header.kind, MessageKind::kBeat);
  EXPECT_TRUE(got[1].body.empty());
  EXPECT_EQ(got[2].header.number, 6u);
  EXPECT_EQ(got[2].body, large);
  EXPECT_EQ(pair.to_client.messages[0].header.number, 1ULL << 40);
  EXPECT_EQ(pair.to_client.messages[0].body, large);
}

// All lengths by which a transport divides them or copies them in another way.
TEST_P(Transports, CarriesMessagesOfEveryLength) {
  Pair pair(GetParam());
  std::vector<std::vector<std::byte>> bodies;
  for (const size_t n : {0, 1, 63, 64, 100, 1000, 8000, 9000, 57'000, 58'000, 61'000, 62'000,
                         65'536, 70'000, 300'000, 3'000'000})
    bodies.push_back(pattern(n, static_cast<int>(n)));
  for (size_t i = 0; i < bodies.size(); ++i) {
    const MessageBytes whole = bodies[i];
    const MessageBytes halves[] = {whole.first(whole.size() / 2), whole.subspan(whole.size() / 2)};
    pair.client->send(MessageKind::kRequest, 2 * i, std::span(&whole, 1));
    pair.client->send(MessageKind::kRequest, 2 * i + 1, halves);
  }
  pair.exchange(2 * bodies.size(), 0);
  for (size_t i = 0; i < 2 * bodies.size(); ++i) {
    EXPECT_EQ(pair.to_server.messages[i].header.number, i);
    EXPECT_TRUE(pair.to_server.messages[i].body == bodies[i / 2]) << bodies[i / 2].size();
  }
  // One after another, so that they use the memory of those before.
  pair.to_server.messages.clear();
  for (size_t i = 0; i < bodies.size(); ++i) {
    const MessageBytes whole = bodies[bodies.size() - 1 - i];
    const MessageBytes halves[] = {whole.first(whole.size() / 3), whole.subspan(whole.size() / 3)};
    pair.client->send(MessageKind::kRequest, i, halves);
    pair.exchange(i + 1, 0);
    EXPECT_TRUE(std::equal(whole.begin(), whole.end(), pair.to_server.messages[i].body.begin(),
                           pair.to_server.messages[i].body.end()))
        << whole.size();
  }
}

TEST_P(Transports, LeavesMessagesThatAreNotRead) {
  Pair pair(GetParam());
  pair.server->set_reading(false);
  pair.client->send(MessageKind::kBeat, 0, {});
  MessageConnection* const server = pair.server.get();
  for (int i = 0; i < 5; ++i) {
    pair.waiter->wait(std::span(&server, 1), nullptr, milliseconds(5));
    pair.server->progress(pair.to_server);
  }
  EXPECT_TRUE(pair.to_server.messages.empty());
  pair.server->set_reading(true);
  pair.exchange(1, 0);
}

// A header that was read with the body before it, of a message without a body, is all that is left.
TEST_P(Transports, GoOnWithWhatWasReadBeforeAPause) {
  Pair pair(GetParam());
  pair.to_server.pauses = pair.server.get();
  pair.to_server.n_before_pause = 1;
  const std::vector<std::byte> body = pattern(100, 1);
  const MessageBytes part = body;
  pair.client->send(MessageKind::kRequest, 1, std::span(&part, 1));
  pair.client->send(MessageKind::kBeat, 2, {});
  pair.exchange(1, 0);
  for (int i = 0; i < 5; ++i) {
    pair.client->progress(pair.to_client);
    pair.server->progress(pair.to_server);
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(pair.to_server.messages.size(), 1u);
  pair.server->set_reading(true);
  MessageConnection* const server = pair.server.get();
  const Stopwatch watch;
  pair.waiter->wait(std::span(&server, 1), nullptr, std::chrono::seconds(10));
  EXPECT_LT(watch.seconds(), 5);
  pair.exchange(2, 0);
  EXPECT_EQ(pair.to_server.messages[1].header.number, 2u);
}

// Copies into and out of sockets take up to three times as long otherwise.
TEST(Transport, BeginsBodiesAtMultiplesOf64Bytes) {
  const auto transport = tcp_transport();
  const auto listener = transport->listen("127.0.0.1:0");
  boost::asio::io_context io;
  boost::asio::ip::tcp::socket raw(io);
  raw.connect(boost::asio::ip::tcp::endpoint(boost::asio::ip::make_address("127.0.0.1"),
                                             static_cast<uint16_t>(listener->port())));
  std::unique_ptr<MessageConnection> connection;
  while (!connection) connection = listener->accept();
  size_t n_bytes = 0;
  for (const size_t n : {3, 64, 0, 130}) {
    const std::vector<std::byte> body = pattern(n, 1);
    const MessageBytes part = body;
    connection->send(MessageKind::kAnswer, n, std::span(&part, 1));
    ASSERT_TRUE(connection->is_sent());
    std::vector<std::byte> got(64 + (n + 63) / 64 * 64);
    boost::asio::read(raw, boost::asio::buffer(got));
    n_bytes += got.size();
    EXPECT_TRUE(std::equal(body.begin(), body.end(), got.begin() + 64)) << n;
    EXPECT_EQ(std::count(got.begin() + 64 + static_cast<int64_t>(n), got.end(), std::byte{0}),
              std::ssize(got) - 64 - static_cast<int64_t>(n));
  }
  EXPECT_EQ(n_bytes, 64u * 9);
  EXPECT_EQ(raw.available(), 0u);
}

// Both sides wait, and each message is noticed although nothing follows it.
TEST_P(Transports, SleepsUntilAMessageComes) {
  Pair pair(GetParam());
  std::atomic<bool> ends{false};
  std::thread other([&] {
    const auto waiter = pair.transport->waiter();
    MessageConnection* const server = pair.server.get();
    size_t n_answered = 0;
    while (!ends) {
      waiter->wait(std::span(&server, 1), nullptr, milliseconds(500));
      pair.server->progress(pair.to_server);
      for (; n_answered < pair.to_server.messages.size(); ++n_answered) {
        const MessageBytes body = pair.to_server.messages[n_answered].body;
        pair.server->send(MessageKind::kAnswer, n_answered, std::span(&body, 1));
        while (pair.server->progress(pair.to_server), !pair.server->is_sent())
          waiter->wait(std::span(&server, 1), nullptr, milliseconds(500));
      }
    }
  });
  MessageConnection* const client = pair.client.get();
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i < 200; ++i) {
    const std::vector<std::byte> body = pattern(i % 4 == 0 ? 200'000 : 20'000, static_cast<int>(i));
    const MessageBytes part = body;
    pair.client->send(MessageKind::kRequest, i, std::span(&part, 1));
    while (pair.client->progress(pair.to_client), pair.to_client.messages.size() <= i)
      pair.waiter->wait(std::span(&client, 1), nullptr, milliseconds(500));
    ASSERT_TRUE(pair.to_client.messages[i].body == body) << i;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  int n_waits = 0;
  for (const auto until = std::chrono::steady_clock::now() + milliseconds(200);
       std::chrono::steady_clock::now() < until; ++n_waits) {
    pair.waiter->wait(std::span(&client, 1), nullptr, milliseconds(50));
    pair.client->progress(pair.to_client);
  }
  EXPECT_LT(n_waits, 50) << "in 200 ms in which nothing comes";
  ends = true;
  pair.client->send(MessageKind::kBeat, 0, {});
  other.join();
}

TEST_P(Transports, ReportsTheEndOfAConnection) {
  Pair pair(GetParam());
  pair.server.reset();
  MessageConnection* const client = pair.client.get();
  pair.waiter->wait(std::span(&client, 1), nullptr, milliseconds(5000));
  EXPECT_TRUE(says(error_of([&] { pair.client->progress(pair.to_client); }), "connection closed"));
  const std::string address = pair.address();
  pair.listener.reset();
  EXPECT_TRUE(says(error_of([&] { pair.transport->connect(address, milliseconds(1000)); }),
                   "Connection refused"));
}

// What was sent before the end is taken, but nothing that is still in memory of the other side.
TEST_P(Ucx, TakesNothingFromAPeerThatHasEnded) {
  const std::vector<std::byte> large = pattern(1'000'000, 1);
  const MessageBytes part = large;
  for (const bool is_large : {false, true}) {
    Pair pair(GetParam());
    pair.client->send(MessageKind::kBeat, 0, {});
    pair.exchange(1, 0);
    pair.client->send(MessageKind::kGoodbye, 0, {});
    if (is_large) pair.client->send(MessageKind::kRequest, 1, std::span(&part, 1));
    EXPECT_NE(pair.client->is_sent(), is_large);
    pair.client.reset();
    const std::string error = error_of([&] {
      for (int i = 0; i < 100; ++i) pair.server->progress(pair.to_server);
    });
    EXPECT_TRUE(says(error, "connection closed")) << error;
    ASSERT_EQ(pair.to_server.messages.size(), 2u);
    EXPECT_EQ(pair.to_server.messages[1].header.kind, MessageKind::kGoodbye);
  }
}

// Bodies that are under way in both directions, and that were not read.
TEST_P(Ucx, EndsAtAnyTime) {
  const std::vector<std::byte> large = pattern(9'000'000, 1);
  const MessageBytes all = large, parts[] = {all.first(20'000), all.first(100), all};
  for (int i = 0; i < 4; ++i) {
    Pair pair(GetParam());
    pair.server->set_reading(i % 2 == 0);
    for (const MessageBytes& part : parts) {
      pair.client->send(MessageKind::kRequest, 1, std::span(&part, 1));
      pair.server->send(MessageKind::kAnswer, 1, std::span(&part, 1));
    }
    pair.client->send(MessageKind::kRequest, 1, parts);
    if (i > 1) pair.server->progress(pair.to_server);
    (i % 2 == 0 ? pair.client : pair.server).reset();
  }
}

TEST_P(Ucx, ListensToItsPeerAlone) {
  Pair pair(GetParam(), false);
  const MessageBytes address = pair.server->path_address();
  std::vector<std::byte> guessed(address.begin(), address.end());
  guessed[31] ^= std::byte{1};
  pair.client->find_path(guessed);
  pair.server->find_path(pair.client->path_address());
  pair.client->use_path();
  pair.server->use_path();
  pair.client->send(MessageKind::kBeat, 0, {});
  for (int i = 0; i < 5; ++i) {
    pair.client->progress(pair.to_client);
    EXPECT_FALSE(pair.server->progress(pair.to_server));
    std::this_thread::sleep_for(milliseconds(2));
  }
  EXPECT_TRUE(pair.to_server.messages.empty());
}

TEST_P(Ucx, RefusesWhatNoPeerSends) {
  Pair pair(GetParam(), false);
  const MessageBytes address = pair.server->path_address();
  EXPECT_TRUE(says(error_of([&] { pair.client->find_path(address.first(32)); }), "malformed"));
  EXPECT_TRUE(says(error_of([&] { pair.client->find_path({}); }), "malformed"));
  Pair flooded(GetParam());
  flooded.server->set_reading(false);
  const std::string error = error_of([&] {
    for (int i = 0; i < 5000; ++i) {
      flooded.client->send(MessageKind::kBeat, 0, {});
      flooded.server->progress(flooded.to_server);
      flooded.client->progress(flooded.to_client);
    }
  });
  EXPECT_TRUE(says(error, "more messages than a peer has under way")) << error;
  const auto socket = tcp_transport()->connect(pair.address(), milliseconds(1000));
  EXPECT_TRUE(socket->path_address().empty());
  EXPECT_TRUE(says(error_of([&] { socket->find_path(address); }), "only sockets"));
}

TEST(Transport, WakesAWaiter) {
  const auto transport = tcp_transport();
  const auto waiter = transport->waiter();
  std::thread other([&] { waiter->wake(); });
  const auto begin = std::chrono::steady_clock::now();
  waiter->wait({}, nullptr, std::chrono::seconds(30));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  other.join();
}

// A listener whose queue is full answers no further connection, as a host that is lost.
TEST(Transport, DoesNotWaitForAHostThatDoesNotAnswer) {
  namespace asio = boost::asio;
  asio::io_context io;
  asio::ip::tcp::acceptor acceptor(io, asio::ip::tcp::v4());
  acceptor.bind({asio::ip::make_address("127.0.0.1"), 0});
  acceptor.listen(0);
  const std::string address = "127.0.0.1:" + std::to_string(acceptor.local_endpoint().port());
  const auto transport = tcp_transport();
  std::vector<std::unique_ptr<MessageConnection>> waiting;
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = error_of([&] {
    for (int i = 0; i < 4; ++i) waiting.push_back(transport->connect(address, milliseconds(300)));
  });
  EXPECT_TRUE(says(error, "timed out")) << error;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(Transport, RefusesAddresses) {
  const auto transport = tcp_transport();
  for (const char* address : {"", "host", ":9000", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:-1",
                              "127.0.0.1:65536", "127.0.0.1:123456"}) {
    EXPECT_NE(error_of([&] { transport->listen(address); }), "no error") << address;
    EXPECT_NE(error_of([&] { transport->connect(address, milliseconds(100)); }), "no error")
        << address;
  }
  const auto listener = transport->listen("127.0.0.1:0");
  EXPECT_TRUE(listener->is_local());
  const std::string taken = "127.0.0.1:" + std::to_string(listener->port());
  EXPECT_TRUE(says(error_of([&] { transport->listen(taken); }), "choose another address or port"));
  EXPECT_FALSE(transport->listen("0.0.0.0:0")->is_local());
}

// The bytes of a message as they are sent.
std::vector<std::byte> sent_bytes(MessageHeader header, const std::vector<std::byte>& body) {
  header.n_bytes = body.size();
  std::vector<std::byte> bytes(sizeof header);
  std::memcpy(bytes.data(), &header, sizeof header);
  bytes.insert(bytes.end(), body.begin(), body.end());
  bytes.resize(bytes.size() + padding_of(body.size()), std::byte{0xff});
  return bytes;
}

// Gives the reader at most `most` bytes at a time; returns how many it took before it refused.
size_t read_all(MessageReader& reader, MessageSink& sink, const std::vector<std::byte>& bytes,
                size_t most) {
  size_t at = 0;
  try {
    while (at < bytes.size()) {
      const size_t n =
          give(reader, std::span(bytes).subspan(at, std::min(most, bytes.size() - at)));
      EXPECT_GT(n, 0u);
      at += n;
      reader.received(n, sink);
      if (reader.has_header()) reader.begin(sink);
    }
  } catch (const ProtocolError&) {
  }
  return at;
}

TEST(MessageReader, DoesNotDependOnHowBytesArrive) {
  std::vector<std::byte> bytes;
  for (const size_t n : {0, 1, 100, 64, 0}) {
    const auto message =
        sent_bytes({.kind = MessageKind::kRequest, .number = n}, pattern(n, static_cast<int>(n)));
    bytes.insert(bytes.end(), message.begin(), message.end());
  }
  for (const size_t most : {1, 2, 7, 64, 1000}) {
    MessageReader reader;
    Kept kept;
    EXPECT_EQ(read_all(reader, kept, bytes, most), bytes.size());
    ASSERT_EQ(kept.messages.size(), 5u) << most;
    EXPECT_EQ(kept.messages[2].body, pattern(100, 100));
    EXPECT_EQ(kept.messages[3].body, pattern(64, 64));
    EXPECT_EQ(kept.messages[4].header.number, 0u);
  }
}

TEST(MessageReader, RefusesStrangersAtTheirFirstBytes) {
  const std::string http = "GET / HTTP/1.1\r\n\r\n and more than a header";
  std::vector<std::byte> bytes(http.size());
  std::memcpy(bytes.data(), http.data(), http.size());
  MessageReader reader;
  Kept kept;
  EXPECT_EQ(read_all(reader, kept, bytes, 1), 4u) << "the four bytes of the magic number";

  const auto behind = static_cast<uint16_t>(static_cast<uint16_t>(kLastMessageKind) + 1);
  for (const uint16_t kind : {uint16_t{0}, behind, uint16_t{65535}}) {
    MessageReader of_kind;
    EXPECT_EQ(read_all(of_kind, kept, sent_bytes({.kind = MessageKind{kind}}, pattern(10, 0)), 1),
              sizeof(MessageHeader));
  }
  MessageHeader marked = {.kind = MessageKind::kBeat};
  marked.zeros.back() = 1;
  MessageReader of_marked;
  EXPECT_EQ(read_all(of_marked, kept, sent_bytes(marked, {}), 1), sizeof(MessageHeader));
  MessageReader long_body;
  Kept few(8);
  EXPECT_EQ(read_all(long_body, few, sent_bytes({.kind = MessageKind::kHello}, pattern(9, 0)), 1),
            sizeof(MessageHeader))
      << "before a byte of the body";
  EXPECT_TRUE(kept.messages.empty() && few.messages.empty());
}

Nonce counted_from(int first) {
  Nonce nonce;
  for (size_t i = 0; i < nonce.size(); ++i) nonce[i] = static_cast<std::byte>(first + i);
  return nonce;
}

std::string hex(const Mac& mac) {
  std::string text;
  for (const std::byte b : mac) text += fmt::format("{:02x}", static_cast<int>(b));
  return text;
}

// Computed by Python's hmac module.
TEST(Secret, ProvesByHmacSha256) {
  const Secret secret("0123456789abcdef", false), encrypts("0123456789abcdef");
  const Nonce backbone = counted_from(0), worker = counted_from(100);
  EXPECT_EQ(hex(secret.proof(Prover::kBackbone, backbone, worker)),
            "45ed057b08fa0e48c025cf0de43b5ea64457b51510d3c5cf1869393c7f781ff0");
  const Mac mac = secret.proof(Prover::kWorker, backbone, worker);
  EXPECT_EQ(hex(mac), "d9925dc47a3b9a855c0f6e9315dc0da5e597a9cfa05bda017df5b8be46f97851");
  Mac other = mac;
  EXPECT_TRUE(is_same(mac, other));
  other[31] ^= std::byte{1};
  EXPECT_FALSE(is_same(mac, other));
  EXPECT_EQ(Secret().proof(Prover::kWorker, backbone, worker), Mac{});
  EXPECT_EQ(hex(encrypts.proof(Prover::kBackbone, backbone, worker)),
            "e8c962858ac11a98bad166c1ed19f0c80811f351f992bcc5789e1699ae1b98c4");
  EXPECT_EQ(hex(encrypts.proof(Prover::kWorker, backbone, worker)),
            "5e626182ea042ac4316234c6022ead97a33bf20ebcf94afe40e172402f242664");
  EXPECT_EQ(hex(encrypts.session_key(backbone, worker)),
            "b4283680066fa45785d4fc16b005de72f9357b91d9afad628fb19fd92363752a");
  EXPECT_NE(random_nonce(), random_nonce());
}

TEST(Secret, IsReadFromAFile) {
  const TempDirectory folder;
  const Nonce a = counted_from(1), b = counted_from(2);
  folder.write("key", "0123456789abcdef\n");
  EXPECT_EQ(Secret::from_file(folder.file("key")).proof(Prover::kWorker, a, b),
            Secret("0123456789abcdef").proof(Prover::kWorker, a, b));
  folder.write("short", "0123456789abcde\n");
  EXPECT_TRUE(says(error_of([&] { Secret::from_file(folder.file("short")); }), "16 to 4096 bytes"));
  folder.write("long", std::string(4097, 'x'));
  EXPECT_TRUE(says(error_of([&] { Secret::from_file(folder.file("long")); }), "16 to 4096 bytes"));
  EXPECT_TRUE(says(error_of([&] { Secret::from_file(folder.file("none")); }), "cannot be read"));
}

}  // namespace
}  // namespace tandem
