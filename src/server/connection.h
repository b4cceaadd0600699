// One client's connection: requests one after another, each answered whole or as a stream. All
// of it runs on the thread of the connections.
#pragma once
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <chrono>
#include <memory>
#include <optional>

#include "server/service.h"
#include "server/tls.h"

namespace tandem {

struct HttpLimits {
  int64_t body_bytes = int64_t{16} << 20;
  std::chrono::seconds idle{75};   // until a whole head is there
  std::chrono::seconds body{60};   // until a whole body is there
  std::chrono::seconds write{30};  // for a client that does not read
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // References outlive the connection. Requests are read and answered until the client goes or is
  // at fault; parsing of their contents happens on `workers`.
  Connection(ClientStream::Socket socket, boost::asio::ssl::context* tls, Service& service,
             boost::asio::thread_pool& workers, const HttpLimits& limits);

  boost::asio::awaitable<void> serve();
  // After the answer that is being given, at once if there is none.
  void close_soon();
  void close();

 private:
  struct Incoming {
    HttpRequest request;
    bool keeps_open = true;
    bool is_http_10 = false;
  };
  template <class T>
  using Task = boost::asio::awaitable<T>;

  Task<std::optional<Incoming>> read();
  Task<void> end();
  Task<void> answer(const Incoming& incoming);
  Task<void> generate(const Incoming& incoming, std::shared_ptr<Generation> generation);
  Task<bool> begin_stream(const Incoming& incoming);
  Task<void> reply(const Incoming& incoming, HttpReply reply);
  Task<void> refuse(const ApiError& error);
  Task<bool> write(std::string bytes);
  Task<void> wait();
  Task<void> watch();
  void listen_for_end();
  void limit_time(std::chrono::seconds seconds);
  void no_limit();

  ClientStream stream_;
  Service& service_;
  boost::asio::thread_pool& workers_;
  const HttpLimits limits_;
  boost::beast::flat_buffer buffer_;
  using Timer = boost::asio::steady_timer;
  Timer timer_, signal_;
  Timer::time_point deadline_ = Timer::time_point::max();  // of the limit that holds now
  bool busy_ = false;                                      // a request is being answered
  bool closes_ = false;                                    // after this answer
  bool gone_ = false;     // the client closed its side, or broke off
  bool reading_ = false;  // listens for the end
};

}  // namespace tandem
