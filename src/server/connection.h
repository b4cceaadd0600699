// One client's connection: requests are read one after another, each answered whole or as a stream.
// All members run on the I/O thread (HttpServer::run()).
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
  // Unparsed bodies of all connections together; the first 64 KiB of each do not count.
  int64_t all_bodies_bytes = int64_t{256} << 20;
  std::chrono::seconds idle{75};   // to receive the head of a request
  std::chrono::seconds body{60};   // to receive the body of a request
  std::chrono::seconds write{30};  // for a write, in case the client does not read
};

// State shared by all connections of a server. Only the I/O thread uses it, except for `workers`
// and `large`, on which requests are parsed.
struct ConnectionContext {
  using Executor = boost::asio::any_io_executor;
  Service& service;
  Executor workers;  // threads that parse requests
  HttpLimits limits = {};
  boost::asio::ssl::context* tls = nullptr;  // null: plain HTTP
  int64_t bodies_bytes = 0;                  // bytes that count towards all_bodies_bytes
  // A large request may become hundreds of megabytes of JSON values. Large requests are therefore
  // parsed one at a time, which also leaves a worker for small ones.
  boost::asio::strand<Executor> large{workers};
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // The hub must outlive the connection.
  Connection(ClientStream::Socket socket, ConnectionContext& hub);
  ~Connection() { release_body(); }

  // Reads and answers requests until the client disconnects or sends an invalid request. Throws
  // nothing: an exception while answering a request ends only this connection.
  boost::asio::awaitable<void> serve();
  // Closes after the answer in progress, or at once if there is none.
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
  ConnectionContext& hub_;
  boost::beast::flat_buffer buffer_;  // received bytes that are not parsed yet
  int64_t held_bytes_ = 0;            // this connection's share of hub_.bodies_bytes
  using Timer = boost::asio::steady_timer;
  Timer timer_, signal_;
  Timer::time_point deadline_ = Timer::time_point::max();  // of the current time limit
  bool busy_ = false;                                      // a request is being answered
  bool closes_ = false;                                    // the connection ends after this answer
  bool gone_ = false;     // the client closed its side, or the connection broke
  bool reading_ = false;  // listen_for_end() has a read in progress
};

}  // namespace tandem
