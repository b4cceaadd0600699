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
  ~Peer() override { connection_.reset(); }  // before the memory that it sends and receives

  // Returns false if the connection has ended.
  bool progress() {
    if (is_lost_) return is_used_;
    try {
      const bool was_sent = forget_sent();
      connection_->progress(*this);
      if (!was_sent && forget_sent()) connection_->progress(*this);  // what has come meanwhile
      if (stage_ == Stage::kRefused && connection_->is_sent()) return false;
      beat();
    } catch (const Error&) {
      is_lost_ = true;
    }
    if (is_lost_) return is_used_;  // its memory is in use
    return is_served() || Clock::now() - since_ < kHandshakePatience;
  }

  bool is_served() const { return stage_ >= Stage::kServing; }
  int slot() const { return slot_; }  // its number in the batcher; -1: it is not served yet
  void say_goodbye() {
    if (!is_lost_) send(MessageKind::kGoodbye, 0, {});
  }
  // Null where nothing is to be received or sent.
  MessageConnection* awaited_connection() {
    return is_full() && connection_->is_sent() ? nullptr : connection_.get();
  }
  Clock::time_point next_beat() const {
    return is_served() && connection_->is_sent()
               ? last_sent_ + std::chrono::milliseconds(setup_.beat_ms)
               : Clock::time_point::max();
  }

  // What the first request of a peer asks for, and where its answer is written. Both stay in memory
  // from use() until answer().
  void use() { is_used_ = true; }
  const ExpertRequest& request() const { return first().request; }
  TensorView answer_rows() const {
    const int64_t dim = server_.shape_.dim;
    return {first().answer.data(), request().head.n_rows, dim, dim};
  }
  // The answer is written. The connection may be lost, which progress() then finds.
  void answer() {
    is_used_ = false;
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
      return;
    }
    if (n_queued_ > 0) enqueue(false);
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
  struct Held {
    Buffer body, answer;
    ExpertRequest request{};
    uint64_t number = 0;
  };
  const Held& first() const { return held_[first_]; }
  Held& next() { return held_[(first_ + n_queued_) % kMostRequests]; }
  bool is_full() const { return n_queued_ + n_answered_ == kMostRequests; }
  // Once all answers have left, their memory takes requests again. Returns whether that is so.
  bool forget_sent() {
    if (n_answered_ == 0) return true;
    if (!connection_->is_sent()) return false;
    n_answered_ = 0;
    connection_->set_reading(true);
    return true;
  }
  // The first request of the peer waits to be computed.
  void enqueue(bool is_exact) {
    const RequestHead& head = request().head;
    server_.batcher_->arrived(slot_, head.layer, head.n_rows, Clock::now(), is_exact);
  }

  std::span<std::byte> place(const MessageHeader& header) override {
    switch (stage_) {
      case Stage::kHandshake:
        return handshake_.place(header);
      case Stage::kSetup:
        if (header.kind == MessageKind::kPath && path_.empty() && header.n_bytes > 0 &&
            header.n_bytes <= kMostPathBytes) {
          path_.resize(header.n_bytes);
          return path_;
        }
        if (header.kind != MessageKind::kSetup || header.n_bytes != sizeof setup_)
          throw ProtocolError("another message than the setup");
        return std::as_writable_bytes(std::span(&setup_, 1));
      case Stage::kServing:
        if (header.kind == MessageKind::kRequest &&
            header.n_bytes <= static_cast<uint64_t>(next().body.bytes()))
          return next().body.span().first(header.n_bytes);
        if (header.kind == MessageKind::kLoad && header.n_bytes == load_.size()) return load_;
        if (header.kind == MessageKind::kUses && header.n_bytes == load_.size()) return load_;
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
        if (header.kind == MessageKind::kPath)
          return answer_path(*connection_, path_, path_answer_);
        return take_setup();
      default:
        if (header.kind == MessageKind::kLoad)
          server_.loads_->ask(
              slot_, load_from(load_, server_.loads_->experts().size(), server_.n_experts_));
        else if (header.kind == MessageKind::kUses)
          server_.loads_->uses(
              slot_, experts_from(load_, server_.loads_->experts().size(), server_.n_experts_));
        else
          take_request(header);
    }
  }

  void go_on() {
    handshake_.arrived(*connection_, server_.welcome_bytes_);
    last_sent_ = Clock::now();
    if (handshake_.is_accepted()) {
      stage_ = Stage::kSetup;
      server_.has_refused_ = false;
    }
    if (!handshake_.is_refused()) return;
    stage_ = Stage::kRefused;
    if (!server_.has_refused_)
      server_.options_.note("a backbone with another secret, encryption or version was refused");
    server_.has_refused_ = true;
  }

  void take_setup() {
    setup_ = worker_setup_from(std::as_bytes(std::span(&setup_, 1)), server_.shape_.max_rows);
    for (Held& held : held_) {
      held.body = Buffer(server_.shape_.bytes(setup_.max_rows, RowType::kF32));
      held.answer = Buffer(int64_t{setup_.max_rows} * server_.shape_.dim * int64_t{sizeof(float)});
    }
    if (server_.loads_->loads())
      load_.resize(server_.loads_->experts().size() * server_.n_experts_);
    stage_ = Stage::kServing;
    slot_ = static_cast<int>(std::find(server_.slots_.begin(), server_.slots_.end(), nullptr) -
                             server_.slots_.begin());
    server_.slots_[slot_] = this;
    server_.batcher_->joined(slot_);
    server_.loads_->joined(slot_);
    const std::chrono::milliseconds half(std::max(1u, setup_.beat_ms / 2));
    server_.pause_ = std::min(server_.pause_.load(), half);
    send(MessageKind::kReady, 0, {});
    server_.options_.note("a backbone has connected");
  }

  void take_request(const MessageHeader& header) {
    Held& held = next();
    held.request = request_from(held.body.span().first(header.n_bytes), server_.shape_,
                                server_.has_experts_, server_.loads_->used_by(slot_));
    const RequestHead& head = held.request.head;
    if (head.n_rows > static_cast<int32_t>(setup_.max_rows) ||
        (head.type == RowType::kBf16 && !server_.welcome_.takes_bf16))
      throw ProtocolError("a request that the setup did not announce");
    held.number = header.number;
    if (n_queued_++ == 0) enqueue(!server_.was_busy_);
    connection_->set_reading(!is_full());
  }

  void beat() {
    if (is_served() && connection_->is_sent()) tell_of_load();
    if (Clock::now() >= next_beat()) send(MessageKind::kBeat, 0, {});
  }

  // The progress of a load replaces beats, and its end is told at once.
  void tell_of_load() {
    const std::optional<LoadAnswer> answer = server_.loads_->answer(slot_);
    if (!answer) return;
    const bool has_ended = answer->state != LoadAnswer::State::kLoading;
    if (!has_ended && Clock::now() < next_beat()) return;
    load_answer_ = bytes_of(*answer);
    send(MessageKind::kLoading, 0, load_answer_);
    if (has_ended) server_.loads_->told(slot_);
  }

  void send(MessageKind kind, uint64_t number, MessageBytes body) {
    connection_->send(kind, number, std::span(&body, 1));
    last_sent_ = Clock::now();
  }

  ExpertServer& server_;
  std::unique_ptr<MessageConnection> connection_;
  const Clock::time_point since_ = Clock::now();
  Stage stage_ = Stage::kHandshake;
  bool is_lost_ = false;  // the connection must not be used
  int slot_ = -1;
  ServerHandshake handshake_;
  std::vector<std::byte> path_, path_answer_;  // that were received and sent
  WorkerSetup setup_;
  Clock::time_point last_sent_{};
  std::vector<std::byte> load_;  // [layers, n_experts] what it asks for or uses; empty: it may not
  std::vector<std::byte> load_answer_;  // that is sent
  std::array<Held, kMostRequests> held_;
  int first_ = 0;         // of held_, with the first queued request
  int n_queued_ = 0;      // requests that wait or are computed, from first_ on
  int n_answered_ = 0;    // those before first_ whose answers may not have left
  bool is_used_ = false;  // the first request is computed
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
  welcome_ = served.welcome;
  welcome_bytes_ = bytes_of(welcome_);
  loads_.emplace(welcome_.experts, served.loader, welcome_.moves_experts);
  n_experts_ = c.router.n_experts;
  shape_ = {.n_active = c.router.n_active,
            .dim = static_cast<int32_t>(c.dim),
            .max_rows = served.welcome.max_rows};
  for (int layer = 0; layer < c.n_all_layers(); ++layer) has_experts_.push_back(c.is_moe(layer));
  const int64_t row_bytes = shape_.dim * int64_t{sizeof(float)};
  decoded_ = Buffer(shape_.max_rows * row_bytes);
  sums_ = Buffer(shape_.max_rows * row_bytes);
  rows_.reserve(shape_.max_rows);
  ids_.resize(int64_t{shape_.max_rows} * shape_.n_active);
  weights_.resize(ids_.size());
  batch_.reserve(kMostPeers);
  batcher_.emplace(has_experts_, shape_.max_rows);
  served_ = &served;
  try {
    serve(lock);
  } catch (...) {  // a GPU was lost
    if (!lock.owns_lock()) lock.lock();
    served_ = nullptr;
    listener_.reset();
    peers_.clear();  // backbones notice it at once
    throw;
  }
  served_ = nullptr;
}

void ExpertServer::serve(std::unique_lock<std::mutex>& lock) {
  bool may_connect = true;
  while (serve_connections(may_connect) || batcher_->has_requests()) {
    was_busy_ = false;
    may_connect = false;
    if (loads_->has_ended()) {
      finish_load();
      continue;  // who waits for it is told
    }
    if (loads_->has_unused()) {
      options_.note(loads_->drop_unused());
      describe();
      continue;
    }
    const bool may_wait = leave_by_ == Clock::time_point();
    const RequestBatcher::Choice& next = batcher_->choose(Clock::now(), may_wait);
    if (next.peers.empty())
      may_connect = wait(next.until);
    else
      compute_batch(next.peers, lock);
  }
}

// Returns false where no backbone wants to connect.
bool ExpertServer::wait(Clock::time_point until) {
  waited_.clear();
  for (const auto& peer : peers_)
    if (MessageConnection* const connection = peer->awaited_connection())
      waited_.push_back(connection);
  const auto now = Clock::now();
  const auto at_most = std::min<std::chrono::nanoseconds>(longest_sleep(), until - now);
  return waiter_->wait(waited_, peers_.size() < kMostPeers ? listener_.get() : nullptr, at_most);
}

// Serves connections while the other thread computes.
void ExpertServer::keep_alive() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, pause_.load(), [&] { return is_done_; })) {
    const std::unique_lock connections(connections_, std::try_to_lock);
    if (connections.owns_lock() && served_) serve_connections(true);
  }
}

void ExpertServer::end() {
  ends_ = true;
  waiter_->wake();
}

// Connections are served meanwhile, so `lock` is released.
void ExpertServer::compute_batch(const std::vector<int>& slots,
                                 std::unique_lock<std::mutex>& lock) {
  batch_.clear();
  for (const int slot : slots) batch_.push_back(slots_[slot]);
  for (Peer* const peer : batch_) peer->use();
  was_busy_ = true;
  lock.unlock();
  const Stopwatch watch;
  if (batch_.size() == 1)
    compute_one(*batch_[0]);
  else
    compute_together();
  const double seconds = watch.seconds();
  lock.lock();
  n_requests_ += std::ssize(batch_);
  ++n_batches_;
  n_shared_ += batch_.size() > 1;
  batcher_->computed(seconds, Clock::now());
  for (Peer* const peer : batch_) peer->answer();
}

// Float rows are computed where they lie, and sums are written where they are sent from.
void ExpertServer::compute_one(const Peer& peer) {
  const ExpertRequest& request = peer.request();
  const int64_t n = request.head.n_rows;
  const void* x = request.rows;
  if (request.head.type == RowType::kBf16) {
    rows_.clear();
    append_rows(peer);
    decode(n);
    x = decoded_.data();
  }
  add_experts(request.head.layer, n, x, request, peer.answer_rows().row<float>(0));
}

// The rows of all requests follow one another. The bits of a row do not depend on the others
// (GemmBitsDoNotDependOnTheBatch in tests/cpu_kernels_test.cpp).
void ExpertServer::compute_together() {
  rows_.clear();
  for (const Peer* const peer : batch_) {
    const ExpertRequest& request = peer->request();
    const int64_t first = std::ssize(rows_) * shape_.n_active;
    const int64_t n = int64_t{request.head.n_rows} * shape_.n_active;
    std::copy_n(request.ids, n, ids_.begin() + first);
    std::copy_n(request.weights, n, weights_.begin() + first);
    append_rows(*peer);
  }
  const int64_t n = std::ssize(rows_);
  decode(n);
  auto* const sums = reinterpret_cast<float*>(sums_.data());
  const ExpertRequest routing = {{}, ids_.data(), weights_.data(), nullptr};
  add_experts(batch_[0]->request().head.layer, n, decoded_.data(), routing, sums);
  served_->team.run(n, [&](int64_t row, int) {
    std::copy_n(sums + row * shape_.dim, shape_.dim, rows_[row].answer);
  });
}

void ExpertServer::append_rows(const Peer& peer) {
  const ExpertRequest& request = peer.request();
  const TensorView answer = peer.answer_rows();
  const int64_t row_bytes = shape_.dim * bytes_of(request.head.type);
  for (int64_t i = 0; i < request.head.n_rows; ++i)
    rows_.push_back({request.rows + i * row_bytes, request.head.type, answer.row<float>(i)});
}

// Writes rows_ to decoded_.
void ExpertServer::decode(int64_t n_rows) {
  served_->team.run(n_rows, [&](int64_t row, int) {
    const int64_t dim = shape_.dim;
    auto* const to = reinterpret_cast<float*>(decoded_.data()) + row * dim;
    if (rows_[row].type == RowType::kF32)
      std::memcpy(to, rows_[row].from, dim * sizeof(float));
    else
      served_->kernels.decode({rows_[row].from, cpu::WeightType::kBF16, to, dim});
  });
}

// sums [n_rows, dim] of the rows x, which are float too.
void ExpertServer::add_experts(int layer, int64_t n_rows, const void* x,
                               const ExpertRequest& routing, float* sums) {
  const int64_t n_active = shape_.n_active, dim = shape_.dim;
  // The pool only reads what it is given.
  const auto view = [&](const void* data, int64_t cols, DType of) {
    return TensorView{const_cast<void*>(data), n_rows, cols, cols, of};
  };
  const Ticket ticket =
      served_->experts.submit({.layer = layer,
                               .x = view(x, dim, DType::kF32),
                               .routing = {view(routing.ids, n_active, DType::kI32),
                                           view(routing.weights, n_active, DType::kF32)}});
  std::fill_n(sums, n_rows * dim, 0.0f);
  served_->experts.add_to(ticket, view(sums, dim, DType::kF32));
}

// Makes what progress is possible. Returns false once all is done after end().
bool ExpertServer::serve_connections(bool may_connect) {
  if (leave_by_ == Clock::time_point() && (ends_ || options_.is_asked_to_end())) {
    leave_by_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(options_.drain);
    listener_.reset();
    say_goodbye();
  }
  if (listener_ && may_connect) accept();
  progress_peers();
  if (leave_by_ == Clock::time_point()) loads_->begin_next();
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
    if (peer->progress()) return false;
    release(*peer);
    return true;
  });
}

// Its number may be another one's from now on.
void ExpertServer::release(Peer& peer) {
  if (peer.slot() < 0) return;
  batcher_->left(peer.slot());
  loads_->left(peer.slot());
  slots_[peer.slot()] = nullptr;
  const Counts all = counts();
  options_.note(fmt::format("a backbone has left; {} of {} batches had rows of several backbones",
                            all.n_shared, all.n_batches));
}

// Nothing is computed. Who asked for the experts is told next, others when they connect or ask.
void ExpertServer::finish_load() {
  options_.note(loads_->finish());
  describe();
}

// What backbones are told that connect from now on.
void ExpertServer::describe() {
  welcome_.experts = loads_->experts();
  // A welcome that is being sent changes only from one valid answer to the other.
  const std::vector<std::byte> bytes = bytes_of(welcome_);
  std::copy(bytes.begin(), bytes.end(), welcome_bytes_.begin());
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
