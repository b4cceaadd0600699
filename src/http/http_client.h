// Requests to other servers, from coroutines: a connection that can be used again, and whole
// requests with a time limit.
#pragma once
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <chrono>
#include <memory>
#include <string>

#include "http/http_address.h"
#include "http/response_reader.h"
#include "http/tls.h"

namespace tandem {

// A connection to a server. All members run on the executor's thread. An error of the connection is
// a text; empty: none.
class HttpClient : public std::enable_shared_from_this<HttpClient> {
 public:
  template <class T>
  using Task = boost::asio::awaitable<T>;
  using Seconds = std::chrono::duration<double>;

  // `trust`: of trusting_context(), for addresses with https.
  HttpClient(const boost::asio::any_io_executor& executor, boost::asio::ssl::context& trust)
      : trust_(trust),
        stream_(ClientStream::Socket(executor), nullptr),
        resolver_(executor),
        timer_(executor, kNoDeadline) {}

  // With https the server's certificate must name the address's host.
  Task<std::string> connect(const HttpAddress& address);
  Task<std::string> send(const std::string& head, const std::string& body);
  // Reads until there is more of the response: its head, bytes of its body or its end. Throws Error
  // when the server sends something that is not a response.
  Task<std::string> receive(ResponseReader& reader);

  // Closes the connection after so many seconds; the operation in progress then fails.
  void set_deadline(Seconds seconds);
  void clear_deadline();
  bool has_timed_out() const { return timed_out_; }
  // Bytes have arrived since the last send().
  bool has_received() const { return last_received_ > last_sent_; }
  // Seconds since the last bytes were sent or have arrived.
  Seconds silent_for() const;
  // Any operation in progress fails.
  void close();
  // Nothing has arrived since the last response, and the server has not closed the connection.
  bool can_be_reused();
  // The IP address of this side of the connection.
  std::string local_host() const;

 private:
  static constexpr auto kNoDeadline = boost::asio::steady_timer::time_point::max();

  Task<std::string> start_tls(const std::string& host);
  std::string text_of(const boost::system::error_code& error) const;
  void watch_deadline();

  boost::asio::ssl::context& trust_;
  ClientStream stream_;
  boost::asio::ip::tcp::resolver resolver_;
  boost::asio::steady_timer timer_;
  boost::beast::flat_buffer buffer_;  // received bytes that are not parsed yet
  std::chrono::steady_clock::time_point last_sent_ = {}, last_received_ = {};
  bool timed_out_ = false, closed_ = false;
};

struct HttpQuestion {
  std::string method = "GET", target = "/";
  std::string authorization = {};  // empty: none
  std::string body = {};           // JSON
};
struct ServerAnswer {
  int status = 0;  // 0: no response
  std::string body = {};
  std::string error = {};  // why there is no response
  bool timed_out = false;
  std::string local_host = {};  // the IP address of this side of the connection
};

// Sends a request on a new connection and reads the whole response, of at most 1 MiB. `trust` as in
// HttpClient.
boost::asio::awaitable<ServerAnswer> ask(boost::asio::any_io_executor executor,
                                         boost::asio::ssl::context& trust, HttpAddress address,
                                         HttpQuestion question, HttpClient::Seconds most);

}  // namespace tandem
