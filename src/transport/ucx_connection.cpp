#include "transport/ucx_connection.h"

#include <cstring>

#include "core/clock.h"

namespace tandem {
namespace {

// Messages that may wait while nothing is read. An honest peer sends fewer: its requests are those
// of a step.
constexpr size_t kMostIncoming = 4096;
constexpr int kMostProgress = 1000;  // calls in a row
// Longer messages of one part are fetched by the receiver from the sender's memory. Those of
// several parts go through queues in pieces. Up to a length, copying them into one part is faster:
// 16 rows of R1 take 0.83 of the time, 64 rows as long (docs/measurements/workers.md).
constexpr uint64_t kFetched = 56 << 10, kMostJoined = 512 << 10;
// The socket is looked at once in this time while nothing comes. poll() does not sleep once the
// peer has closed it.
constexpr std::chrono::microseconds kWatch(500);
// Shorter than the silence after which a peer is lost: others wait meanwhile.
constexpr std::chrono::milliseconds kCloseAtMost(50);

}  // namespace

UcxConnection::~UcxConnection() {
  if (!worker_) return;
  for (size_t i = first_; i < incoming_.size(); ++i)
    if (incoming_[i].data && !incoming_[i].is_remote)
      ucx_.am_data_release(worker_, incoming_[i].data);
  if (endpoint_) close_endpoint();
  ucx_.worker_destroy(worker_);
}

// Ends all that is under way. The bound holds where UCX does not answer; the worker's end then ends
// it.
void UcxConnection::close_endpoint() {
  ucp_request_param_t how = {};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  how.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucx_.ep_close_nbx(endpoint_, &how);
  const bool is_pending = UCS_PTR_IS_PTR(request);
  const auto until = Clock::now() + kCloseAtMost;
  while ((n_under_way_ > 0 || is_fetching_ ||
          (is_pending && ucx_.request_check_status(request) == UCS_INPROGRESS)) &&
         Clock::now() < until)
    ucx_.worker_progress(worker_);
  if (is_pending) ucx_.request_free(request);
}

MessageBytes UcxConnection::path_address() {
  if (!address_.empty()) return address_;
  if (!worker_) {
    const UcxLibrary::Worker made = ucx_.make_worker(arrived, this);
    worker_ = made.worker;
    descriptor_ = made.descriptor;
  }
  ucp_address_t* address = nullptr;
  size_t n_bytes = 0;
  const ucs_status_t status = ucx_.worker_get_address(worker_, &address, &n_bytes);
  if (status != UCS_OK) throw PathError("UCX has no path: " + ucx_.text(status));
  token_ = random_nonce();
  address_.resize(sizeof token_ + n_bytes);
  std::memcpy(address_.data(), token_.data(), sizeof token_);
  std::memcpy(address_.data() + sizeof token_, address, n_bytes);
  ucx_.worker_release_address(worker_, address);
  return address_;
}

void UcxConnection::find_path(MessageBytes address) {
  path_address();
  if (address.size() <= sizeof token_of_peer_ || endpoint_)
    throw PathError("a malformed address of UCX");
  std::memcpy(token_of_peer_.data(), address.data(), sizeof token_of_peer_);
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data() + sizeof token_of_peer_);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {failed, this};
  const ucs_status_t status = ucx_.ep_create(worker_, &params, &endpoint_);
  if (status == UCS_OK) return;
  endpoint_ = nullptr;
  throw PathError(fmt::format(
      "UCX does not reach it ({}){}", ucx_.text(status),
      ucx_.reach() == UcxReach::kNetwork
          ? ""
          : ": it has shared memory alone, because it does not encrypt: for RDMA give both sides a "
            "secret and --worker-encryption off"));
}

void UcxConnection::use_path() {
  check(endpoint_ != nullptr, "a path that was found");
  if (!socket_->is_sent()) throw ConnectionError("the other side reads nothing");
  uses_path_ = true;
  socket_->set_reading(true);
}

void UcxConnection::set_reading(bool reads) {
  reads_ = reads;
  if (!uses_path_) socket_->set_reading(reads);
}

void UcxConnection::send(MessageKind kind, uint64_t number, std::span<const MessageBytes> body) {
  if (!uses_path_) return socket_->send(kind, number, body);
  require_works();
  Outgoing& message = free_outgoing();
  message.envelope = {
      .header = {.kind = kind, .number = number}, .sequence = n_sent_++, .token = token_of_peer_};
  message.parts.clear();
  for (const MessageBytes part : body) {
    message.envelope.header.n_bytes += part.size();
    if (!part.empty())
      message.parts.push_back({const_cast<std::byte*>(part.data()), part.size()});  // UCX reads it
  }
  if (message.parts.size() > 1 && message.envelope.header.n_bytes >= kFetched &&
      message.envelope.header.n_bytes <= kMostJoined)
    join(message);
  ucp_request_param_t how = {};
  how.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE;
  how.cb.send = sent;
  how.user_data = &message;
  const void* data = message.parts.data();
  size_t count = message.parts.size();
  how.datatype = UCP_DATATYPE_IOV;
  if (count <= 1) {
    how.datatype = ucp_dt_make_contig(1);
    data = count == 1 ? message.parts[0].buffer : nullptr;
    count = count == 1 ? message.parts[0].length : 0;
  }
  message.is_under_way = true;
  ++n_under_way_;
  const ucs_status_ptr_t request =
      ucx_.am_send_nbx(endpoint_, 0, &message.envelope, sizeof message.envelope, data, count, &how);
  if (UCS_PTR_IS_PTR(request)) return;  // sent() is called
  message.is_under_way = false;
  --n_under_way_;
  if (request) throw ConnectionError(ucx_.text(UCS_PTR_STATUS(request)));
}

// Copies the parts into one, which the receiver can fetch.
void UcxConnection::join(Outgoing& message) {
  message.joined.clear();
  for (const ucp_dt_iov_t& part : message.parts) {
    const auto* const bytes = static_cast<const std::byte*>(part.buffer);
    message.joined.insert(message.joined.end(), bytes, bytes + part.length);
  }
  message.parts.assign(1, {message.joined.data(), message.joined.size()});
}

UcxConnection::Outgoing& UcxConnection::free_outgoing() {
  for (Outgoing& message : outgoing_)
    if (!message.is_under_way) return message;
  return outgoing_.emplace_back(Outgoing{.owner = this});
}

void UcxConnection::sent(void* request, ucs_status_t status, void* outgoing) {
  auto& message = *static_cast<Outgoing*>(outgoing);
  UcxConnection& self = *message.owner;
  message.is_under_way = false;
  --self.n_under_way_;
  if (status != UCS_OK && self.status_ == UCS_OK) self.status_ = status;
  self.ucx_.request_free(request);
}

void UcxConnection::failed(void* self, ucp_ep_h, ucs_status_t status) {
  static_cast<UcxConnection*>(self)->status_ = status;
}

// UCX is in the middle of its own work here: the message is only noted.
ucs_status_t UcxConnection::arrived(void* connection, const void* header, size_t header_bytes,
                                    void* data, size_t n_bytes, const ucp_am_recv_param_t* how) {
  auto& self = *static_cast<UcxConnection*>(connection);
  Envelope envelope;
  if (header_bytes != sizeof envelope) return UCS_OK;
  std::memcpy(&envelope, header, sizeof envelope);
  if (!is_same(envelope.token, self.token_)) return UCS_OK;
  ++self.n_arrived_;
  if (self.incoming_.size() - self.first_ >= kMostIncoming) {
    self.has_too_many_ = true;
    return UCS_OK;
  }
  if (self.incoming_.size() == self.incoming_.capacity()) self.forget_taken();
  Incoming& message = self.incoming_.emplace_back();
  message.envelope = envelope;
  message.n_bytes = n_bytes;
  message.is_remote = (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (message.is_remote || (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0) {
    message.data = data;
    return UCS_INPROGRESS;  // the data stay until they are released
  }
  const auto* const bytes = static_cast<const std::byte*>(data);
  message.copy.assign(bytes, bytes + n_bytes);
  return UCS_OK;
}

bool UcxConnection::progress(MessageSink& sink) {
  if (!uses_path_) return socket_->progress(sink);
  const uint64_t before = n_arrived_ + n_taken_;
  const bool has_worked = work();
  require_protocol(!has_too_many_, "more messages than a peer has under way");
  // Where UCX reads memory of the peer by copying it, this thread does that in work().
  while (reads_ && (take_first(sink) || (is_fetching_ && work()))) {
  }
  // What a peer had sent before its end was taken first. The socket knows better why it ended.
  if (n_arrived_ + n_taken_ != before) return true;
  if (const auto now = Clock::now(); now - watched_ > kWatch) {
    watched_ = now;
    watch_socket();
  }
  require_works();
  return is_fetching_ && has_worked;  // a part of a body
}

// Returns whether UCX had anything to do. It has more only after a bound.
bool UcxConnection::work() {
  int n = 0;
  while (n < kMostProgress && ucx_.worker_progress(worker_) != 0) ++n;
  return n > 0;
}

void UcxConnection::require_works() const {
  if (status_ != UCS_OK) throw ConnectionError(ucx_.text(status_));
}

// Throws ConnectionError once the socket is closed, and ProtocolError for what comes by it.
void UcxConnection::watch_socket() {
  class Nothing final : public MessageSink {
    std::span<std::byte> place(const MessageHeader&) override {
      throw ProtocolError("a message beside the path");
    }
    void arrived(const MessageHeader&) override {}
  } nothing;
  socket_->progress(nothing);
}

// Delivers the first message, if it is complete.
bool UcxConnection::take_first(MessageSink& sink) {
  if (!has_incoming() || is_fetching_) return false;
  if (!incoming_[first_].is_placed && !place_first(sink)) return false;
  Incoming& message = incoming_[first_];
  // A peer that has closed the connection may have used its memory again before that was read.
  if (message.is_remote) {
    watch_socket();
    require_works();
  }
  const MessageHeader header = message.envelope.header;
  ++n_taken_;
  if (++first_ == incoming_.size()) forget_taken();
  sink.arrived(header);
  return true;
}

void UcxConnection::forget_taken() {
  incoming_.erase(incoming_.begin(), incoming_.begin() + static_cast<std::ptrdiff_t>(first_));
  first_ = 0;
}

// Returns whether the body is in its place already.
bool UcxConnection::place_first(MessageSink& sink) {
  Incoming& message = incoming_[first_];
  const MessageHeader& header = message.envelope.header;
  require_header(header);
  require_protocol(message.envelope.sequence == n_taken_ && header.n_bytes == message.n_bytes,
                   "a message out of order, or of another length");
  const std::span<std::byte> place = sink.place(header);
  check(place.size() == message.n_bytes, "a place for the whole body");
  message.is_placed = true;
  if (!message.is_remote) {
    const void* const from = message.data ? message.data : message.copy.data();
    if (!place.empty()) std::memcpy(place.data(), from, place.size());
    if (message.data) ucx_.am_data_release(worker_, message.data);
    message.data = nullptr;
    return true;
  }
  watch_socket();
  require_works();
  ucp_request_param_t how = {};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  how.cb.recv_am = fetched;
  how.user_data = this;
  is_fetching_ = true;
  const ucs_status_ptr_t request =
      ucx_.am_recv_data_nbx(worker_, message.data, place.data(), place.size(), &how);
  message.data = nullptr;
  if (UCS_PTR_IS_PTR(request)) return !is_fetching_;  // fetched() is called
  is_fetching_ = false;
  if (request) throw ConnectionError(ucx_.text(UCS_PTR_STATUS(request)));
  return true;
}

void UcxConnection::fetched(void* request, ucs_status_t status, size_t, void* connection) {
  auto& self = *static_cast<UcxConnection*>(connection);
  self.is_fetching_ = false;
  if (status != UCS_OK && self.status_ == UCS_OK) self.status_ = status;
  self.ucx_.request_free(request);
}

// UCX may be waited for once it has nothing to do. It refuses that after events that it has not
// looked at, most of which are none of the peer's messages.
bool UcxConnection::add_polled(std::vector<pollfd>& polled) {
  const bool is_ready = socket_->add_polled(polled);
  if (!uses_path_) return is_ready;
  polled.push_back({descriptor_, POLLIN, 0});
  if (is_ready || (reads_ && has_incoming() && !is_fetching_)) return true;
  for (int i = 0; i < kMostProgress; ++i) {
    if (work()) return true;
    if (ucx_.worker_arm(worker_) == UCS_OK) return false;
  }
  return true;
}

}  // namespace tandem
