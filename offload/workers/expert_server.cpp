#include "offload/workers/expert_server.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/handshake.h"

namespace tandem {
namespace {

constexpr std::chrono::seconds kHandshakePatience(5);
constexpr std::chrono::milliseconds kLongestSleep(100);

}  // namespace

// A backbone, from its first byte on. Only fixed memory is used for it before it has proved that it
// knows the secret.
class ExpertServer::Peer final : public MessageSink {
 public:
  Peer(ExpertServer& server, std::unique_ptr<MessageConnection> connection)
      : server_(server),
        connection_(std::move(connection)),
        handshake_(server.options_.secret, kProtocolVersion) {}

  // Returns false if the connection has ended.
  bool progress() {
    if (is_lost_) return n_queued_ > 0;  // its memory is in use
    try {
      connection_->progress(*this);
      if (n_answered_ > 0 && connection_->is_sent()) {
        n_answered_ = 0;
        connection_->set_reading(true);
        connection_->progress(*this);  // what has come meanwhile
      }
      if (stage_ == Stage::kRefused && connection_->is_sent()) return false;
      beat();
    } catch (const Error&) {
      is_lost_ = true;
      return n_queued_ > 0;
    }
    return is_served() || Clock::now() - since_ < kHandshakePatience;
  }

  bool is_served() const { return stage_ >= Stage::kServing; }
  void say_goodbye() {
    if (!is_lost_) send(MessageKind::kGoodbye, 0, {});
  }
  MessageConnection* connection() { return connection_.get(); }
  Clock::time_point next_beat() const {
    return is_served() && connection_->is_sent()
               ? last_sent_ + std::chrono::milliseconds(setup_.beat_ms)
               : Clock::time_point::max();
  }

  // Requests that wait or are computed.
  int n_queued() const { return n_queued_; }
  // What the first one asks for, and where its answer is written.
  const ExpertRequest& request() const { return first().request; }
  TensorView answer_rows() const {
    const int64_t dim = server_.shape_.dim;
    return {first().answer.data(), request().head.n_rows, dim, dim};
  }
  // The answer is written. The connection may be lost, which progress() then finds.
  void answer() {
    const TensorView rows = answer_rows();
    const uint64_t number = first().number;
    first_ = (first_ + 1) % kMostRequests;
    --n_queued_;
    ++n_answered_;
    if (is_lost_) return;
    try {
      send(MessageKind::kAnswer, number,
           {static_cast<const std::byte*>(rows.data),
            static_cast<size_t>(rows.rows * rows.row_bytes())});
    } catch (const Error&) {
      is_lost_ = true;
    }
  }

 private:
  // In this order.
  enum class Stage : uint8_t {
    kHandshake,
    kSetup,
    kRefused,  // it is told, and the connection ends
    kServing,  // it may send requests
  };
  // While one is computed, rows of the next one come and sums of the one before leave. What a
  // backbone sends beyond that stays in the network.
  static constexpr int kMostRequests = 2;
  struct Slot {
    Buffer body, answer;
    ExpertRequest request{};
    uint64_t number = 0;
  };
  const Slot& first() const { return slots_[first_]; }
  Slot& next() { return slots_[(first_ + n_queued_) % kMostRequests]; }

  std::span<std::byte> place(const MessageHeader& header) override {
    switch (stage_) {
      case Stage::kHandshake:
        return handshake_.place(header);
      case Stage::kSetup:
        if (header.kind != MessageKind::kSetup || header.n_bytes != sizeof setup_)
          throw ProtocolError("another message than the setup");
        return std::as_writable_bytes(std::span(&setup_, 1));
      case Stage::kServing:
        if (header.kind == MessageKind::kRequest &&
            header.n_bytes <= static_cast<uint64_t>(next().body.bytes()))
          return next().body.span().first(header.n_bytes);
        [[fallthrough]];
      default:
        throw ProtocolError("an unexpected message");
    }
  }

  void arrived(const MessageHeader& header) override {
    switch (stage_) {
      case Stage::kHandshake:
        return go_on();
      case Stage::kSetup:
        return take_setup();
      default:
        return take_request(header);
    }
  }

  void go_on() {
    handshake_.arrived(*connection_, server_.welcome_);
    last_sent_ = Clock::now();
    if (handshake_.is_accepted()) stage_ = Stage::kSetup;
    if (!handshake_.is_refused()) return;
    stage_ = Stage::kRefused;
    server_.options_.note("a backbone with another secret or another version was refused");
  }

  void take_setup() {
    setup_ = worker_setup_from(std::as_bytes(std::span(&setup_, 1)), server_.shape_.max_rows);
    for (Slot& slot : slots_) {
      slot.body = Buffer(server_.shape_.bytes(setup_.max_rows, RowType::kF32));
      slot.answer = Buffer(int64_t{setup_.max_rows} * server_.shape_.dim * int64_t{sizeof(float)});
    }
    stage_ = Stage::kServing;
    const std::chrono::milliseconds half(std::max(1u, setup_.beat_ms / 2));
    server_.pause_ = std::min(server_.pause_.load(), half);
    send(MessageKind::kReady, 0, {});
    server_.options_.note("a backbone has connected");
  }

  void take_request(const MessageHeader& header) {
    Slot& slot = next();
    slot.request = request_from(slot.body.span().first(header.n_bytes), server_.shape_,
                                server_.has_experts_, server_.served_->welcome.experts);
    const RequestHead& head = slot.request.head;
    if (head.n_rows > static_cast<int32_t>(setup_.max_rows) ||
        (head.type == RowType::kBf16 && !server_.served_->welcome.takes_bf16))
      throw ProtocolError("a request that the setup did not announce");
    slot.number = header.number;
    if (n_queued_++ == 0) server_.queue_.push_back(this);
    connection_->set_reading(n_queued_ + n_answered_ < kMostRequests);
  }

  void beat() {
    if (Clock::now() >= next_beat()) send(MessageKind::kBeat, 0, {});
  }

  void send(MessageKind kind, uint64_t number, MessageBytes body) {
    connection_->send(kind, number, std::span(&body, 1));
    last_sent_ = Clock::now();
  }

  ExpertServer& server_;
  std::unique_ptr<MessageConnection> connection_;
  const Clock::time_point since_ = Clock::now();
  Stage stage_ = Stage::kHandshake;
  ServerHandshake handshake_;
  WorkerSetup setup_;
  Clock::time_point last_sent_{};
  std::array<Slot, kMostRequests> slots_;
  int first_ = 0;       // slot of the first queued request
  int n_queued_ = 0;    // requests that wait or are computed, in the slots from first_ on
  int n_answered_ = 0;  // slots before first_ whose answers may not have left
  bool is_lost_ = false;
};

ExpertServer::ExpertServer(Transport& transport, Options options)
    : options_(std::move(options)),
      listener_(transport.listen(options_.address)),
      listener_port_(listener_->port()),
      waiter_(transport.waiter()) {
  require(listener_->is_local() || options_.secret.is_set(),
          "--listen {}: other machines can connect to it: give the worker and its backbones the "
          "same --worker-secret FILE",
          options_.address);
  thread_ = std::thread([this] { keep_alive(); });
}

ExpertServer::~ExpertServer() {
  {
    const std::lock_guard lock(mutex_);
    is_done_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ExpertServer::run(const ServedExperts& served) {
  const ModelConfig& c = served.config;
  std::unique_lock lock(connections_);
  welcome_ = bytes_of(served.welcome);
  shape_ = {.n_active = c.router.n_active,
            .dim = static_cast<int32_t>(c.dim),
            .max_rows = served.welcome.max_rows};
  for (int layer = 0; layer < c.n_layers; ++layer) has_experts_.push_back(c.is_moe(layer));
  decoded_ = Buffer(int64_t{shape_.max_rows} * shape_.dim * int64_t{sizeof(float)});
  queue_.reserve(kMostPeers);
  served_ = &served;
  while (serve_connections() || !queue_.empty()) {
    if (queue_.empty()) {
      waited_.clear();
      for (const auto& peer : peers_) waited_.push_back(peer->connection());
      waiter_->wait(waited_, peers_.size() < kMostPeers ? listener_.get() : nullptr,
                    longest_sleep());
      continue;
    }
    Peer& peer = *queue_.front();
    queue_.erase(queue_.begin());
    lock.unlock();
    compute(peer);
    lock.lock();
    peer.answer();
    if (peer.n_queued() > 0) queue_.push_back(&peer);
  }
  served_ = nullptr;
}

// Serves connections while the other thread computes.
void ExpertServer::keep_alive() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, pause_.load(), [&] { return is_done_; })) {
    const std::unique_lock connections(connections_, std::try_to_lock);
    if (connections.owns_lock() && served_) serve_connections();
  }
}

void ExpertServer::end() {
  ends_ = true;
  waiter_->wake();
}

void ExpertServer::compute(Peer& peer) {
  const ExpertRequest& request = peer.request();
  const RequestHead& head = request.head;
  const int64_t n = head.n_rows, n_active = shape_.n_active, dim = shape_.dim;
  if (head.type == RowType::kBf16)
    served_->team.run(n, [&](int64_t row, int) {
      auto* const to = reinterpret_cast<float*>(decoded_.data()) + row * dim;
      served_->kernels.decode(
          {request.rows + row * dim * bytes_of(head.type), cpu::WeightType::kBF16, to, dim});
    });
  // The pool only reads what it is given.
  const auto view = [&](const void* data, int64_t cols, DType of) {
    return TensorView{const_cast<void*>(data), n, cols, cols, of};
  };
  const Ticket ticket = served_->experts.submit(
      {.layer = head.layer,
       .x = view(head.type == RowType::kBf16 ? decoded_.data() : request.rows, dim, DType::kF32),
       .routing = {view(request.ids, n_active, DType::kI32),
                   view(request.weights, n_active, DType::kF32)}});
  const TensorView answer = peer.answer_rows();
  std::memset(answer.data, 0, answer.rows * answer.row_bytes());
  served_->experts.add_to(ticket, answer);
}

// Makes what progress is possible. Returns false once all is done after end().
bool ExpertServer::serve_connections() {
  if (leave_by_ == Clock::time_point() && (ends_ || options_.is_asked_to_end())) {
    leave_by_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(options_.drain);
    listener_.reset();
    say_goodbye();
  }
  if (listener_) accept();
  progress_peers();
  return leave_by_ == Clock::time_point() || (!peers_.empty() && Clock::now() < leave_by_);
}

void ExpertServer::accept() {
  while (peers_.size() < kMostPeers) {
    std::unique_ptr<MessageConnection> connection = listener_->accept();
    if (!connection) return;
    peers_.push_back(std::make_unique<Peer>(*this, std::move(connection)));
  }
}

void ExpertServer::progress_peers() {
  std::erase_if(peers_, [&](const std::unique_ptr<Peer>& peer) {
    const bool was_served = peer->is_served();
    if (peer->progress()) return false;
    if (was_served) options_.note("a backbone has left");
    return true;
  });
}

// Backbones that are not served yet are not told, and cannot connect again.
void ExpertServer::say_goodbye() {
  std::erase_if(peers_, [](const std::unique_ptr<Peer>& peer) {
    if (!peer->is_served()) return true;
    try {
      peer->say_goodbye();
    } catch (const Error&) {  // progress_peers() removes it
    }
    return false;
  });
}

std::chrono::nanoseconds ExpertServer::longest_sleep() const {
  auto until = Clock::now() + kLongestSleep;
  for (const auto& peer : peers_) until = std::min(until, peer->next_beat());
  return until - Clock::now();
}

}  // namespace tandem
