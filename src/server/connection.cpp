#include "server/connection.h"

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>

#include "server/api_error.h"
#include "server/outbox.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr uint32_t kMostHeadBytes = 16 << 10;
constexpr size_t kMostPipelinedBytes = 64 << 10;
constexpr auto kNever = asio::steady_timer::time_point::max();

auto into(error_code& error) { return asio::redirect_error(asio::use_awaitable, error); }

std::string head_of(int status, const char* content_type, const std::string& more, bool keep_open) {
  const auto reason = http::obsolete_reason(static_cast<http::status>(status));
  return fmt::format("HTTP/1.1 {} {}\r\nServer: tandem\r\nContent-Type: {}\r\n{}{}\r\n", status,
                     std::string(reason), content_type, more,
                     keep_open ? "" : "Connection: close\r\n");
}

// A piece of a body with "Transfer-Encoding: chunked".
std::string framed(const std::string& bytes) {
  return bytes.empty() ? "" : fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes);
}

std::string text_of(boost::beast::string_view view) { return {view.data(), view.size()}; }

}  // namespace

Connection::Connection(ClientStream::Socket socket, asio::ssl::context* tls, Service& service,
                       asio::thread_pool& workers, const HttpLimits& limits)
    : stream_(std::move(socket), tls),
      service_(service),
      workers_(workers),
      limits_(limits),
      timer_(stream_.get_executor(), kNever),
      signal_(stream_.get_executor(), kNever) {}

asio::awaitable<void> Connection::serve() {
  const auto self = shared_from_this();
  asio::co_spawn(
      stream_.get_executor(), [self] { return self->watch(); }, asio::detached);
  limit_time(limits_.write);
  closes_ = static_cast<bool>(co_await stream_.handshake()) || closes_;
  no_limit();
  while (stream_.socket().is_open() && !closes_) {
    const std::optional<Incoming> incoming = co_await read();
    if (!incoming) break;
    busy_ = true;
    closes_ = closes_ || !incoming->keeps_open;
    co_await answer(*incoming);
    busy_ = false;
  }
  co_await end();
  close();
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

// Nothing when the connection is over. A request that cannot be read is answered here.
Connection::Task<std::optional<Connection::Incoming>> Connection::read() {
  http::request_parser<http::string_body> parser;
  parser.header_limit(kMostHeadBytes);
  parser.body_limit(static_cast<uint64_t>(limits_.body_bytes));
  error_code error;
  limit_time(limits_.idle);
  co_await http::async_read_header(stream_, buffer_, parser, into(error));
  if (!error) {
    limit_time(limits_.body);
    if (parser.get()[http::field::expect] == "100-continue")
      co_await write("HTTP/1.1 100 Continue\r\n\r\n");
    co_await http::async_read(stream_, buffer_, parser, into(error));
  }
  no_limit();
  if (error == http::error::body_limit) {
    co_await refuse(
        ApiError(413, fmt::format("the body is longer than {} bytes", limits_.body_bytes)));
  } else if (error == http::error::header_limit) {
    co_await refuse(ApiError(431, fmt::format("the head is longer than {} bytes", kMostHeadBytes)));
  } else if (error.category() == make_error_code(http::error::end_of_stream).category() &&
             error != http::error::end_of_stream && error != http::error::partial_message) {
    co_await refuse(ApiError(400, "this is not HTTP: " + error.message()));
  }
  if (error) co_return std::nullopt;

  auto message = parser.release();
  const std::string target = text_of(message.target());
  Incoming incoming;
  incoming.request.method = text_of(message.method_string());
  incoming.request.path = target.substr(0, target.find('?'));
  incoming.request.authorization = text_of(message[http::field::authorization]);
  incoming.request.page.origin = text_of(message[http::field::origin]);
  incoming.request.page.asked_method = text_of(message[http::field::access_control_request_method]);
  incoming.request.body = std::move(message.body());
  incoming.keeps_open = message.keep_alive();
  incoming.is_http_10 = message.version() < 11;
  co_return incoming;
}

Connection::Task<void> Connection::answer(const Incoming& incoming) {
  std::optional<Service::Answer> answered;
  asio::post(workers_, [&, self = shared_from_this()] {
    Service::Answer answer = service_.handle(incoming.request);
    asio::post(stream_.get_executor(), [&answered, self, answer = std::move(answer)]() mutable {
      answered = std::move(answer);
      self->signal_.cancel();
    });
  });
  while (!answered) co_await wait();
  if (auto* whole = std::get_if<HttpReply>(&*answered)) {
    co_await reply(incoming, std::move(*whole));
  } else {
    co_await generate(incoming, std::get<std::shared_ptr<Generation>>(std::move(*answered)));
  }
}

Connection::Task<void> Connection::generate(const Incoming& incoming,
                                            std::shared_ptr<Generation> generation) {
  const auto self = shared_from_this();
  const auto outbox = std::make_shared<Outbox>(
      [self] { asio::post(self->stream_.get_executor(), [self] { self->signal_.cancel(); }); });
  std::optional<HttpReply> refusal;
  try {
    generation->start([outbox](const Generation::Output& o) { outbox->push(o); });
  } catch (const ApiError& error) {
    refusal = service_.error_reply(error);
  }
  if (refusal) {
    co_await reply(incoming, std::move(*refusal));
    co_return;
  }

  listen_for_end();
  bool begun = false, open = true, last = false;
  while (open && !last) {
    Generation::Output output = outbox->take();
    last = output.last;
    if (gone_ || outbox->full()) {
      open = false;
    } else if (last && !begun && (!generation->streams() || output.status != 200)) {
      HttpReply whole;
      whole.status = output.status;
      whole.body = std::move(output.bytes);
      co_await reply(incoming, std::move(whole));
    } else if (!output.bytes.empty()) {
      if (!begun) open = co_await begin_stream(incoming);
      begun = true;
      const bool chunked = !incoming.is_http_10;
      std::string bytes = chunked ? framed(output.bytes) : std::move(output.bytes);
      if (chunked && last) bytes += "0\r\n\r\n";
      open = open && co_await write(std::move(bytes));
      if (last) service_.answered(200);
    } else if (!last) {
      co_await wait();
    }
  }
  if (!last) generation->cancel();
  if (!open) closes_ = true;
  while (reading_) {
    error_code ignored;
    stream_.socket().cancel(ignored);
    co_await wait();
  }
  if (gone_) closes_ = true;
}

Connection::Task<bool> Connection::begin_stream(const Incoming& incoming) {
  if (incoming.is_http_10) closes_ = true;
  std::string more = service_.cors(incoming.request) + "Cache-Control: no-cache\r\n";
  if (!incoming.is_http_10) more += "Transfer-Encoding: chunked\r\n";
  co_return co_await write(head_of(200, "text/event-stream; charset=utf-8", more, !closes_));
}

Connection::Task<void> Connection::reply(const Incoming& incoming, HttpReply whole) {
  service_.answered(whole.status);
  std::string more = service_.cors(incoming.request);
  more += fmt::format("Content-Length: {}\r\n", whole.body.size());
  if (whole.retry_after_seconds > 0)
    more += fmt::format("Retry-After: {}\r\n", whole.retry_after_seconds);
  if (!whole.allow.empty()) more += fmt::format("Allow: {}\r\n", whole.allow);
  std::string bytes = head_of(whole.status, whole.content_type, more, !closes_);
  if (incoming.request.method != "HEAD") bytes += whole.body;
  if (!co_await write(std::move(bytes))) closes_ = true;
}

// Answers what cannot be read further, then reads and drops what the client still sends for a
// while: closing at once would make its system throw the answer away.
Connection::Task<void> Connection::refuse(const ApiError& error) {
  closes_ = true;
  const Incoming unread;
  co_await reply(unread, service_.error_reply(error));
  co_await end();
  error_code failed;
  std::vector<char> dropped(1 << 16);
  while (!failed) co_await stream_.socket().async_read_some(asio::buffer(dropped), into(failed));
}

// Nothing more is written; the client has a moment to take note.
Connection::Task<void> Connection::end() {
  limit_time(std::chrono::seconds(2));
  co_await stream_.finish();
}

Connection::Task<bool> Connection::write(std::string bytes) {
  error_code error;
  limit_time(limits_.write);
  co_await asio::async_write(stream_, asio::buffer(bytes), into(error));
  no_limit();
  co_return !error;
}

// Until signal_ is cancelled.
Connection::Task<void> Connection::wait() {
  error_code cancelled;
  co_await signal_.async_wait(into(cancelled));
}

// Closes the socket when the time limit has passed. Limits come and go with every write, so the
// timer is set anew only for one that ends earlier.
Connection::Task<void> Connection::watch() {
  while (stream_.socket().is_open()) {
    error_code changed;
    co_await timer_.async_wait(into(changed));
    const auto now = Timer::clock_type::now();
    if (deadline_ <= now) close();
    if (timer_.expiry() <= now) timer_.expires_at(deadline_);
  }
}

// While an answer is being made, the only news from a client is that it has gone, or its next
// requests, which are kept for later.
void Connection::listen_for_end() {
  reading_ = buffer_.size() < kMostPipelinedBytes;
  if (!reading_) return;
  stream_.async_read_some(buffer_.prepare(4096),
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
