// The server on its port, with clients that send nothing, half of a request or too much, that do
// not read, and that are too many. The model is loading all the time.
// clang-format off
#include "http/http_server.h"  // works around a defect of Boost 1.74 (http/awaitable.h)
// clang-format on

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <thread>

#include "server/service.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Client {
 public:
  explicit Client(int port) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    EXPECT_EQ(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Client() { close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // False when the server has closed the connection.
  bool send(const std::string& bytes) const {
    return ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // All that arrives until the server closes, or until there is nothing for so many seconds.
  std::string receive(double seconds = 20) {
    std::string all;
    char bytes[4096];
    pollfd readable = {socket_, POLLIN, 0};
    while (poll(&readable, 1, static_cast<int>(seconds * 1e3)) == 1) {
      const ssize_t n = recv(socket_, bytes, sizeof(bytes), 0);
      closed_ = n <= 0;
      if (closed_) break;
      all.append(bytes, static_cast<size_t>(n));
    }
    return all;
  }
  bool is_closed() const { return closed_; }

 private:
  const int socket_;
  bool closed_ = false;
};

class Serving {
 public:
  explicit Serving(HttpServer::Options options) : server_(service_, with_any_port(options)) {
    thread_ = std::thread([this] { server_.run(); });
  }
  ~Serving() {
    if (!thread_.joinable()) return;
    server_.stop();
    thread_.join();
  }
  int port() const { return port_; }
  void shut_down() {
    server_.shut_down();
    thread_.join();
  }

 private:
  static HttpServer::Options with_any_port(HttpServer::Options options) {
    options.port = 0;
    return options;
  }

  const Tokenizer tokenizer_ =
      Tokenizer::from_directory(std::string(TANDEM_SOURCE_DIR) + "/models/tiny-r1");
  Service service_{tokenizer_, nullptr, {}, {.model_id = "m", .root = "r", .api_key = {}}};
  HttpServer server_;
  const int port_ = server_.port();
  std::thread thread_;
};

const std::string kAsks = "GET /version HTTP/1.1\r\nHost: x\r\n\r\n";

// A second for the header section, two for the body and one for a write; the clients wait together.
TEST(HttpServer, SlowClientsAreNotWaitedFor) {
  Serving server({.limits = {.idle = std::chrono::seconds(1),
                             .body = std::chrono::seconds(2),
                             .write = std::chrono::seconds(1)}});
  struct Case {
    const char* what;
    std::string sent;
    double least, most;
    size_t n_answers;
  };
  const Case cases[] = {
      {"nothing", "", 0.9, 1.8, 0},
      {"half of a header section", kAsks.substr(0, 20), 0.9, 1.8, 0},
      {"another request never comes", kAsks, 0.9, 1.8, 1},
      {"half of a body", "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", 1.9,
       2.8, 0},
      {"a refused request and no end of it", "GET / HTTP/1.1\r\n\r\n", 0, 0.8, 1}};
  std::vector<std::jthread> clients;
  for (const Case& c : cases)
    clients.emplace_back([&] {
      const auto start = Clock::now();
      Client client(server.port());
      client.send(c.sent);
      const std::string all = client.receive();
      const double seconds = since(start);
      EXPECT_TRUE(client.is_closed()) << c.what;
      EXPECT_TRUE(seconds >= c.least && seconds <= c.most) << c.what << ": " << seconds;
      size_t n = 0;
      for (size_t at = 0; (at = all.find("HTTP/1.1 ", at)) != all.npos; ++at) ++n;
      EXPECT_EQ(n, c.n_answers) << c.what << ": " << all;
    });
  // Who reads nothing does not get everything: 60 MB do not fit the sockets.
  clients.emplace_back([&] {
    Client client(server.port());
    std::string many;
    for (int i = 0; i < 2000; ++i) many += "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n";
    client.send(many);
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    EXPECT_LT(client.receive().size(), 50u << 20);
    EXPECT_TRUE(client.is_closed());
  });
  // What a refused client goes on sending is dropped for two seconds.
  clients.emplace_back([&] {
    Client client(server.port());
    client.send("GET / HTTP/1.1\r\n\r\n");
    const auto start = Clock::now();
    while (since(start) < 20 && client.send("x"))
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_GT(since(start), 1.8);
    EXPECT_LT(since(start), 2.8);
  });
}

TEST(HttpServer, ConnectionsHaveALimit) {
  Serving server({.limits = {}, .max_connections = 2});
  auto first = std::make_unique<Client>(server.port());
  Client second(server.port());
  for (Client* client : {first.get(), &second}) {
    client->send(kAsks);
    EXPECT_TRUE(client->receive(0.2).starts_with("HTTP/1.1 200 OK\r\n"));
    EXPECT_FALSE(client->is_closed());
  }
  Client third(server.port());
  third.send(kAsks);
  EXPECT_EQ(third.receive(), "");
  EXPECT_TRUE(third.is_closed());
  first.reset();
  for (int i = 0; i < 100; ++i) {  // the server hears of it soon
    Client next(server.port());
    next.send(kAsks);
    if (next.receive(0.2).starts_with("HTTP/1.1 200 OK\r\n")) return;
  }
  ADD_FAILURE() << "there is no room again";
}

// What has been received of all bodies has a limit, without the first 64 KiB of each. One that ends
// leaves room for the next.
TEST(HttpServer, BodiesOfAllClientsHaveALimit) {
  Serving server({.limits = {.total_body_bytes = 400'000}});
  const std::string head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n";
  const std::string most = head + std::string(300'000, ' '), rest(100'000, ' ');
  const auto is_refused = [](const std::string& answer) {
    return answer.find("too many large requests at once") != answer.npos;
  };
  std::array<Client, 2> clients = {Client(server.port()), Client(server.port())};
  for (const Client& client : clients) client.send(most);
  std::array<std::string, 2> answers;
  const auto start = Clock::now();
  while (since(start) < 20 && !is_refused(answers[0]) && !is_refused(answers[1]))
    for (int i : {0, 1}) answers[i] += clients[i].receive(0.05);
  ASSERT_NE(is_refused(answers[0]), is_refused(answers[1])) << answers[0] << answers[1];
  const int other = is_refused(answers[0]) ? 1 : 0;
  EXPECT_EQ(answers[other], "");
  EXPECT_TRUE(answers[1 - other].starts_with("HTTP/1.1 503 "));
  clients[other].send(rest);
  const std::string complete = clients[other].receive(1);
  EXPECT_TRUE(complete.starts_with("HTTP/1.1 400 ")) << complete;
  Client next(server.port());
  next.send(most + rest);
  EXPECT_TRUE(next.receive(1).starts_with("HTTP/1.1 400 "));
}

// Idle connections are closed at once, and no new ones are accepted.
TEST(HttpServer, ShutsDownWithoutRequests) {
  Serving server({.limits = {}, .drain = std::chrono::seconds(60)});
  Client idle(server.port());
  idle.send(kAsks);
  EXPECT_TRUE(idle.receive(0.2).starts_with("HTTP/1.1 200 OK\r\n"));
  const auto start = Clock::now();
  server.shut_down();
  EXPECT_LT(since(start), 5);
  EXPECT_EQ(idle.receive(), "");
  EXPECT_TRUE(idle.is_closed());
}

TEST(HttpServer, SaysWhyItCannotListen) {
  const Tokenizer tokenizer =
      Tokenizer::from_directory(std::string(TANDEM_SOURCE_DIR) + "/models/tiny-r1");
  Service service(tokenizer, nullptr, {}, {.model_id = "m", .root = "r", .api_key = {}});
  const Serving server({.limits = {}});
  const std::string port = std::to_string(server.port());
  EXPECT_EQ(error_of([&] { HttpServer(service, {.port = server.port(), .limits = {}}); }),
            "cannot listen on 127.0.0.1:" + port +
                ": Address already in use; choose another --port or --host");
  EXPECT_TRUE(
      says(error_of([&] { HttpServer(service, {.host = "256.1.1.1", .port = 0, .limits = {}}); }),
           "cannot listen on 256.1.1.1: "));
}

}  // namespace
}  // namespace tandem
