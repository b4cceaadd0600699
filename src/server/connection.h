// One client's connection: requests one after another, each answered whole or as a stream. All
// of it runs on the thread of the connections.
#pragma once
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <chrono>
#include <memory>
#include <optional>

#include "server/outbox.h"
#include "server/request_reader.h"
#include "server/service.h"
#include "server/tls.h"

namespace tandem {

struct HttpLimits {
  int64_t body_bytes = int64_t{16} << 20;
  // Bodies of all connections that are not parsed yet; the first 64 KiB of each do not count.
  int64_t all_bodies_bytes = int64_t{256} << 20;
  std::chrono::seconds idle{75};   // until a whole head is there
  std::chrono::seconds body{60};   // until a whole body is there
  std::chrono::seconds write{30};  // for a client that does not read
};

// What the connections of a server share. All but `workers` is for the thread of the connections.
struct ConnectionHub {
  using Executor = boost::asio::any_io_executor;
  Service& service;
  Executor workers;  // parse requests
  HttpLimits limits = {};
  boost::asio::ssl::context* tls = nullptr;  // null: plain HTTP
  int64_t bodies_bytes = 0;                  // of those that HttpLimits::all_bodies_bytes bounds
  // A large request may become hundreds of megabytes of JSON values, so those wait for each other
  // and leave a worker to the others.
  boost::asio::strand<Executor> large{workers};
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // The hub outlives the connection.
  Connection(ClientStream::Socket socket, ConnectionHub& hub);
  ~Connection() { release_body(); }

  // Requests are read and answered until the client goes or is at fault. Throws nothing: what is
  // thrown while one is answered ends this connection alone.
  boost::asio::awaitable<void> serve();
  // After the answer that is being given, at once if there is none.
  void close_soon();
  void close();

 private:
  template <class T>
  using Task = boost::asio::awaitable<T>;

  Task<void> converse();
  Task<std::optional<ReceivedRequest>> read();
  Task<std::optional<ReceivedRequest>> read_request();
  Task<void> begin_body(const RequestReader& reader);
  Task<bool> receive(size_t most_bytes);
  void hold_body(int64_t bytes);
  void release_body();
  Task<void> end();
  Task<void> answer(ReceivedRequest incoming);
  void ask(HttpRequest& request, std::optional<Service::Answer>& answered);
  Task<void> generate(const ReceivedRequest& incoming, std::shared_ptr<Generation> generation);
  Task<bool> pass_on(const ReceivedRequest& incoming, Outbox& outbox);
  Task<bool> begin_stream(const ReceivedRequest& incoming);
  Task<void> reply(const ReceivedRequest& incoming, HttpReply reply);
  Task<void> refuse(const ApiError& error);
  Task<bool> write(std::string bytes);
  Task<void> wait();
  Task<void> watch();
  void listen_for_end();
  void limit_time(std::chrono::seconds seconds);
  void no_limit();

  ClientStream stream_;
  ConnectionHub& hub_;
  boost::beast::flat_buffer buffer_;  // what was received and is not read yet
  int64_t held_bytes_ = 0;            // in hub_.bodies_bytes
  using Timer = boost::asio::steady_timer;
  Timer timer_, signal_;
  Timer::time_point deadline_ = Timer::time_point::max();  // of the limit that holds now
  bool busy_ = false;                                      // a request is being answered
  bool closes_ = false;                                    // after this answer
  bool gone_ = false;     // the client closed its side, or broke off
  bool reading_ = false;  // listens for the end
};

}  // namespace tandem
