// TLS certificates of servers and what their clients trust, and the byte stream between one client
// and a server: a TCP socket, or TLS over one.
#pragma once
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <optional>
#include <string>

#include "http/awaitable.h"

namespace tandem {

// A context for TLS 1.2 or newer with the certificate chain and the private key of two PEM files.
// Throws Error naming the file.
boost::asio::ssl::context tls_context(const std::string& certificate, const std::string& key);
// A context for clients, TLS 1.2 or newer, that trusts the certificates of a PEM file, and those
// that they have signed; of an empty name, what this system trusts. Throws Error, which begins with
// `option`.
boost::asio::ssl::context trusting_context(const std::string& file, const std::string& option);

// A completion token of coroutines that stores the error instead of throwing it.
inline auto into(boost::system::error_code& error) {
  return boost::asio::redirect_error(boost::asio::use_awaitable, error);
}

// A connection between a client and a server, at either end, with or without TLS.
class ClientStream {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  using executor_type = Socket::executor_type;
  using Error = boost::system::error_code;

  // `tls` must outlive the stream; null: no TLS.
  ClientStream(Socket socket, boost::asio::ssl::context* tls);
  ClientStream(const ClientStream&) = delete;

  executor_type get_executor() { return socket_.get_executor(); }
  Socket& socket() { return socket_; }  // below TLS
  const Socket& socket() const { return socket_; }

  // Does the TLS handshake; to be called before anything is read or written.
  boost::asio::awaitable<Error> handshake();
  // The same of a client, on a stream without TLS that is connected. The server's certificate must
  // be one that `trust`, of trusting_context(), trusts, and name the host, or its IP address.
  boost::asio::awaitable<Error> start_tls(boost::asio::ssl::context& trust, std::string host);
  // After an error of start_tls(): what is wrong with the certificate; empty: nothing.
  std::string certificate_error();
  // Whether bytes were received by TLS that have not been read.
  bool has_received();
  // Ends writing: TLS shutdown, or shutdown of the socket's sending side.
  boost::asio::awaitable<Error> shut_down();

  template <class Buffers, class Token>
  auto async_read_some(const Buffers& buffers, Token&& token) {
    if (tls_) return tls_->async_read_some(buffers, std::forward<Token>(token));
    return socket_.async_read_some(buffers, std::forward<Token>(token));
  }
  template <class Buffers, class Token>
  auto async_write_some(const Buffers& buffers, Token&& token) {
    if (tls_) return tls_->async_write_some(buffers, std::forward<Token>(token));
    return socket_.async_write_some(buffers, std::forward<Token>(token));
  }

 private:
  Socket socket_;
  std::optional<boost::asio::ssl::stream<Socket&>> tls_;
};

}  // namespace tandem
