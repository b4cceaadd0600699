#include "http/connection.h"

#include <fmt/format.h>
#include <malloc.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/status.hpp>

#include "http/api_error.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

// Limit of received bytes that are not parsed yet: pipelined requests, the line before a chunk, and
// the trailer fields after the last chunk.
constexpr size_t kMaxBufferedBytes = 64 << 10;
constexpr size_t kReadBytes = 4 << 10;  // per read, except inside a body
constexpr size_t kLargeBodyBytes = 1 << 20;
constexpr auto kNever = asio::steady_timer::time_point::max();

std::string status_and_fields(int status, const std::string& fields, bool keep_alive) {
  const auto reason = http::obsolete_reason(static_cast<http::status>(status));
  return fmt::format("HTTP/1.1 {} {}\r\n{}{}\r\n", status, std::string(reason), fields,
                     keep_alive ? "" : "Connection: close\r\n");
}

std::string header_text(int status, const char* content_type, const std::string& more,
                        bool keep_alive) {
  return status_and_fields(
      status, fmt::format("Server: tandem\r\nContent-Type: {}\r\n{}", content_type, more),
      keep_alive);
}

// A chunk of a body with "Transfer-Encoding: chunked".
std::string chunk_of(const std::string& bytes) {
  return bytes.empty() ? "" : fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes);
}

}  // namespace

// A relayed answer's response.
class Connection::Writer final : public AnswerWriter {
 public:
  Writer(Connection& connection, const ReceivedRequest& incoming)
      : connection_(connection), incoming_(incoming) {}

  Task<void> respond(HttpResponse response) override {
    return connection_.write_response(incoming_, std::move(response));
  }

  void begin(Head head) override {
    connection_.context_.handler.count_response(head.status);
    std::string more = std::move(head.fields);
    if (head.length) {
      more += fmt::format("Content-Length: {}\r\n", *head.length);
    } else if (head.has_body && incoming_.is_http_10) {
      connection_.closing_ = true;
    } else if (head.has_body) {
      chunked_ = true;
      more += "Transfer-Encoding: chunked\r\n";
    }
    pending_ = status_and_fields(head.status, more, !connection_.closing_);
  }

  Task<bool> write(std::string bytes) override {
    if (chunked_) bytes = chunk_of(bytes);
    if (!pending_.empty()) bytes.insert(0, std::exchange(pending_, {}));
    if (bytes.empty()) co_return true;
    co_return !connection_.disconnected_ && co_await connection_.write(std::move(bytes));
  }

  Task<bool> finish(bool closes) override {
    if (closes) connection_.closing_ = true;
    std::string bytes = std::exchange(pending_, {});
    if (chunked_) bytes += "0\r\n\r\n";
    if (bytes.empty()) co_return !connection_.disconnected_;
    co_return !connection_.disconnected_ && co_await connection_.write(std::move(bytes));
  }

 private:
  Connection& connection_;
  const ReceivedRequest& incoming_;
  std::string pending_;  // the head, which is not sent yet
  bool chunked_ = false;
};

Connection::Connection(ClientStream::Socket socket, ConnectionContext& context)
    : stream_(std::move(socket), context.tls),
      context_(context),
      timer_(stream_.get_executor(), kNever),
      wakeup_(stream_.get_executor(), kNever) {}

asio::awaitable<void> Connection::serve() {
  try {
    co_await serve_requests();
  } catch (const std::exception&) {  // such as out of memory; no answer can be sent any more
  }
  close();
}

Connection::Task<void> Connection::serve_requests() {
  const auto self = shared_from_this();
  asio::co_spawn(
      stream_.get_executor(), [self] { return self->enforce_deadline(); },
      [self](const std::exception_ptr& failure) {
        if (failure) self->close();
      });
  set_deadline(context_.limits.write);
  closing_ = static_cast<bool>(co_await stream_.handshake()) || closing_;
  clear_deadline();
  while (stream_.socket().is_open() && !closing_) {
    std::optional<ReceivedRequest> incoming = co_await read_request();
    if (!incoming) break;
    busy_ = true;
    closing_ = closing_ || !incoming->keep_alive;
    co_await handle(std::move(*incoming));
    busy_ = false;
  }
  co_await finish();
}

void Connection::close_when_idle() {
  closing_ = true;
  if (!busy_) close();
}

void Connection::close() {
  error_code ignored;
  stream_.socket().shutdown(asio::socket_base::shutdown_both, ignored);
  stream_.socket().close(ignored);
  timer_.cancel(ignored);
  wakeup_.cancel(ignored);
}

// Returns nullopt when the connection has ended. Answers a request that is refused while it is
// read.
Connection::Task<std::optional<ReceivedRequest>> Connection::read_request() {
  RequestReader reader(context_.limits.body_bytes);
  std::optional<ApiError> refusal;
  try {
    co_return co_await receive_request(reader);
  } catch (const ApiError& error) {
    refusal = error;
  }
  release_body_bytes();
  co_await refuse(*refusal, reader.method());
  co_return std::nullopt;
}

// Does not use Beast's composed read operations, because their exceptions, such as for a field that
// is too long, propagate out of io_context::run().
Connection::Task<std::optional<ReceivedRequest>> Connection::receive_request(
    RequestReader& reader) {
  set_deadline(context_.limits.idle);
  if (buffer_.size() == 0) buffer_.shrink_to_fit();
  while (!reader.is_complete()) {
    const bool had_header = reader.has_header();
    const auto bytes = buffer_.data();
    const size_t n = reader.consume({static_cast<const char*>(bytes.data()), bytes.size()});
    buffer_.consume(n);
    count_body_bytes(reader.body_bytes());
    if (!had_header && reader.has_header()) {
      co_await begin_body(reader);
    } else if (n == 0 &&
               !co_await read_some(reader.body_bytes() > 0 ? kMaxBufferedBytes : kReadBytes)) {
      co_return std::nullopt;
    }
  }
  clear_deadline();
  co_return reader.release();
}

Connection::Task<void> Connection::begin_body(const RequestReader& reader) {
  if (reader.expects_continue() && !reader.is_complete())
    co_await write("HTTP/1.1 100 Continue\r\n\r\n");
  set_deadline(context_.limits.body);
}

// Reads more bytes into buffer_. False when the connection has ended.
Connection::Task<bool> Connection::read_some(size_t max_bytes) {
  const size_t n_free = kMaxBufferedBytes - buffer_.size();
  if (n_free == 0)
    throw ApiError(431,
                   fmt::format("the trailer section of the body, or the line before one of its "
                               "chunks, is longer than {} bytes",
                               kMaxBufferedBytes));
  error_code error;
  const auto to = buffer_.prepare(std::min(n_free, max_bytes));
  buffer_.commit(co_await stream_.async_read_some(to, into(error)));
  co_return !error;
}

// Counts the received bytes of a body. The limit keeps clients that send large bodies
// without completing them from using up all memory, and small requests do not count towards it.
void Connection::count_body_bytes(int64_t bytes) {
  const int64_t counted = std::max(bytes - static_cast<int64_t>(kMaxBufferedBytes), int64_t{0});
  const int64_t all = context_.total_body_bytes + counted - counted_bytes_;
  if (counted > counted_bytes_ && all > context_.limits.total_body_bytes)
    throw ApiError(503, "too many large requests at once: try again later", {}, "busy");
  context_.total_body_bytes = all;
  counted_bytes_ = counted;
}

void Connection::release_body_bytes() {
  context_.total_body_bytes -= std::exchange(counted_bytes_, 0);
}

Connection::Task<void> Connection::handle(ReceivedRequest incoming) {
  std::optional<RequestHandler::Result> result;
  dispatch(incoming.request, result);
  while (!result) co_await wait_for_wakeup();
  if (auto* relayed = std::get_if<std::shared_ptr<RelayedAnswer>>(&*result))
    co_await relay(incoming, **relayed);  // it may send the body several times
  release_body_bytes();
  if (auto* response = std::get_if<HttpResponse>(&*result)) {
    co_await write_response(incoming, std::move(*response));
  } else if (auto* answer = std::get_if<std::shared_ptr<StreamedAnswer>>(&*result)) {
    co_await generate(incoming, std::move(*answer));
  }
}

// Lets a worker handle the request and free its body, unless that is quick; `result` is set on the
// I/O thread.
void Connection::dispatch(HttpRequest& request, std::optional<RequestHandler::Result>& result) {
  if (context_.handler.handles_quickly(request)) {
    result = context_.handler.handle(request);
    return;
  }
  const bool large = request.body.size() > kLargeBodyBytes;
  auto work = [&, large, self = shared_from_this()] {
    RequestHandler::Result handled = context_.handler.handle(request);
    std::string().swap(request.body);
    if (large) malloc_trim(0);  // otherwise glibc keeps the memory of the JSON values
    asio::post(stream_.get_executor(), [&result, self, handled = std::move(handled)]() mutable {
      result = std::move(handled);
      self->wakeup_.cancel();
    });
  };
  if (large) {
    asio::post(context_.large, std::move(work));
  } else {
    asio::post(context_.workers, std::move(work));
  }
}

Connection::Task<void> Connection::generate(const ReceivedRequest& incoming,
                                            std::shared_ptr<StreamedAnswer> answer) {
  const auto self = shared_from_this();
  const auto outbox = std::make_shared<Outbox>(
      [self] { asio::post(self->stream_.get_executor(), [self] { self->wakeup_.cancel(); }); });
  std::optional<HttpResponse> refusal;
  try {
    answer->start([outbox](const StreamedAnswer::Output& o) { outbox->push(o); });
  } catch (const ApiError& error) {
    refusal = context_.handler.error_response(error);
  } catch (const std::exception& error) {
    answer->cancel();
    refusal = context_.handler.error_response(ApiError(500, error.what()));
  }
  if (refusal) {
    co_await write_response(incoming, std::move(*refusal));
    co_return;
  }

  watch_for_disconnect();
  bool open = false;
  try {
    open = co_await forward_output(incoming, *outbox);
  } catch (const std::exception&) {  // handled as if the client had disconnected
  }
  if (!open) answer->cancel();
  co_await end_of_answer(open);
}

Connection::Task<void> Connection::relay(const ReceivedRequest& incoming, RelayedAnswer& answer) {
  on_disconnect_ = [&answer] { answer.cancel(); };
  watch_for_disconnect();
  Writer writer(*this, incoming);
  bool whole = false;
  try {
    whole = co_await answer.write_to(writer);
  } catch (const std::exception&) {  // only this connection ends
  }
  on_disconnect_ = [] {};
  co_await end_of_answer(whole);
}

// Ends watch_for_disconnect(). The connection ends too unless the answer is whole.
Connection::Task<void> Connection::end_of_answer(bool whole) {
  if (!whole) closing_ = true;
  while (reading_) {
    error_code ignored;
    stream_.socket().cancel(ignored);
    co_await wait_for_wakeup();
  }
  if (disconnected_) closing_ = true;
}

// Sends the output of an answer until its last part. False when nothing more can be sent.
Connection::Task<bool> Connection::forward_output(const ReceivedRequest& incoming, Outbox& outbox) {
  const bool chunked = !incoming.is_http_10;
  bool begun = false, open = true, last = false;
  while (open && !last) {
    StreamedAnswer::Output output = outbox.take();
    last = output.last;
    if (disconnected_ || outbox.full()) {
      open = false;
    } else if (last && output.is_complete_body) {
      HttpResponse response;
      response.status = output.status;
      response.body = std::move(output.bytes);
      co_await write_response(incoming, std::move(response));
    } else if (!output.bytes.empty()) {
      if (!begun) open = co_await begin_event_stream(incoming);
      begun = true;
      std::string bytes = chunked ? chunk_of(output.bytes) : std::move(output.bytes);
      if (chunked && last) bytes += "0\r\n\r\n";
      if (output.aborts_stream) closing_ = true;
      open = open && co_await write(std::move(bytes));
      if (last) context_.handler.count_response(200);
    } else if (!last) {
      co_await wait_for_wakeup();
    }
  }
  co_return open;
}

Connection::Task<bool> Connection::begin_event_stream(const ReceivedRequest& incoming) {
  if (incoming.is_http_10) closing_ = true;
  std::string more = context_.handler.cors(incoming.request) + "Cache-Control: no-cache\r\n";
  if (!incoming.is_http_10) more += "Transfer-Encoding: chunked\r\n";
  co_return co_await write(header_text(200, "text/event-stream; charset=utf-8", more, !closing_));
}

Connection::Task<void> Connection::write_response(const ReceivedRequest& incoming,
                                                  HttpResponse response) {
  context_.handler.count_response(response.status);
  std::string more = context_.handler.cors(incoming.request);
  more += fmt::format("Content-Length: {}\r\n", response.body.size());
  if (response.retry_after_seconds > 0)
    more += fmt::format("Retry-After: {}\r\n", response.retry_after_seconds);
  if (!response.allow.empty()) more += fmt::format("Allow: {}\r\n", response.allow);
  std::string bytes = header_text(response.status, response.content_type, more, !closing_);
  if (incoming.request.method != "HEAD") bytes += response.body;
  if (!co_await write(std::move(bytes))) closing_ = true;
}

// Answers a request that cannot be read further, then discards what the client still sends for a
// while: closing at once would reset the connection, and the client might lose the answer.
Connection::Task<void> Connection::refuse(const ApiError& error, const std::string& method) {
  closing_ = true;
  ReceivedRequest unread;
  unread.request.method = method;
  co_await write_response(unread, context_.handler.error_response(error));
  co_await finish();
  error_code failed;
  std::vector<char> dropped(kReadBytes);
  while (!failed) co_await stream_.socket().async_read_some(asio::buffer(dropped), into(failed));
}

// Ends writing and gives the client two seconds to close the connection.
Connection::Task<void> Connection::finish() {
  set_deadline(std::chrono::seconds(2));
  co_await stream_.shut_down();
}

Connection::Task<bool> Connection::write(std::string bytes) {
  error_code error;
  set_deadline(context_.limits.write);
  co_await asio::async_write(stream_, asio::buffer(bytes), into(error));
  clear_deadline();
  co_return !error;
}

// Waits until wakeup_ is cancelled.
Connection::Task<void> Connection::wait_for_wakeup() {
  error_code cancelled;
  co_await wakeup_.async_wait(into(cancelled));
}

// Closes the socket when the time limit has passed. Limits change with every write, so the timer is
// restarted only for a limit that ends earlier.
Connection::Task<void> Connection::enforce_deadline() {
  while (stream_.socket().is_open()) {
    error_code changed;
    co_await timer_.async_wait(into(changed));
    const auto now = Timer::clock_type::now();
    if (deadline_ <= now) close();
    if (timer_.expiry() <= now) timer_.expires_at(deadline_);
  }
}

// Reads while an answer is being generated: this detects that the client disconnects. Pipelined
// requests are kept in buffer_.
void Connection::watch_for_disconnect() {
  const size_t n_free = kMaxBufferedBytes - buffer_.size();
  reading_ = n_free > 0;
  if (!reading_) return;
  stream_.async_read_some(buffer_.prepare(std::min(n_free, kReadBytes)),
                          [self = shared_from_this()](error_code error, size_t n) {
                            self->buffer_.commit(n);
                            self->reading_ = false;
                            self->disconnected_ = error && error != asio::error::operation_aborted;
                            self->wakeup_.cancel();
                            if (self->disconnected_) self->on_disconnect_();
                            const bool more = !error && self->busy_;
                            if (more) self->watch_for_disconnect();
                          });
}

void Connection::set_deadline(std::chrono::seconds seconds) {
  deadline_ = Timer::clock_type::now() + seconds;
  if (deadline_ < timer_.expiry()) timer_.expires_at(deadline_);
}

void Connection::clear_deadline() { deadline_ = kNever; }

}  // namespace tandem
