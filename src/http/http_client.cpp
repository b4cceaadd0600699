#include "http/http_client.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/asio/write.hpp>

#include "core/check.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

// Limit of received bytes that are not parsed yet, such as the line before a chunk.
constexpr size_t kMaxUnparsedBytes = 64 << 10;
constexpr size_t kReceiveBytes = 32 << 10;
constexpr size_t kMaxReplyBytes = 1 << 20;  // of ask()

}  // namespace

HttpClient::Task<std::string> HttpClient::connect(const HttpAddress& address) {
  error_code error;
  const auto ip = asio::ip::make_address(address.host, error);
  if (!error) {
    const tcp::endpoint endpoint(ip, static_cast<uint16_t>(address.port));
    co_await stream_.socket().async_connect(endpoint, into(error));
  } else {
    const auto found =
        co_await resolver_.async_resolve(address.host, std::to_string(address.port), into(error));
    if (!error) co_await asio::async_connect(stream_.socket(), found, into(error));
  }
  if (!error && closed_) error = asio::error::operation_aborted;
  if (error) co_return text_of(error);
  stream_.socket().set_option(tcp::no_delay(true), error);
  if (address.tls) co_return co_await start_tls(address.host);
  co_return "";
}

HttpClient::Task<std::string> HttpClient::start_tls(const std::string& host) {
  error_code error = co_await stream_.start_tls(trust_, host);
  if (!error && closed_) error = asio::error::operation_aborted;
  const std::string why = error && !timed_out_ ? stream_.certificate_error() : "";
  if (!why.empty()) co_return fmt::format("its certificate is not trusted for {}: {}", host, why);
  co_return text_of(error);
}

HttpClient::Task<std::string> HttpClient::send(const std::string& head, const std::string& body) {
  error_code error;
  const std::array<asio::const_buffer, 2> bytes = {asio::buffer(head), asio::buffer(body)};
  co_await asio::async_write(stream_, bytes, into(error));
  last_sent_ = std::chrono::steady_clock::now();
  co_return text_of(error);
}

HttpClient::Task<std::string> HttpClient::receive(ResponseReader& reader) {
  const bool had_head = reader.has_head();
  while (!reader.is_complete() && !reader.has_body_bytes() && (had_head || !reader.has_head())) {
    const auto bytes = buffer_.data();
    const size_t n = reader.consume({static_cast<const char*>(bytes.data()), bytes.size()});
    buffer_.consume(n);
    if (n > 0) continue;
    const size_t n_free = kMaxUnparsedBytes - buffer_.size();
    require(n_free > 0, "the answer is not valid HTTP: a line is longer than {} bytes",
            kMaxUnparsedBytes);
    error_code error;
    buffer_.commit(co_await stream_.async_read_some(
        buffer_.prepare(std::min(n_free, kReceiveBytes)), into(error)));
    if (!error) last_received_ = std::chrono::steady_clock::now();
    if (error == asio::error::eof && reader.has_head()) {
      reader.end_of_input();
    } else if (error) {
      co_return text_of(error);
    }
  }
  co_return "";
}

std::string HttpClient::text_of(const error_code& error) const {
  if (!error) return "";
  if (timed_out_) return "time limit exceeded";
  if (error == asio::error::eof || error == asio::ssl::error::stream_truncated)
    return "connection closed";
  return error.message();
}

// The wait for the timer outlives neither the connection nor its changes of the time.
void HttpClient::set_deadline(Seconds seconds) {
  timer_.expires_after(
      std::chrono::duration_cast<asio::steady_timer::duration>(seconds));  // ends an earlier wait
  watch_deadline();
}

void HttpClient::watch_deadline() {
  timer_.async_wait([weak = weak_from_this()](error_code error) {
    const auto self = weak.lock();
    if (error || !self || self->timer_.expiry() > asio::steady_timer::clock_type::now()) return;
    self->timed_out_ = true;
    self->close();
  });
}

void HttpClient::clear_deadline() { timer_.expires_at(kNoDeadline); }

void HttpClient::close() {
  closed_ = true;
  error_code ignored;
  resolver_.cancel();
  stream_.socket().close(ignored);
  timer_.cancel(ignored);
}

HttpClient::Seconds HttpClient::silent_for() const {
  return std::chrono::steady_clock::now() - std::max(last_sent_, last_received_);
}

bool HttpClient::can_be_reused() {
  if (closed_ || !stream_.socket().is_open() || buffer_.size() > 0 || stream_.has_received())
    return false;
  char byte = 0;
  const ssize_t n = recv(stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

std::string HttpClient::local_host() const {
  error_code error;
  const auto endpoint = stream_.socket().local_endpoint(error);
  if (error) return "";
  const std::string text = endpoint.address().to_string();
  return endpoint.address().is_v6() ? "[" + text + "]" : text;
}

asio::awaitable<ServerAnswer> ask(asio::any_io_executor executor, asio::ssl::context& trust,
                                  HttpAddress address, HttpQuestion question,
                                  HttpClient::Seconds most) {
  const auto client = std::make_shared<HttpClient>(executor, trust);
  client->set_deadline(most);
  ServerAnswer reply;
  try {
    reply.error = co_await client->connect(address);
    if (reply.error.empty()) {
      reply.local_host = client->local_host();
      std::string head = fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n",
                                     question.method, question.target, address.authority);
      if (!question.authorization.empty())
        head += fmt::format("Authorization: {}\r\n", question.authorization);
      if (question.method != "GET")
        head += fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n",
                            question.body.size());
      head += "\r\n";
      reply.error = co_await client->send(head, question.body);
    }
    ResponseReader reader(false);
    while (reply.error.empty() && !reader.is_complete()) {
      reply.error = co_await client->receive(reader);
      reply.body += reader.take_body();
      require(reply.body.size() <= kMaxReplyBytes, "the answer is longer than {} bytes",
              kMaxReplyBytes);
    }
    if (reply.error.empty()) reply.status = reader.status();
  } catch (const std::exception& error) {
    reply.error = error.what();
  }
  reply.timed_out = client->has_timed_out();
  client->close();
  co_return reply;
}

}  // namespace tandem
