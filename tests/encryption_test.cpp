// Connections that are encrypted: what they carry, and what becomes of one that somebody between
// the two sides reads, changes or takes over.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <cstring>
#include <mutex>
#include <thread>

#include "tests/error_of.h"
#include "tests/kept_messages.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using std::chrono::milliseconds;

SessionKey key_of(int seed) {
  SessionKey key;
  std::fill(key.begin(), key.end(), static_cast<std::byte>(seed));
  return key;
}

// Passes bytes on, both ways, and keeps those of the client.
class Relay {
 public:
  explicit Relay(int port) : acceptor_(io_, loopback(0)) {
    thread_ = std::thread([this, port] {
      acceptor_.accept(client_);
      server_.connect(loopback(port));
      std::thread back([this] { pass(server_, client_, false); });
      pass(client_, server_, true);
      back.join();
      // As the end of a process: shut down alone, a socket whose memory is full takes no more bytes
      // and refuses none, until TCP_USER_TIMEOUT.
      boost::system::error_code ignored;
      client_.close(ignored);
      server_.close(ignored);
    });
  }
  ~Relay() { thread_.join(); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  std::string address() const {
    return fmt::format("127.0.0.1:{}", acceptor_.local_endpoint().port());
  }
  std::vector<std::byte> passed() const {
    const std::lock_guard lock(mutex_);
    return passed_;
  }
  std::atomic<bool> flips = false;      // a bit of the next bytes of the client
  std::atomic<bool> withholds = false;  // their last byte, as long as this is so

 private:
  static tcp::endpoint loopback(int port) {
    return {asio::ip::make_address("127.0.0.1"), static_cast<uint16_t>(port)};
  }
  void pass(tcp::socket& from, tcp::socket& to, bool keeps) {
    std::vector<std::byte> bytes(1 << 16);
    boost::system::error_code error;
    while (!error) {
      const size_t n = from.read_some(asio::buffer(bytes), error);
      if (keeps) {
        const std::lock_guard lock(mutex_);
        passed_.insert(passed_.end(), bytes.begin(), bytes.begin() + static_cast<int64_t>(n));
        if (n > 0 && flips.exchange(false)) bytes[n / 2] ^= std::byte{1};
      }
      const size_t n_late = keeps && n > 0 && withholds ? 1 : 0;
      if (!error) asio::write(to, asio::buffer(bytes.data(), n - n_late), error);
      while (n_late > 0 && withholds) std::this_thread::sleep_for(milliseconds(1));
      if (!error && n_late > 0)
        asio::write(to, asio::buffer(bytes.data() + n - n_late, n_late), error);
    }
    boost::system::error_code ignored;
    to.shutdown(tcp::socket::shutdown_both, ignored);
  }

  asio::io_context io_;
  tcp::acceptor acceptor_;
  tcp::socket client_{io_}, server_{io_};
  mutable std::mutex mutex_;
  std::vector<std::byte> passed_;
  std::thread thread_;
};

struct RelayedPair {
  std::unique_ptr<Transport> transport = tcp_transport();
  std::unique_ptr<MessageListener> listener = transport->listen("127.0.0.1:0");
  std::unique_ptr<MessageWaiter> waiter = transport->waiter();
  std::unique_ptr<Relay> relay = std::make_unique<Relay>(listener->port());
  std::unique_ptr<MessageConnection> client =
      transport->connect(relay->address(), milliseconds(5000));
  std::unique_ptr<MessageConnection> server;
  Kept to_client, to_server;

  RelayedPair() {
    while (!(server = listener->accept())) waiter->wait({}, listener.get(), milliseconds(1000));
  }
  ~RelayedPair() {
    client.reset();
    server.reset();
  }
  void encrypt() {
    client->encrypt(key_of(1), true);
    server->encrypt(key_of(1), false);
  }
  // Encrypts, and sends one message to the server, as exchange() does.
  std::string first_encrypted();
  // Until so many messages have come to the server and the client, and all is sent. Returns what
  // went wrong; empty: nothing.
  std::string exchange(size_t n_to_server, size_t n_to_client) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    try {
      while (to_server.messages.size() < n_to_server || to_client.messages.size() < n_to_client ||
             !client->is_sent() || !server->is_sent()) {
        if (std::chrono::steady_clock::now() > end) return "nothing comes";
        client->progress(to_client);
        server->progress(to_server);
        MessageConnection* const both[] = {client.get(), server.get()};
        waiter->wait(both, nullptr, milliseconds(100));
      }
    } catch (const ConnectionError& error) {
      return error.what();
    }
    return {};
  }
};

void send(MessageConnection& connection, const std::vector<std::byte>& body) {
  const MessageBytes part = body;
  connection.send(MessageKind::kRequest, 1, std::span(&part, 1));
}

std::string RelayedPair::first_encrypted() {
  encrypt();
  send(*client, pattern(10, 0));
  return exchange(1, 0);
}

bool has(const std::vector<std::byte>& all, const std::vector<std::byte>& part) {
  return std::search(all.begin(), all.end(), part.begin(), part.end()) != all.end();
}

TEST(Encryption, CarriesMessagesOfAnySizeBothWays) {
  RelayedPair pair;
  pair.encrypt();
  const std::vector<std::byte> all = pattern(300'000, 7), large = pattern(9'000'001, 3);
  std::vector<MessageBytes> parts;
  for (size_t i = 0; i < 300; ++i) parts.push_back(std::span(all).subspan(i * 1000, 1000));
  pair.client->send(MessageKind::kRequest, 5, parts);
  pair.client->send(MessageKind::kBeat, 0, {});
  send(*pair.client, large);
  EXPECT_FALSE(pair.client->is_sent());
  send(*pair.server, large);
  ASSERT_EQ(pair.exchange(3, 1), "");
  EXPECT_EQ(pair.to_server.messages[0].body, all);
  EXPECT_TRUE(pair.to_server.messages[1].body.empty());
  EXPECT_EQ(pair.to_server.messages[2].body, large);
  EXPECT_EQ(pair.to_client.messages[0].body, large);
  for (int i = 0; i < 20; ++i) {
    send(*pair.client, pattern(i * 97, i));
    ASSERT_EQ(pair.exchange(4 + i, 1), "");
    EXPECT_EQ(pair.to_server.messages.back().body, pattern(i * 97, i));
  }
}

// TLS has read both from the socket when the first is taken.
TEST(Encryption, MessagesThatWereNotReadAreFoundWithoutNewBytes) {
  RelayedPair pair;
  ASSERT_EQ(pair.first_encrypted(), "");
  pair.to_server.pauses = pair.server.get();
  pair.to_server.n_before_pause = 2;
  send(*pair.client, pattern(20, 1));
  send(*pair.client, pattern(30, 2));
  std::this_thread::sleep_for(milliseconds(50));
  ASSERT_EQ(pair.exchange(2, 0), "");
  EXPECT_FALSE(pair.server->progress(pair.to_server));
  EXPECT_EQ(pair.to_server.messages.size(), 2u);
  pair.server->set_reading(true);
  MessageConnection* const server = pair.server.get();
  const auto begin = std::chrono::steady_clock::now();
  pair.waiter->wait(std::span(&server, 1), nullptr, std::chrono::seconds(30));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_TRUE(pair.server->progress(pair.to_server));
  EXPECT_EQ(pair.to_server.messages.back().body, pattern(30, 2));
}

// It has been read, and cannot be decrypted before the rest comes: nobody looks again and again.
TEST(Encryption, PartOfARecordIsWaitedFor) {
  RelayedPair pair;
  ASSERT_EQ(pair.first_encrypted(), "");
  pair.relay->withholds = true;
  send(*pair.client, pattern(1000, 1));
  MessageConnection* const server = pair.server.get();
  pair.waiter->wait(std::span(&server, 1), nullptr, milliseconds(5000));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(pair.server->progress(pair.to_server));
  const auto begin = std::chrono::steady_clock::now();
  pair.waiter->wait(std::span(&server, 1), nullptr, milliseconds(200));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(150));
  pair.relay->withholds = false;
  ASSERT_EQ(pair.exchange(2, 0), "");
  EXPECT_EQ(pair.to_server.messages[1].body, pattern(1000, 1));
}

TEST(Encryption, NobodyBetweenReadsWhatIsSaid) {
  RelayedPair pair;
  const std::vector<std::byte> open(500, std::byte{0x5a}), hidden(500, std::byte{0x5b});
  send(*pair.client, open);
  ASSERT_EQ(pair.exchange(1, 0), "");
  pair.encrypt();
  send(*pair.client, hidden);
  ASSERT_EQ(pair.exchange(2, 0), "");
  EXPECT_EQ(pair.to_server.messages[1].body, hidden);
  EXPECT_TRUE(has(pair.relay->passed(), open));
  EXPECT_FALSE(has(pair.relay->passed(), {hidden.begin(), hidden.begin() + 16}));
}

TEST(Encryption, OneChangedBitBreaksTheConnection) {
  for (const bool is_encrypted : {false, true}) {
    RelayedPair pair;
    if (is_encrypted) pair.encrypt();
    send(*pair.client, pattern(10, 0));
    ASSERT_EQ(pair.exchange(1, 0), "");
    pair.relay->flips = true;
    send(*pair.client, pattern(1000, 1));
    const std::string error = pair.exchange(2, 0);
    if (is_encrypted) {
      EXPECT_TRUE(says(error, "the encrypted connection is broken")) << error;
      EXPECT_EQ(pair.to_server.messages.size(), 1u);
    } else {
      EXPECT_EQ(error, "") << "nothing protects it";
      EXPECT_NE(pair.to_server.messages.back().body, pattern(1000, 1));
    }
  }
}

TEST(Encryption, OtherKeysAndOpenBytesAreRefused) {
  RelayedPair keys;
  keys.client->encrypt(key_of(1), true);
  keys.server->encrypt(key_of(2), false);
  send(*keys.client, pattern(10, 0));
  EXPECT_TRUE(says(keys.exchange(1, 0), "the encrypted connection is broken"));
  RelayedPair open;
  open.server->encrypt(key_of(1), false);
  send(*open.client, pattern(1000, 0));
  EXPECT_TRUE(says(open.exchange(1, 0), "the encrypted connection is broken"));
  EXPECT_TRUE(open.to_server.messages.empty());
}

TEST(Encryption, ReportsTheEndOfAConnection) {
  RelayedPair pair;
  ASSERT_EQ(pair.first_encrypted(), "");
  pair.client.reset();
  MessageConnection* const server = pair.server.get();
  pair.waiter->wait(std::span(&server, 1), nullptr, milliseconds(5000));
  EXPECT_TRUE(says(error_of([&] { pair.server->progress(pair.to_server); }), "connection closed"));
}

// What is written to a connection whose other side has gone ends no process.
TEST(Encryption, WritingToNobodyIsAnError) {
  RelayedPair pair;
  ASSERT_EQ(pair.first_encrypted(), "");
  pair.client.reset();
  const std::vector<std::byte> large = pattern(1 << 20, 0);
  const auto fails = [&] {
    for (int i = 0; i < 2000; ++i) {  // 10 s, for machines with other work
      if (i < 100) send(*pair.server, large);
      std::this_thread::sleep_for(milliseconds(5));
      pair.server->set_reading(false);
      pair.server->progress(pair.to_server);
    }
  };
  EXPECT_NE(error_of(fails), "no error");
}

}  // namespace
}  // namespace tandem
