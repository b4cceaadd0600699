#include "http/tls.h"

#include <boost/asio/buffer.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
#include <boost/asio/write.hpp>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace ssl = boost::asio::ssl;

bool is_plain_http(const boost::system::error_code& error) {
  return error.category() == asio::error::get_ssl_category() &&
         ERR_GET_REASON(static_cast<unsigned long>(error.value())) == SSL_R_HTTP_REQUEST;
}

constexpr int64_t kMaxPemBytes = 1 << 20;
constexpr std::string_view kPlainHttpResponse =
    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    "this port speaks TLS: its address begins with https://\n";

// A context for TLS 1.2 or newer.
ssl::context modern_context(ssl::context::method method) {
  ssl::context context(method);
  context.set_options(ssl::context::default_workarounds | ssl::context::no_tlsv1 |
                      ssl::context::no_tlsv1_1);
  return context;
}

}  // namespace

ssl::context tls_context(const std::string& certificate, const std::string& key) {
  ssl::context context = modern_context(ssl::context::tls_server);
  boost::system::error_code error;
  context.use_certificate_chain(asio::buffer(read_text_file(certificate, kMaxPemBytes)), error);
  require(!error, "--cert {}: {}; a PEM file with the server's certificate first is needed",
          certificate, error.message());
  context.use_private_key(asio::buffer(read_text_file(key, kMaxPemBytes)), ssl::context::pem,
                          error);
  require(!error, "--key {}: {}; the PEM file of that certificate's private key is needed", key,
          error.message());
  return context;
}

ssl::context trusting_context(const std::string& file, const std::string& option) {
  ssl::context context = modern_context(ssl::context::tls_client);
  boost::system::error_code error;
  context.set_verify_mode(ssl::verify_peer);
  if (file.empty()) {
    context.set_default_verify_paths(error);
    return context;
  }
  context.add_certificate_authority(asio::buffer(read_text_file(file, kMaxPemBytes)), error);
  require(!error,
          "{} {}: {}; a PEM file with the certificate of an authority, or of the server, is needed",
          option, file, error.message());
  // Also a server's own certificate that somebody else has signed.
  X509_STORE_set_flags(SSL_CTX_get_cert_store(context.native_handle()), X509_V_FLAG_PARTIAL_CHAIN);
  return context;
}

ClientStream::ClientStream(Socket socket, ssl::context* tls) : socket_(std::move(socket)) {
  Error ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  if (tls) tls_.emplace(socket_, *tls);
}

asio::awaitable<ClientStream::Error> ClientStream::handshake() {
  Error error;
  if (!tls_) co_return error;
  co_await tls_->async_handshake(ssl::stream_base::server, into(error));
  if (is_plain_http(error)) {
    Error ignored;
    co_await asio::async_write(socket_, asio::buffer(kPlainHttpResponse), into(ignored));
  }
  co_return error;
}

asio::awaitable<ClientStream::Error> ClientStream::start_tls(ssl::context& trust,
                                                             std::string host) {
  tls_.emplace(socket_, trust);
  tls_->set_verify_callback(
      [names = ssl::host_name_verification(host)](bool is_trusted, ssl::verify_context& at) {
        const bool is_right = names(is_trusted, at);
        if (is_trusted && !is_right)
          X509_STORE_CTX_set_error(at.native_handle(), X509_V_ERR_HOSTNAME_MISMATCH);
        return is_right;
      });
  Error error;
  asio::ip::make_address(host, error);
  const bool is_name = error.failed();
  if (is_name) SSL_set_tlsext_host_name(tls_->native_handle(), host.c_str());
  co_await tls_->async_handshake(ssl::stream_base::client, into(error));
  co_return error;
}

std::string ClientStream::certificate_error() {
  const long why = SSL_get_verify_result(tls_->native_handle());
  return why == X509_V_OK ? "" : X509_verify_cert_error_string(why);
}

bool ClientStream::has_received() {
  return tls_ && (SSL_has_pending(tls_->native_handle()) != 0 ||
                  BIO_ctrl_pending(SSL_get_rbio(tls_->native_handle())) > 0);
}

asio::awaitable<ClientStream::Error> ClientStream::shut_down() {
  Error error;
  if (tls_) {
    co_await tls_->async_shutdown(into(error));
  } else {
    socket_.shutdown(Socket::shutdown_send, error);
  }
  co_return error;
}

}  // namespace tandem
