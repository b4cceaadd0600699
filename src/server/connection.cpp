#include "server/connection.h"

#include <fmt/format.h>
#include <malloc.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/status.hpp>

#include "server/api_error.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

// Limit of received bytes that are not parsed yet: pipelined requests, the line before a chunk, and
// the trailer fields after the last chunk.
constexpr size_t kMaxBufferedBytes = 64 << 10;
constexpr size_t kSmallPiece = 4 << 10;  // most bytes per read, except inside a body
constexpr size_t kLargeBody = 1 << 20;
constexpr auto kNever = asio::steady_timer::time_point::max();

auto into(error_code& error) { return asio::redirect_error(asio::use_awaitable, error); }

std::string head_of(int status, const char* content_type, const std::string& more, bool keep_open) {
  const auto reason = http::obsolete_reason(static_cast<http::status>(status));
  return fmt::format("HTTP/1.1 {} {}\r\nServer: tandem\r\nContent-Type: {}\r\n{}{}\r\n", status,
                     std::string(reason), content_type, more,
                     keep_open ? "" : "Connection: close\r\n");
}

// A chunk of a body with "Transfer-Encoding: chunked".
std::string framed(const std::string& bytes) {
  return bytes.empty() ? "" : fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes);
}

}  // namespace

Connection::Connection(ClientStream::Socket socket, ConnectionContext& hub)
    : stream_(std::move(socket), hub.tls),
      hub_(hub),
      timer_(stream_.get_executor(), kNever),
      signal_(stream_.get_executor(), kNever) {}

asio::awaitable<void> Connection::serve() {
  try {
    co_await converse();
  } catch (const std::exception&) {  // such as out of memory; no answer can be sent any more
  }
  close();
}

Connection::Task<void> Connection::converse() {
  const auto self = shared_from_this();
  asio::co_spawn(
      stream_.get_executor(), [self] { return self->watch(); },
      [self](const std::exception_ptr& failure) {
        if (failure) self->close();
      });
  limit_time(hub_.limits.write);
  closes_ = static_cast<bool>(co_await stream_.handshake()) || closes_;
  no_limit();
  while (stream_.socket().is_open() && !closes_) {
    std::optional<ReceivedRequest> incoming = co_await read();
    if (!incoming) break;
    busy_ = true;
    closes_ = closes_ || !incoming->keeps_open;
    co_await answer(std::move(*incoming));
    busy_ = false;
  }
  co_await end();
}

void Connection::close_soon() {
  closes_ = true;
  if (!busy_) close();
}

void Connection::close() {
  error_code ignored;
  stream_.socket().shutdown(asio::socket_base::shutdown_both, ignored);
  stream_.socket().close(ignored);
  timer_.cancel(ignored);
  signal_.cancel(ignored);
}

// Returns nullopt when the connection has ended. Answers a request that is refused while it is
// read.
Connection::Task<std::optional<ReceivedRequest>> Connection::read() {
  std::optional<ApiError> refusal;
  try {
    co_return co_await read_request();
  } catch (const ApiError& error) {
    refusal = error;
  }
  release_body();
  co_await refuse(*refusal);
  co_return std::nullopt;
}

// Does not use Beast's composed read operations, because their exceptions, such as for a field that
// is too long, propagate out of io_context::run().
Connection::Task<std::optional<ReceivedRequest>> Connection::read_request() {
  RequestReader reader(hub_.limits.body_bytes);
  limit_time(hub_.limits.idle);
  if (buffer_.size() == 0) buffer_.shrink_to_fit();
  while (!reader.is_complete()) {
    const bool had_head = reader.has_head();
    const auto bytes = buffer_.data();
    const size_t n = reader.take({static_cast<const char*>(bytes.data()), bytes.size()});
    buffer_.consume(n);
    hold_body(reader.body_bytes());
    if (!had_head && reader.has_head()) {
      co_await begin_body(reader);
    } else if (n == 0 &&
               !co_await receive(reader.body_bytes() > 0 ? kMaxBufferedBytes : kSmallPiece)) {
      co_return std::nullopt;
    }
  }
  no_limit();
  co_return reader.release();
}

Connection::Task<void> Connection::begin_body(const RequestReader& reader) {
  if (reader.waits_for_continue() && !reader.is_complete())
    co_await write("HTTP/1.1 100 Continue\r\n\r\n");
  limit_time(hub_.limits.body);
}

// Reads more bytes into buffer_. False when the connection has ended.
Connection::Task<bool> Connection::receive(size_t most_bytes) {
  const size_t room = kMaxBufferedBytes - buffer_.size();
  if (room == 0)
    throw ApiError(431, fmt::format("the fields behind the body, or the line before a chunk of it, "
                                    "are longer than {} bytes",
                                    kMaxBufferedBytes));
  error_code error;
  const auto to = buffer_.prepare(std::min(room, most_bytes));
  buffer_.commit(co_await stream_.async_read_some(to, into(error)));
  co_return !error;
}

// Records that `bytes` of a body have arrived. The limit keeps clients that send large bodies
// without completing them from using up all memory, and small requests do not count towards it.
void Connection::hold_body(int64_t bytes) {
  const int64_t counted = std::max(bytes - static_cast<int64_t>(kMaxBufferedBytes), int64_t{0});
  const int64_t all = hub_.bodies_bytes + counted - held_bytes_;
  if (counted > held_bytes_ && all > hub_.limits.all_bodies_bytes)
    throw ApiError(503, "too many large requests at a time: try again later", {}, "busy");
  hub_.bodies_bytes = all;
  held_bytes_ = counted;
}

void Connection::release_body() { hub_.bodies_bytes -= std::exchange(held_bytes_, 0); }

Connection::Task<void> Connection::answer(ReceivedRequest incoming) {
  std::optional<Service::Answer> answered;
  ask(incoming.request, answered);
  while (!answered) co_await wait();
  release_body();
  if (auto* whole = std::get_if<HttpReply>(&*answered)) {
    co_await reply(incoming, std::move(*whole));
  } else {
    co_await generate(incoming, std::get<std::shared_ptr<Generation>>(std::move(*answered)));
  }
}

// Lets a worker handle the request and free its body; `answered` is then set on the I/O thread.
void Connection::ask(HttpRequest& request, std::optional<Service::Answer>& answered) {
  const bool large = request.body.size() > kLargeBody;
  auto work = [&, large, self = shared_from_this()] {
    Service::Answer answer = hub_.service.handle(request);
    std::string().swap(request.body);
    if (large) malloc_trim(0);  // otherwise glibc keeps the memory of the JSON values
    asio::post(stream_.get_executor(), [&answered, self, answer = std::move(answer)]() mutable {
      answered = std::move(answer);
      self->signal_.cancel();
    });
  };
  if (large) {
    asio::post(hub_.large, std::move(work));
  } else {
    asio::post(hub_.workers, std::move(work));
  }
}

Connection::Task<void> Connection::generate(const ReceivedRequest& incoming,
                                            std::shared_ptr<Generation> generation) {
  const auto self = shared_from_this();
  const auto outbox = std::make_shared<Outbox>(
      [self] { asio::post(self->stream_.get_executor(), [self] { self->signal_.cancel(); }); });
  std::optional<HttpReply> refusal;
  try {
    generation->start([outbox](const Generation::Output& o) { outbox->push(o); });
  } catch (const ApiError& error) {
    refusal = hub_.service.error_reply(error);
  } catch (const std::exception& error) {
    generation->cancel();
    refusal = hub_.service.error_reply(ApiError(500, error.what()));
  }
  if (refusal) {
    co_await reply(incoming, std::move(*refusal));
    co_return;
  }

  listen_for_end();
  bool open = false;
  try {
    open = co_await pass_on(incoming, *outbox);
  } catch (const std::exception&) {  // handled as if the client had disconnected
  }
  if (!open) generation->cancel();
  if (!open) closes_ = true;
  while (reading_) {
    error_code ignored;
    stream_.socket().cancel(ignored);
    co_await wait();
  }
  if (gone_) closes_ = true;
}

// Sends the answer until its last part. False when nothing more can be sent.
Connection::Task<bool> Connection::pass_on(const ReceivedRequest& incoming, Outbox& outbox) {
  const bool chunked = !incoming.is_http_10;
  bool begun = false, open = true, last = false;
  while (open && !last) {
    Generation::Output output = outbox.take();
    last = output.last;
    if (gone_ || outbox.full()) {
      open = false;
    } else if (last && output.is_whole) {
      HttpReply whole;
      whole.status = output.status;
      whole.body = std::move(output.bytes);
      co_await reply(incoming, std::move(whole));
    } else if (!output.bytes.empty()) {
      if (!begun) open = co_await begin_stream(incoming);
      begun = true;
      std::string bytes = chunked ? framed(output.bytes) : std::move(output.bytes);
      if (chunked && last) bytes += "0\r\n\r\n";
      if (output.breaks_off) closes_ = true;
      open = open && co_await write(std::move(bytes));
      if (last) hub_.service.answered(200);
    } else if (!last) {
      co_await wait();
    }
  }
  co_return open;
}

Connection::Task<bool> Connection::begin_stream(const ReceivedRequest& incoming) {
  if (incoming.is_http_10) closes_ = true;
  std::string more = hub_.service.cors(incoming.request) + "Cache-Control: no-cache\r\n";
  if (!incoming.is_http_10) more += "Transfer-Encoding: chunked\r\n";
  co_return co_await write(head_of(200, "text/event-stream; charset=utf-8", more, !closes_));
}

Connection::Task<void> Connection::reply(const ReceivedRequest& incoming, HttpReply whole) {
  hub_.service.answered(whole.status);
  std::string more = hub_.service.cors(incoming.request);
  more += fmt::format("Content-Length: {}\r\n", whole.body.size());
  if (whole.retry_after_seconds > 0)
    more += fmt::format("Retry-After: {}\r\n", whole.retry_after_seconds);
  if (!whole.allow.empty()) more += fmt::format("Allow: {}\r\n", whole.allow);
  std::string bytes = head_of(whole.status, whole.content_type, more, !closes_);
  if (incoming.request.method != "HEAD") bytes += whole.body;
  if (!co_await write(std::move(bytes))) closes_ = true;
}

// Answers a request that cannot be read further, then discards what the client still sends for a
// while: closing at once would reset the connection, and the client might lose the answer.
Connection::Task<void> Connection::refuse(const ApiError& error) {
  closes_ = true;
  const ReceivedRequest unread;
  co_await reply(unread, hub_.service.error_reply(error));
  co_await end();
  error_code failed;
  std::vector<char> dropped(kSmallPiece);
  while (!failed) co_await stream_.socket().async_read_some(asio::buffer(dropped), into(failed));
}

// Ends writing and gives the client two seconds to close the connection.
Connection::Task<void> Connection::end() {
  limit_time(std::chrono::seconds(2));
  co_await stream_.finish();
}

Connection::Task<bool> Connection::write(std::string bytes) {
  error_code error;
  limit_time(hub_.limits.write);
  co_await asio::async_write(stream_, asio::buffer(bytes), into(error));
  no_limit();
  co_return !error;
}

// Waits until signal_ is cancelled.
Connection::Task<void> Connection::wait() {
  error_code cancelled;
  co_await signal_.async_wait(into(cancelled));
}

// Closes the socket when the time limit has passed. Limits change with every write, so the timer is
// restarted only for a limit that ends earlier.
Connection::Task<void> Connection::watch() {
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
void Connection::listen_for_end() {
  const size_t room = kMaxBufferedBytes - buffer_.size();
  reading_ = room > 0;
  if (!reading_) return;
  stream_.async_read_some(buffer_.prepare(std::min(room, kSmallPiece)),
                          [self = shared_from_this()](error_code error, size_t n) {
                            self->buffer_.commit(n);
                            self->reading_ = false;
                            self->gone_ = error && error != asio::error::operation_aborted;
                            self->signal_.cancel();
                            const bool more = !error && self->busy_;
                            if (more) self->listen_for_end();
                          });
}

void Connection::limit_time(std::chrono::seconds seconds) {
  deadline_ = Timer::clock_type::now() + seconds;
  if (deadline_ < timer_.expiry()) timer_.expires_at(deadline_);
}

void Connection::no_limit() { deadline_ = kNever; }

}  // namespace tandem
