// Passes connections on to an address of this machine, and lets every byte arrive so many ms later
// than it was sent, each way: a slow link for `tandem bench overlap --workers`.
//   delaying_proxy PORT 127.0.0.1:WORKER_PORT MS
#include <fmt/format.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using Clock = asio::steady_timer::clock_type;

// One direction of a connection.
class Direction : public std::enable_shared_from_this<Direction> {
 public:
  Direction(std::shared_ptr<tcp::socket> from, std::shared_ptr<tcp::socket> to,
            Clock::duration delay)
      : from_(std::move(from)), to_(std::move(to)), delay_(delay), timer_(from_->get_executor()) {}

  void read() {
    buffer_.resize(1 << 18);
    from_->async_read_some(
        asio::buffer(buffer_), [this, self = shared_from_this()](auto error, size_t n) {
          if (error) return close();
          parts_.push_back({Clock::now() + delay_, {buffer_.begin(), buffer_.begin() + n}});
          if (parts_.size() == 1) write_first();
          read();
        });
  }

 private:
  struct Part {
    Clock::time_point due;
    std::vector<char> bytes;
  };
  void write_first() {
    timer_.expires_at(parts_.front().due);
    timer_.async_wait([this, self = shared_from_this()](auto) {
      asio::async_write(*to_, asio::buffer(parts_.front().bytes), [this, self](auto error, size_t) {
        if (error) return close();
        parts_.pop_front();
        if (!parts_.empty()) write_first();
      });
    });
  }
  void close() {
    boost::system::error_code ignored;
    from_->close(ignored);
    to_->close(ignored);
  }

  const std::shared_ptr<tcp::socket> from_, to_;
  const Clock::duration delay_;
  asio::steady_timer timer_;
  std::vector<char> buffer_;
  std::deque<Part> parts_;
};

class Proxy {
 public:
  Proxy(asio::io_context& io, uint16_t port, tcp::endpoint worker, Clock::duration delay)
      : acceptor_(io, {asio::ip::address_v4::loopback(), port}), worker_(worker), delay_(delay) {
    accept();
  }

 private:
  void accept() {
    acceptor_.async_accept([this](auto error, tcp::socket socket) {
      if (error) return;
      auto client = std::make_shared<tcp::socket>(std::move(socket));
      auto worker = std::make_shared<tcp::socket>(acceptor_.get_executor());
      boost::system::error_code failed;
      worker->connect(worker_, failed);
      if (!failed) {
        client->set_option(tcp::no_delay(true));
        worker->set_option(tcp::no_delay(true));
        std::make_shared<Direction>(client, worker, delay_)->read();
        std::make_shared<Direction>(worker, client, delay_)->read();
      }
      accept();
    });
  }

  tcp::acceptor acceptor_;
  const tcp::endpoint worker_;
  const Clock::duration delay_;
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) {
    fmt::print(stderr, "error: delaying_proxy PORT 127.0.0.1:WORKER_PORT MS\n");
    return 2;
  }
  const std::string worker = argv[2];
  const size_t colon = worker.rfind(':');
  asio::io_context io;
  const auto delay = std::chrono::duration<double, std::milli>(std::stod(argv[3]));
  Proxy proxy(io, static_cast<uint16_t>(std::stoi(argv[1])),
              {asio::ip::make_address(worker.substr(0, colon)),
               static_cast<uint16_t>(std::stoi(worker.substr(colon + 1)))},
              std::chrono::duration_cast<Clock::duration>(delay));
  io.run();
} catch (const std::exception& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 2;
}
