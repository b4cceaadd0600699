// A connection over TCP that goes on by active messages of UCX. It has an endpoint and a worker, in
// UCX's sense of a set of queues, of its own, so its end is the end of all that UCX does for it:
// nothing of the peer arrives in memory that is used again. The socket stays open, and is how the
// end of the peer is known at once.
#pragma once
#include <deque>

#include "core/clock.h"
#include "transport/polled.h"
#include "transport/secret.h"
#include "transport/ucx_library.h"

namespace tandem {

class UcxConnection final : public PolledConnection {
 public:
  // The library outlives the object.
  UcxConnection(const UcxLibrary& ucx, std::unique_ptr<PolledConnection> socket)
      : ucx_(ucx), socket_(std::move(socket)) {}
  ~UcxConnection() override;

  void send(MessageKind kind, uint64_t number, std::span<const MessageBytes> body) override;
  bool is_sent() const override { return n_under_way_ == 0 && socket_->is_sent(); }
  bool progress(MessageSink& sink) override;
  void set_reading(bool reads) override;
  void encrypt(const SessionKey& key, bool is_client) override { socket_->encrypt(key, is_client); }
  MessageBytes path_address() override;
  void find_path(MessageBytes address) override;
  void use_path() override;
  bool add_polled(std::vector<pollfd>& polled) override;

 private:
  // The header of an active message. The token is the receiver's, which the peer has got by the
  // socket. Messages without it, of others that reach the same queues, are dropped.
  struct Envelope {
    MessageHeader header;
    uint64_t sequence = 0;  // of the messages in this direction, from 0 on
    Nonce token{};
  };
  struct Outgoing {
    UcxConnection* owner = nullptr;
    Envelope envelope = {};
    std::vector<ucp_dt_iov_t> parts = {};
    std::vector<std::byte> joined = {};  // of parts that are sent as one
    bool is_under_way = false;
  };
  struct Incoming {
    Envelope envelope = {};
    void* data = nullptr;  // the body, or what UCX fetches it with; null: it is in `copy`
    size_t n_bytes = 0;
    bool is_remote = false;  // the body is still in the peer's memory
    bool is_placed = false;  // the sink has given it a place
    std::vector<std::byte> copy = {};
  };

  static ucs_status_t arrived(void* self, const void* header, size_t header_bytes, void* data,
                              size_t n_bytes, const ucp_am_recv_param_t* how);
  static void sent(void* request, ucs_status_t status, void* outgoing);
  static void fetched(void* request, ucs_status_t status, size_t n_bytes, void* self);
  static void failed(void* self, ucp_ep_h endpoint, ucs_status_t status);
  static void join(Outgoing& message);
  Outgoing& free_outgoing();
  bool has_incoming() const { return first_ < incoming_.size(); }
  void forget_taken();
  bool work();
  void require_works() const;
  void watch_socket();
  bool take_first(MessageSink& sink);
  bool place_first(MessageSink& sink);
  void close_endpoint();

  const UcxLibrary& ucx_;
  const std::unique_ptr<PolledConnection> socket_;
  ucp_worker_h worker_ = nullptr;  // null: no path was asked for
  ucp_ep_h endpoint_ = nullptr;    // null: no path was found
  int descriptor_ = -1;            // that poll() waits for
  std::vector<std::byte> address_;
  Nonce token_{}, token_of_peer_{};
  bool uses_path_ = false, reads_ = true;
  ucs_status_t status_ = UCS_OK;    // other: the path does not work any more
  std::deque<Outgoing> outgoing_;   // whose memory is used again
  int n_under_way_ = 0;             // of them
  std::vector<Incoming> incoming_;  // of which those before first_ were taken
  size_t first_ = 0;
  Clock::time_point watched_{};  // the socket
  bool is_fetching_ = false;     // the body of the first one
  bool has_too_many_ = false;    // the peer sends more than it may
  uint64_t n_sent_ = 0, n_arrived_ = 0, n_taken_ = 0;
};

}  // namespace tandem
