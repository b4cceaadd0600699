// One client's connection: reads requests one after another and writes a response to each, whole or
// as a stream.
// All members run on the I/O thread (HttpServer::run()).
#pragma once
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "http/outbox.h"
#include "http/request_handler.h"
#include "http/request_reader.h"
#include "http/tls.h"

namespace tandem {

struct HttpLimits {
  int64_t body_bytes = int64_t{16} << 20;
  // Unparsed bodies of all connections together, without the first 64 KiB of each.
  int64_t total_body_bytes = int64_t{256} << 20;
  std::chrono::seconds idle{75};   // to receive the header section of a request
  std::chrono::seconds body{60};   // to receive the body of a request
  std::chrono::seconds write{30};  // for a write, in case the client does not read
};

// State shared by all connections of a server. Only the I/O thread uses it, except for `workers`
// and `large`, on which requests are parsed.
struct ConnectionContext {
  using Executor = boost::asio::any_io_executor;
  RequestHandler& handler;
  Executor workers;  // threads that parse requests
  HttpLimits limits = {};
  boost::asio::ssl::context* tls = nullptr;  // null: plain HTTP
  int64_t total_body_bytes = 0;              // counted towards limits.total_body_bytes
  // A large request may become hundreds of megabytes of JSON values. Large requests are therefore
  // parsed one at a time, which also leaves a worker for small ones.
  boost::asio::strand<Executor> large{workers};
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // The context must outlive the connection.
  Connection(ClientStream::Socket socket, ConnectionContext& context);
  ~Connection() { release_body_bytes(); }

  // Reads and answers requests until the client disconnects or sends an invalid request. Throws
  // nothing: an exception while answering a request ends only this connection.
  boost::asio::awaitable<void> serve();
  // Closes after the response in progress, or at once if there is none.
  void close_when_idle();
  void close();

 private:
  class Writer;
  template <class T>
  using Task = boost::asio::awaitable<T>;

  Task<void> serve_requests();
  Task<std::optional<ReceivedRequest>> read_request();
  Task<std::optional<ReceivedRequest>> receive_request(RequestReader& reader);
  Task<void> begin_body(const RequestReader& reader);
  Task<bool> read_some(size_t max_bytes);
  void count_body_bytes(int64_t bytes);
  void release_body_bytes();
  Task<void> finish();
  Task<void> handle(ReceivedRequest incoming);
  void dispatch(HttpRequest& request, std::optional<RequestHandler::Result>& result);
  Task<void> relay(const ReceivedRequest& incoming, RelayedAnswer& answer);
  Task<void> generate(const ReceivedRequest& incoming, std::shared_ptr<StreamedAnswer> answer);
  Task<void> end_of_answer(bool whole);
  Task<bool> forward_output(const ReceivedRequest& incoming, Outbox& outbox);
  Task<bool> begin_event_stream(const ReceivedRequest& incoming);
  Task<void> write_response(const ReceivedRequest& incoming, HttpResponse response);
  Task<void> refuse(const ApiError& error, const std::string& method);
  Task<bool> write(std::string bytes);
  Task<void> wait_for_wakeup();
  Task<void> enforce_deadline();
  void watch_for_disconnect();
  void set_deadline(std::chrono::seconds seconds);
  void clear_deadline();

  ClientStream stream_;
  ConnectionContext& context_;
  boost::beast::flat_buffer buffer_;  // received bytes that are not parsed yet
  int64_t counted_bytes_ = 0;         // this connection's share of context_.total_body_bytes
  using Timer = boost::asio::steady_timer;
  Timer timer_, wakeup_;
  Timer::time_point deadline_ = Timer::time_point::max();  // of the current time limit
  bool busy_ = false;                                      // a request is being handled
  bool closing_ = false;       // the connection ends after this response
  bool disconnected_ = false;  // the client closed its side, or the connection broke
  bool reading_ = false;       // watch_for_disconnect() has a read in progress
  std::function<void()> on_disconnect_ = [] {};
};

}  // namespace tandem
