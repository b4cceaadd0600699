#include "prefill/kv_server.h"

#include <algorithm>
#include <deque>
#include <map>

namespace tandem {
namespace {

constexpr std::chrono::seconds kHandshakePatience(5);
constexpr std::chrono::milliseconds kBeat(100);
// Keys that a peer has not taken yet; a peer that is slower gets no more of that prompt.
constexpr int64_t kMostUnsentBytes = int64_t{2} << 30;
constexpr size_t kMostRequests = 1024;  // of a peer at a time

}  // namespace

// What the engine has computed for one peer. The engine's thread adds to it, also when the peer has
// left meanwhile.
class KvServer::Keys {
 public:
  struct Message {
    MessageKind kind;
    uint64_t number;
    BlockPool::Block body;
  };
  explicit Keys(std::shared_ptr<MessageWaiter> waiter) : waiter_(std::move(waiter)) {}

  // Returns false if the peer does not take it.
  bool add(Message message) {
    const std::lock_guard lock(mutex_);
    const auto n = std::ssize(message.body.span());
    if (is_closed_ || n_bytes_ + n > kMostUnsentBytes) return false;
    n_bytes_ += n;
    messages_.push_back(std::move(message));
    waiter_->wake();
    return true;
  }
  std::deque<Message> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(messages_, {});
  }
  void sent(int64_t n) {
    const std::lock_guard lock(mutex_);
    n_bytes_ -= n;
  }
  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    messages_.clear();
  }

 private:
  const std::shared_ptr<MessageWaiter> waiter_;
  std::mutex mutex_;
  std::deque<Message> messages_;
  int64_t n_bytes_ = 0;
  bool is_closed_ = false;
};

// A decode server, from its first byte on.
class KvServer::Peer final : public MessageSink {
 public:
  Peer(KvServer& server, std::unique_ptr<MessageConnection> connection)
      : server_(server),
        connection_(std::move(connection)),
        handshake_(server.options_.secret, kKvProtocolVersion),
        keys_(std::make_shared<Keys>(server.waiter_)) {}
  ~Peer() override {
    keys_->close();
    for (const auto& [number, id] : requests_) server_.engine_->abort(id);
  }

  // Returns false if the connection has ended.
  bool progress() {
    try {
      connection_->progress(*this);
      send_keys();
      if (is_served() && connection_->is_sent() && Clock::now() - last_sent_ >= kBeat)
        send({MessageKind::kBeat, 0, {}});
      if (handshake_.is_refused() && connection_->is_sent()) return false;
    } catch (const Error& error) {
      if (is_served())
        server_.options_.note(fmt::format("a decode server has left: {}", error.what()));
      return false;
    }
    return is_served() || Clock::now() - since_ < kHandshakePatience;
  }
  bool is_served() const { return handshake_.is_accepted(); }
  MessageConnection* connection() const { return connection_.get(); }
  void say_goodbye() {
    try {
      if (is_served()) send({MessageKind::kGoodbye, 0, {}});
    } catch (const Error&) {  // it has left
    }
  }

 private:
  std::span<std::byte> place(const MessageHeader& header) override {
    if (!handshake_.is_over()) return handshake_.place(header);
    const bool is_request = header.kind == MessageKind::kRequest &&
                            header.number < (uint64_t{1} << 32) &&
                            header.n_bytes <= most_bytes_of_request(server_.welcome_.max_tokens) &&
                            requests_.size() < kMostRequests && !requests_.count(header.number);
    const bool is_cancel = header.kind == MessageKind::kCancel && header.n_bytes == 0;
    if (!is_request && !is_cancel) throw ProtocolError("an unexpected message");
    body_.resize(header.n_bytes);
    return body_;
  }

  void arrived(const MessageHeader& header) override {
    if (!handshake_.is_over()) {
      handshake_.arrived(*connection_, server_.welcome_bytes_);
      if (handshake_.is_accepted()) server_.options_.note("a decode server has connected");
      if (handshake_.is_refused() && !server_.has_refused_)
        server_.options_.note(
            "a decode server with another secret, encryption or version was refused");
      if (handshake_.is_over()) server_.has_refused_ = handshake_.is_refused();
      last_sent_ = Clock::now();
    } else if (header.kind == MessageKind::kCancel) {
      const auto it = requests_.find(header.number);
      if (it == requests_.end()) return;  // it has ended meanwhile
      server_.engine_->abort(it->second);
      requests_.erase(it);
    } else {
      compute(header.number);
    }
  }

  void compute(uint64_t number) {
    KvRequest asked =
        kv_request_from(body_, server_.welcome_.page_size, server_.engine_->vocabulary_size());
    EngineRequest request;
    request.request.prompt = std::move(asked.tokens);
    request.request.max_new_tokens = 1;  // the engine's steps end with a token
    request.first_page = asked.first_page;
    const auto keys = keys_;
    const auto is_whole = std::make_shared<bool>(true);
    request.on_page = [keys, number, is_whole](int index, BlockPool::Block page) {
      // A page that is left out makes those after it useless.
      *is_whole = *is_whole &&
                  keys->add({MessageKind::kAnswer, page_number(number, index), std::move(page)});
    };
    request.on_event = [keys, number](const TokenEvent& event) {
      if (event.finish) keys->add({MessageKind::kEnd, number, {}});
      return true;
    };
    try {
      requests_[number] = server_.engine_->submit(std::move(request));
    } catch (const Error&) {  // the engine has failed, or the prompt does not fit
      send({MessageKind::kEnd, number, {}});
    }
  }

  void send_keys() {
    for (Keys::Message& message : keys_->take()) {
      if (message.kind == MessageKind::kEnd) requests_.erase(message.number);
      send(std::move(message));
    }
    if (!connection_->is_sent()) return;
    int64_t n = 0;
    for (const Keys::Message& message : sending_) n += std::ssize(message.body.span());
    if (n > 0) keys_->sent(n);
    sending_.clear();
  }

  void send(Keys::Message message) {
    const Keys::Message& kept = sending_.emplace_back(std::move(message));
    const MessageBytes body = kept.body.span();
    connection_->send(kept.kind, kept.number, std::span(&body, 1));
    last_sent_ = Clock::now();
  }

  KvServer& server_;
  std::unique_ptr<MessageConnection> connection_;
  const Clock::time_point since_ = Clock::now();
  Clock::time_point last_sent_{};
  ServerHandshake handshake_;
  std::vector<std::byte> body_;
  const std::shared_ptr<Keys> keys_;
  std::deque<Keys::Message> sending_;        // until the connection has sent all of it
  std::map<uint64_t, SequenceId> requests_;  // under way, by their numbers
};

KvServer::KvServer(Transport& transport, Options options)
    : options_(std::move(options)),
      listener_(transport.listen(options_.address)),
      waiter_(transport.waiter()) {
  require(listener_->is_local() || options_.secret.is_set(),
          "--kv-listen {}: other machines can connect to it: give both servers the same "
          "--kv-secret FILE",
          options_.address);
  thread_ = std::thread([this] { run(); });
}

KvServer::~KvServer() { end(); }

void KvServer::begin(Engine& engine, const KvWelcome& welcome) {
  const std::lock_guard lock(mutex_);
  engine_ = &engine;
  welcome_ = welcome;
  welcome_bytes_ = bytes_of(welcome);
  changed_.notify_all();
}

void KvServer::end() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  waiter_->wake();
  if (thread_.joinable()) thread_.join();
}

void KvServer::run() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return engine_ || ends_; });
    if (!engine_) return;
  }
  serve();
  for (const auto& peer : peers_) peer->say_goodbye();
  peers_.clear();
}

void KvServer::serve() {
  std::vector<MessageConnection*> waited;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (ends_) return;
    }
    while (peers_.size() < kMostPeers) {
      std::unique_ptr<MessageConnection> connection = listener_->accept();
      if (!connection) break;
      peers_.push_back(std::make_unique<Peer>(*this, std::move(connection)));
    }
    std::erase_if(peers_, [](const std::unique_ptr<Peer>& peer) { return !peer->progress(); });
    waited.clear();
    for (const auto& peer : peers_) waited.push_back(peer->connection());
    waiter_->wait(waited, peers_.size() < kMostPeers ? listener_.get() : nullptr, kBeat);
  }
}

}  // namespace tandem
