// Listens, accepts connections, and shuts down gracefully: accepts nothing new and finishes running
// requests within a time limit.
#pragma once
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "http/connection.h"

namespace tandem {

class HttpServer {
 public:
  struct Options {
    std::string host = "127.0.0.1";
    int port = 8000;  // 0: any free port
    HttpLimits limits = {};
    std::string certificate = {}, key = {};  // PEM files; both empty: plain HTTP
    int max_connections = 0;                 // 0: as many as the process may have open files
    std::chrono::seconds drain{30};          // time for running requests after SIGTERM
    std::function<void()> on_drain = [] {};  // called when shutting down begins, on the I/O thread
  };

  // Starts to listen; signals that come before run() are heard by it. Throws Error when the address
  // or the certificate cannot be used. The handler must outlive the server.
  HttpServer(RequestHandler& handler, const Options& options);

  int port() const { return acceptor_.local_endpoint().port(); }
  // Serves until SIGTERM or SIGINT, shut_down() or stop(). A second signal ends it at once.
  void run();
  // Ends run() at once. May be called from any thread.
  void stop() { io_.stop(); }
  // Shuts down like SIGTERM: running requests are answered. May be called from any thread.
  void shut_down();

 private:
  // Keeps a connection in connections_ during the lifetime of its coroutine, however that ends.
  class Entry {
   public:
    Entry(HttpServer& server, ClientStream::Socket socket);
    ~Entry();
    Entry(const Entry&) = delete;
    Connection& connection() { return *connection_; }

   private:
    HttpServer& server_;
    const std::shared_ptr<Connection> connection_;
  };

  boost::asio::awaitable<void> accept();
  boost::asio::awaitable<void> serve(std::unique_ptr<Entry> entry);
  void run_handlers();
  void wait_for_signal();
  void drain();
  void on_connection_closed();

  const Options options_;
  size_t max_connections_;
  std::optional<boost::asio::ssl::context> tls_;
  boost::asio::thread_pool workers_{2};
  ConnectionContext context_;  // before io_: destroying io_ may destroy connections, which use it
  boost::asio::io_context io_{1};
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::signal_set signals_;
  boost::asio::steady_timer drain_timer_;
  std::set<std::shared_ptr<Connection>> connections_;
  bool draining_ = false;
};

}  // namespace tandem
