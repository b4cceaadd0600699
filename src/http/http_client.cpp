#include "http/http_client.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
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
    co_await socket_.async_connect(endpoint, into(error));
  } else {
    const auto found =
        co_await resolver_.async_resolve(address.host, std::to_string(address.port), into(error));
    if (!error) co_await asio::async_connect(socket_, found, into(error));
  }
  if (!error && closed_) error = asio::error::operation_aborted;
  if (error) co_return text_of(error);
  socket_.set_option(tcp::no_delay(true), error);
  if (address.tls) co_return co_await shake_hands(address);
  co_return "";
}

HttpClient::Task<std::string> HttpClient::shake_hands(const HttpAddress& address) {
  tls_.emplace(socket_, trust_);
  tls_->set_verify_callback([names = asio::ssl::host_name_verification(address.host)](
                                bool is_trusted, asio::ssl::verify_context& at) {
    const bool is_right = names(is_trusted, at);
    if (is_trusted && !is_right)
      X509_STORE_CTX_set_error(at.native_handle(), X509_V_ERR_HOSTNAME_MISMATCH);
    return is_right;
  });
  error_code error;
  asio::ip::make_address(address.host, error);
  const bool is_name = error.failed();
  if (is_name) SSL_set_tlsext_host_name(tls_->native_handle(), address.host.c_str());
  co_await tls_->async_handshake(asio::ssl::stream_base::client, into(error));
  if (!error && closed_) error = asio::error::operation_aborted;
  const long why = SSL_get_verify_result(tls_->native_handle());
  if (error && !timed_out_ && why != X509_V_OK)
    co_return fmt::format("its certificate is not trusted for {}: {}", address.host,
                          X509_verify_cert_error_string(why));
  co_return text_of(error);
}

HttpClient::Task<std::string> HttpClient::send(const std::string& head, const std::string& body) {
  error_code error;
  const std::array<asio::const_buffer, 2> bytes = {asio::buffer(head), asio::buffer(body)};
  if (tls_) {
    co_await asio::async_write(*tls_, bytes, into(error));
  } else {
    co_await asio::async_write(socket_, bytes, into(error));
  }
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
    const auto room = buffer_.prepare(std::min(n_free, kReceiveBytes));
    size_t n_received = 0;
    if (tls_) {
      n_received = co_await tls_->async_read_some(room, into(error));
    } else {
      n_received = co_await socket_.async_read_some(room, into(error));
    }
    buffer_.commit(n_received);
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
  socket_.close(ignored);
  timer_.cancel(ignored);
}

HttpClient::Seconds HttpClient::silent_for() const {
  return std::chrono::steady_clock::now() - std::max(last_sent_, last_received_);
}

bool HttpClient::can_be_reused() {
  if (closed_ || !socket_.is_open() || buffer_.size() > 0) return false;
  if (tls_ && (SSL_has_pending(tls_->native_handle()) != 0 ||
               BIO_ctrl_pending(SSL_get_rbio(tls_->native_handle())) > 0))
    return false;
  char byte = 0;
  const ssize_t n = recv(socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

std::string HttpClient::local_host() const {
  error_code error;
  const auto endpoint = socket_.local_endpoint(error);
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
