// A server for tests of clients: it keeps the bytes of every request and answers with whatever
// bytes a test writes.
#pragma once
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace tandem::test {

class FakeServer {
 public:
  // A connection whose request was read.
  struct Client {
    int socket;
    size_t index;  // of the request, in order of arrival
    std::string request;

    void send(std::string_view bytes) const {
      while (!bytes.empty()) {
        const ssize_t n = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (n <= 0) return;  // the client has closed the connection
        bytes.remove_prefix(static_cast<size_t>(n));
      }
    }
    void wait_until_closed() const {
      char byte;
      while (recv(socket, &byte, 1, 0) > 0) continue;
    }
  };
  using Answer = std::function<void(const Client&)>;

  // `answer` is called on a thread for each connection, which is closed when it returns.
  explicit FakeServer(Answer answer) : answer_(std::move(answer)) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener_, any, size) != 0 || listen(listener_, 64) != 0 ||
        getsockname(listener_, any, &size) != 0)
      ADD_FAILURE() << "no port to listen at";
    port_ = std::to_string(ntohs(address.sin_port));
    acceptor_ = std::jthread([this] { accept_clients(); });
  }
  ~FakeServer() {
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    clients_.clear();
    close(listener_);
  }
  FakeServer(const FakeServer&) = delete;
  FakeServer& operator=(const FakeServer&) = delete;

  const std::string& port() const { return port_; }
  // In order of arrival.
  std::vector<std::string> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void accept_clients() {
    for (int client; (client = accept(listener_, nullptr, nullptr)) >= 0;)
      clients_.emplace_back([this, client] { serve(client); });
  }

  void serve(int client) {
    std::string request;
    size_t wanted = std::string::npos;
    for (std::vector<char> piece(1 << 16); request.size() < wanted;) {
      const ssize_t n = recv(client, piece.data(), piece.size(), 0);
      if (n <= 0) break;
      request.append(piece.data(), static_cast<size_t>(n));
      const size_t end = request.find("\r\n\r\n");
      if (end == std::string::npos) continue;
      const std::string name = "Content-Length: ";
      wanted = end + 4 + std::stoul(request.substr(request.find(name) + name.size()));
    }
    size_t index;
    {
      const std::lock_guard lock(mutex_);
      index = requests_.size();
      requests_.push_back(request);
    }
    answer_({client, index, request});
    shutdown(client, SHUT_WR);
    close(client);
  }

  const Answer answer_;
  int listener_ = -1;
  std::string port_;
  std::mutex mutex_;
  std::vector<std::string> requests_;
  std::vector<std::jthread> clients_;
  std::jthread acceptor_;
};

// An answer whose length is said in advance.
inline std::string whole(const std::string& status, const std::string& body) {
  return "HTTP/1.1 " + status + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
         body;
}

inline constexpr std::string_view kStreamHead =
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
// A piece of a stream; an empty one ends it.
inline std::string chunk(std::string_view text) {
  std::string size;
  for (size_t n = text.size(); n > 0 || size.empty(); n /= 16)
    size.insert(size.begin(), "0123456789abcdef"[n % 16]);
  return size + "\r\n" + std::string(text) + "\r\n";
}

}  // namespace tandem::test
