#include "transport/ucx.h"

#include "transport/tcp.h"
#include "transport/ucx_connection.h"

namespace tandem {
namespace {

// What tcp_transport() returns is polled.
std::unique_ptr<PolledConnection> polled_socket(std::unique_ptr<MessageConnection> socket) {
  return std::unique_ptr<PolledConnection>(static_cast<PolledConnection*>(socket.release()));
}

class UcxListener final : public PolledListener {
 public:
  UcxListener(const UcxLibrary& ucx, std::unique_ptr<MessageListener> of_tcp)
      : ucx_(ucx), tcp_(static_cast<PolledListener*>(of_tcp.release())) {}
  std::unique_ptr<MessageConnection> accept() override {
    std::unique_ptr<MessageConnection> socket = tcp_->accept();
    if (!socket) return nullptr;
    return std::make_unique<UcxConnection>(ucx_, polled_socket(std::move(socket)));
  }
  int port() const override { return tcp_->port(); }
  bool is_local() const override { return tcp_->is_local(); }
  pollfd polled() override { return tcp_->polled(); }

 private:
  const UcxLibrary& ucx_;
  const std::unique_ptr<PolledListener> tcp_;
};

class UcxTransport final : public Transport {
 public:
  explicit UcxTransport(UcxReach reach) : ucx_(reach) {}
  std::unique_ptr<MessageConnection> connect(const std::string& address,
                                             std::chrono::milliseconds at_most) override {
    return std::make_unique<UcxConnection>(ucx_, polled_socket(tcp_->connect(address, at_most)));
  }
  std::unique_ptr<MessageListener> listen(const std::string& address) override {
    return std::make_unique<UcxListener>(ucx_, tcp_->listen(address));
  }
  std::unique_ptr<MessageWaiter> waiter() override { return tcp_->waiter(); }

 private:
  const UcxLibrary ucx_;
  const std::unique_ptr<Transport> tcp_ = tcp_transport();
};

}  // namespace

std::unique_ptr<Transport> ucx_transport(UcxReach reach) {
  return std::make_unique<UcxTransport>(reach);
}

}  // namespace tandem
