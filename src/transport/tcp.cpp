#include "transport/tcp.h"

#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <deque>
#include <vector>

#include "core/clock.h"
#include "transport/polled.h"
#include "transport/tls_stream.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

struct HostAndPort {
  std::string host, port;
};

HostAndPort parsed(const std::string& address) {
  const size_t colon = address.rfind(':');
  require(colon != std::string::npos && colon > 0 &&
              address.find_first_of(" \t,/@") == std::string::npos,
          "{}: an address is HOST:PORT", address);
  HostAndPort parts = {address.substr(0, colon), address.substr(colon + 1)};
  const bool is_number = !parts.port.empty() && parts.port.size() <= 5 &&
                         parts.port.find_first_not_of("0123456789") == std::string::npos;
  require(is_number && std::stoi(parts.port) < 65536,
          "{}: the port must be a number between 0 and 65535", address);
  if (parts.host.front() == '[' && parts.host.back() == ']')
    parts.host = parts.host.substr(1, parts.host.size() - 2);
  return parts;
}

bool would_block(const error_code& error) {
  return error == asio::error::would_block || error == asio::error::try_again;
}

[[noreturn]] void fail_with(const error_code& error) {
  throw ConnectionError(error == asio::error::eof ? "connection closed" : error.message());
}

size_t bytes_of(std::span<const std::span<std::byte>> places) {
  size_t n = 0;
  for (const std::span<std::byte> place : places) n += place.size();
  return n;
}

template <int kName>
using TcpNumber = asio::detail::socket_option::integer<IPPROTO_TCP, kName>;

class TcpConnection final : public PolledConnection {
 public:
  explicit TcpConnection(tcp::socket socket) : socket_(std::move(socket)) {
    error_code ignored;  // every option only improves what works without
    socket_.set_option(tcp::no_delay(true), ignored);
    socket_.set_option(asio::socket_base::keep_alive(true), ignored);
    socket_.set_option(TcpNumber<TCP_KEEPIDLE>(5), ignored);
    socket_.set_option(TcpNumber<TCP_KEEPINTVL>(5), ignored);
    socket_.set_option(TcpNumber<TCP_KEEPCNT>(2), ignored);
    socket_.set_option(TcpNumber<TCP_USER_TIMEOUT>(15'000), ignored);
    socket_.non_blocking(true);
    unsent_.reserve(
        kMostParts);  // queueing a second message while the first leaves does not allocate
  }

  void send(MessageKind kind, uint64_t number, std::span<const MessageBytes> body) override {
    MessageHeader& header = headers_.emplace_back();
    header.kind = kind;
    header.number = number;
    unsent_.emplace_back(&header, sizeof header);
    for (const MessageBytes part : body) {
      header.n_bytes += part.size();
      if (!part.empty()) unsent_.emplace_back(part.data(), part.size());
    }
    if (const size_t n = padding_of(header.n_bytes)) unsent_.emplace_back(kZeros.data(), n);
    send_some();
  }

  bool is_sent() const override {
    return n_sent_ == unsent_.size() && (!tls_ || tls_->is_flushed());
  }

  bool progress(MessageSink& sink) override {
    send_some();
    bool any = false;
    bool is_drained = false;
    while (reads_ && (!is_drained || reader_.has_header())) {
      if (reader_.has_header()) {
        reader_.begin(sink);
        continue;
      }
      const auto places = reader_.wanted();
      const size_t n = read_some(places);
      if (n == 0) break;
      any = true;
      is_drained = !tls_ && n < bytes_of(places);  // what comes later, poll() shows
      reader_.received(n, sink);
    }
    if (tls_ && !is_sent()) send_some();  // its handshake may have ended
    return any;
  }

  void set_reading(bool reads) override { reads_ = reads; }

  void encrypt(const SessionKey& key, bool is_client) override {
    if (!is_sent()) throw ConnectionError("the other side reads nothing");
    tls_ = std::make_unique<TlsStream>(socket_.native_handle(), key, is_client);
  }

  // TLS may have bytes that poll() does not show, and the reader a header.
  bool add_polled(std::vector<pollfd>& polled) override {
    const bool waits = tls_ && tls_->writing_needs_bytes();
    const int events = (reads_ || waits ? POLLIN : 0) | (is_sent() || waits ? 0 : POLLOUT);
    polled.push_back({socket_.native_handle(), static_cast<short>(events), 0});
    return reads_ && (reader_.has_header() || (tls_ && tls_->has_received()));
  }

 private:
  static constexpr size_t kMostParts = 64;  // that Asio writes at a time
  static constexpr std::array<std::byte, kMessageAlignment> kZeros{};

  void send_some() {
    while (n_sent_ < unsent_.size()) {
      size_t n = write_some(std::span(unsent_).subspan(n_sent_));
      if (n == 0) break;
      for (; n > 0 && n >= unsent_[n_sent_].size(); ++n_sent_) n -= unsent_[n_sent_].size();
      if (n > 0) unsent_[n_sent_] += n;
    }
    if (tls_) tls_->flush();
    if (!is_sent()) return;
    unsent_.clear();
    headers_.clear();
    n_sent_ = 0;
  }

  // Both return 0 where nothing can be read or written now.
  size_t read_some(std::span<const std::span<std::byte>> places) {
    if (tls_) return tls_->read_some(places[0]);
    std::array<asio::mutable_buffer, MessageReader::kMostPlaces> buffers;
    for (size_t i = 0; i < places.size(); ++i)
      buffers[i] = asio::buffer(places[i].data(), places[i].size());
    error_code error;
    const size_t n = socket_.read_some(std::span(buffers).first(places.size()), error);
    if (error && !would_block(error)) fail_with(error);
    return error ? 0 : n;
  }
  size_t write_some(std::span<const asio::const_buffer> parts) {
    if (tls_) return tls_->write_some(parts);
    error_code error;
    const size_t n = socket_.write_some(parts.first(std::min(parts.size(), kMostParts)), error);
    if (error && !would_block(error)) fail_with(error);
    return error ? 0 : n;
  }

  tcp::socket socket_;
  std::unique_ptr<TlsStream> tls_;  // null: nothing is encrypted
  MessageReader reader_;
  std::deque<MessageHeader> headers_;       // of the messages in unsent_
  std::vector<asio::const_buffer> unsent_;  // parts, of which the first n_sent_ have left
  size_t n_sent_ = 0;
  bool reads_ = true;
};

class TcpListener final : public PolledListener {
 public:
  explicit TcpListener(tcp::acceptor acceptor) : acceptor_(std::move(acceptor)) {
    acceptor_.non_blocking(true);
  }
  std::unique_ptr<MessageConnection> accept() override {
    error_code error;
    tcp::socket socket = acceptor_.accept(error);
    return error ? nullptr : std::make_unique<TcpConnection>(std::move(socket));
  }
  int port() const override { return acceptor_.local_endpoint().port(); }
  bool is_local() const override { return acceptor_.local_endpoint().address().is_loopback(); }
  pollfd polled() override { return {acceptor_.native_handle(), POLLIN, 0}; }

 private:
  tcp::acceptor acceptor_;
};

class PollWaiter final : public MessageWaiter {
 public:
  PollWaiter() : wakes_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    require(wakes_ >= 0, "no file descriptor is left: raise the limit (ulimit -n)");
    polled_.reserve(kUsual);  // a step allocates nothing, even if it is the first that waits
  }
  ~PollWaiter() override { close(wakes_); }

  bool wait(std::span<MessageConnection* const> connections, MessageListener* listener,
            std::chrono::nanoseconds at_most) override {
    polled_.clear();
    polled_.push_back({wakes_, POLLIN, 0});
    if (listener) polled_.push_back(static_cast<PolledListener*>(listener)->polled());
    for (MessageConnection* const connection : connections)
      if (static_cast<PolledConnection*>(connection)->add_polled(polled_))
        return listener != nullptr;
    const int64_t ns = std::max<int64_t>(0, at_most.count());
    const timespec timeout = {ns / 1'000'000'000, ns % 1'000'000'000};
    if (ppoll(polled_.data(), polled_.size(), &timeout, nullptr) <= 0) return false;
    uint64_t n_wakes = 0;
    if (polled_[0].revents != 0) (void)!read(wakes_, &n_wakes, sizeof n_wakes);
    return listener && polled_[1].revents != 0;
  }

  void wake() override {
    const uint64_t one = 1;
    (void)!write(wakes_, &one, sizeof one);
  }

 private:
  static constexpr int kUsual = 64;  // connections and others that are polled

  const int wakes_;
  std::vector<pollfd> polled_;
};

class TcpTransport final : public Transport {
 public:
  std::unique_ptr<MessageConnection> connect(const std::string& address,
                                             std::chrono::milliseconds at_most) override {
    const HostAndPort parts = parsed(address);
    asio::io_context io;
    error_code error;
    const auto found = tcp::resolver(io).resolve(parts.host, parts.port, error);
    if (error) throw ConnectionError(error.message());
    const auto until = Clock::now() + at_most;
    for (const auto& entry : found) {
      tcp::socket socket(io_);
      if (connects(socket, entry.endpoint(), until, error))
        return std::make_unique<TcpConnection>(std::move(socket));
    }
    throw ConnectionError(error.message());
  }

  std::unique_ptr<MessageListener> listen(const std::string& address) override {
    const HostAndPort parts = parsed(address);
    error_code error;
    const auto found =
        tcp::resolver(io_).resolve(parts.host, parts.port, tcp::resolver::passive, error);
    require(!error && !found.empty(), "cannot listen on {}: {}", address, error.message());
    const tcp::endpoint endpoint = found.begin()->endpoint();
    tcp::acceptor acceptor(io_);
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
    require(!error, "cannot listen on {}: {}; choose another address or port", address,
            error.message());
    return std::make_unique<TcpListener>(std::move(acceptor));
  }

  std::unique_ptr<MessageWaiter> waiter() override { return std::make_unique<PollWaiter>(); }

 private:
  static bool connects(tcp::socket& socket, const tcp::endpoint& endpoint, Clock::time_point until,
                       error_code& error) {
    socket.open(endpoint.protocol(), error);
    if (!error) socket.non_blocking(true, error);
    if (error) return false;
    // The library's connect() would wait until the kernel gives up, which takes minutes.
    if (::connect(socket.native_handle(), endpoint.data(), endpoint.size()) == 0) return true;
    error.assign(errno, boost::system::system_category());
    if (error != asio::error::in_progress) return false;
    pollfd polled = {socket.native_handle(), POLLOUT, 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (poll(&polled, 1, std::max(0, static_cast<int>(left.count()))) <= 0) {
      error = asio::error::timed_out;
      return false;
    }
    int status = 0;
    socklen_t bytes = sizeof status;
    getsockopt(socket.native_handle(), SOL_SOCKET, SO_ERROR, &status, &bytes);
    error.assign(status, boost::system::system_category());
    return status == 0;
  }

  asio::io_context io_;  // which owns the sockets and never runs
};

}  // namespace

std::string with_port(const std::string& address, int port) {
  return fmt::format("{}:{}", address.substr(0, address.rfind(':')), port);
}

std::vector<std::string> tcp_addresses_of(const std::string& address) {
  const HostAndPort parts = parsed(address);
  error_code error;
  asio::ip::make_address(parts.host, error);
  if (!error) return {address};
  asio::io_context io;
  const auto found = tcp::resolver(io).resolve(parts.host, parts.port, error);
  if (error) throw ConnectionError(error.message());
  std::vector<std::string> addresses;
  for (const auto& entry : found) {
    const asio::ip::address ip = entry.endpoint().address();
    const std::string host = ip.is_v6() ? "[" + ip.to_string() + "]" : ip.to_string();
    const std::string one = host + ":" + parts.port;
    if (std::find(addresses.begin(), addresses.end(), one) == addresses.end())
      addresses.push_back(one);
  }
  return addresses;
}

void require_tcp_address(const std::string& address) { parsed(address); }

std::unique_ptr<Transport> tcp_transport() { return std::make_unique<TcpTransport>(); }

}  // namespace tandem
