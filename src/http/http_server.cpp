#include "http/http_server.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>

#include "core/check.h"
#include "core/machine_info.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr size_t kReservedFiles = 64;  // open files that are not connections

}  // namespace

HttpServer::HttpServer(RequestHandler& handler, const Options& options)
    : options_(options),
      max_connections_(options.max_connections),
      context_{.handler = handler, .workers = workers_.get_executor(), .limits = options.limits},
      acceptor_(io_),
      signals_(io_),
      drain_timer_(io_) {
  if (!options.certificate.empty())
    context_.tls = &tls_.emplace(tls_context(options.certificate, options.key));
  const size_t n_files = raise_file_limit();
  if (max_connections_ == 0)
    max_connections_ = n_files > 2 * kReservedFiles ? n_files - kReservedFiles : kReservedFiles;
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
  signals_.add(SIGTERM);  // from now on a signal waits for run()
  signals_.add(SIGINT);
}

void HttpServer::run() {
  wait_for_signal();
  context_.handler.begin(io_.get_executor());
  asio::co_spawn(
      io_, [this] { return accept(); }, asio::detached);
  run_handlers();
  workers_.join();
  context_.handler.end();
}

// If a handler throws nevertheless, only its connection ends, together with the coroutine that
// waits for the handler.
void HttpServer::run_handlers() {
  while (!io_.stopped()) {
    try {
      io_.run();
    } catch (const std::exception&) {
    }
  }
}

asio::awaitable<void> HttpServer::accept() {
  while (acceptor_.is_open()) {
    error_code error;
    tcp::socket socket(io_);
    co_await acceptor_.async_accept(socket, into(error));
    if (!error && connections_.size() < max_connections_) {
      try {
        auto entry = std::make_unique<Entry>(*this, std::move(socket));
        asio::co_spawn(io_, serve(std::move(entry)), asio::detached);
      } catch (const std::exception&) {  // out of memory: drop this connection
      }
    } else if (error && acceptor_.is_open()) {  // no file descriptors left: retry later
      asio::steady_timer pause(io_, std::chrono::milliseconds(50));
      co_await pause.async_wait(into(error));
    }
  }
}

asio::awaitable<void> HttpServer::serve(std::unique_ptr<Entry> entry) {
  co_await entry->connection().serve();
}

void HttpServer::wait_for_signal() {
  signals_.async_wait([this](error_code error, int) {
    if (error) return;
    if (draining_) return io_.stop();
    drain();
    wait_for_signal();
  });
}

void HttpServer::shut_down() {
  asio::post(io_, [this] {
    if (!draining_) drain();
  });
}

void HttpServer::drain() {
  draining_ = true;
  context_.handler.set_stopping();
  options_.on_drain();
  error_code ignored;
  acceptor_.close(ignored);
  const auto connections = connections_;
  for (const auto& connection : connections) connection->close_when_idle();
  drain_timer_.expires_after(options_.drain);
  drain_timer_.async_wait([this](error_code error) {
    if (!error) io_.stop();
  });
  on_connection_closed();
}

HttpServer::Entry::Entry(HttpServer& server, tcp::socket socket)
    : server_(server),
      connection_(std::make_shared<Connection>(std::move(socket), server.context_)) {
  server_.connections_.insert(connection_);
}

HttpServer::Entry::~Entry() {
  if (server_.io_.stopped()) return;  // the whole server is shutting down
  connection_->close();
  server_.connections_.erase(connection_);
  server_.on_connection_closed();
}

void HttpServer::on_connection_closed() {
  if (draining_ && connections_.empty()) io_.stop();
}

}  // namespace tandem
