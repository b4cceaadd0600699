#include "server/http_server.h"

#include <sys/resource.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "core/check.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr size_t kOtherFiles = 64;  // beside connections

// Every connection is an open file; the usual limit of 1024 is meant for other programs.
size_t raise_file_limit() {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

}  // namespace

HttpServer::HttpServer(Service& service, const Options& options)
    : service_(service),
      options_(options),
      most_connections_(options.most_connections),
      acceptor_(io_),
      signals_(io_),
      drained_(io_) {
  if (!options.certificate.empty()) tls_ = tls_context(options.certificate, options.key);
  const size_t n_files = raise_file_limit();
  if (most_connections_ == 0)
    most_connections_ = n_files > 2 * kOtherFiles ? n_files - kOtherFiles : kOtherFiles;
  error_code error;
  tcp::resolver resolver(io_);
  const auto found =
      resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive, error);
  require(!error && !found.empty(), "cannot listen on {}: {}", options.host, error.message());
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor_.open(endpoint.protocol(), error);
  if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor_.bind(endpoint, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  require(!error, "cannot listen on {}:{}: {}; choose another --port or --host", options.host,
          options.port, error.message());
}

void HttpServer::run() {
  signals_.add(SIGTERM);
  signals_.add(SIGINT);
  wait_for_signal();
  asio::co_spawn(
      io_, [this] { return accept(); }, asio::detached);
  io_.run();
  workers_.join();
}

asio::awaitable<void> HttpServer::accept() {
  while (acceptor_.is_open()) {
    error_code error;
    tcp::socket socket(io_);
    co_await acceptor_.async_accept(socket, asio::redirect_error(asio::use_awaitable, error));
    if (!error && connections_.size() < most_connections_) {
      add(std::move(socket));
    } else if (error && acceptor_.is_open()) {  // no files are left: others have to go first
      asio::steady_timer pause(io_, std::chrono::milliseconds(50));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
    }
  }
}

void HttpServer::add(tcp::socket socket) {
  const auto connection = std::make_shared<Connection>(std::move(socket), tls_ ? &*tls_ : nullptr,
                                                       service_, workers_, options_.limits);
  connections_.insert(connection);
  asio::co_spawn(
      io_, [connection] { return connection->serve(); },
      [this, connection](const std::exception_ptr&) {
        connection->close();
        connections_.erase(connection);
        ended();
      });
}

void HttpServer::wait_for_signal() {
  signals_.async_wait([this](error_code error, int) {
    if (error) return;
    if (draining_) return io_.stop();
    drain();
    wait_for_signal();
  });
}

void HttpServer::end() {
  asio::post(io_, [this] {
    if (!draining_) drain();
  });
}

void HttpServer::drain() {
  draining_ = true;
  service_.stopping();
  error_code ignored;
  acceptor_.close(ignored);
  const auto connections = connections_;
  for (const auto& connection : connections) connection->close_soon();
  drained_.expires_after(options_.drain);
  drained_.async_wait([this](error_code error) {
    if (!error) io_.stop();
  });
  ended();
}

void HttpServer::ended() {
  if (draining_ && connections_.empty()) io_.stop();
}

}  // namespace tandem
