// Arbitrary bytes from a peer of an expert worker or of a prefill server, which run as they do in
// the program: from the first byte on, or after a handshake that this target makes with the right
// secret. The server must say nothing that its protocol does not allow, tell strangers nothing but
// its version, and serve the next peer. Input: a byte that chooses the server, the secret and where
// the bytes begin, a byte for the lengths of the pieces, the bytes.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>

#include "offload/workers/expert_server.h"
#include "prefill/kv_server.h"
#include "tests/fuzz/simulated_engine.h"
#include "tests/kept_messages.h"

namespace {

using namespace tandem;
using namespace tandem::fuzz;

constexpr std::chrono::seconds kPatience(8);  // below the fuzzer's time limit

// Bytes in both directions of one connection. The peer is this target's, and the server has the
// MemoryConnection.
struct Wire {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::vector<std::byte>> to_server;  // pieces
  std::vector<std::byte> to_peer;
  bool peer_has_left = false, server_has_left = false;
  bool is_read = false;  // the server has looked and found nothing
};

class MemoryWaiter final : public MessageWaiter {
 public:
  bool wait(std::span<MessageConnection* const>, MessageListener*,
            std::chrono::nanoseconds at_most) override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, at_most, [&] { return woken_; });
    woken_ = false;
    return true;
  }
  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

class MemoryConnection final : public MessageConnection {
 public:
  explicit MemoryConnection(std::shared_ptr<Wire> wire) : wire_(std::move(wire)) {}
  ~MemoryConnection() override {
    const std::lock_guard lock(wire_->mutex);
    wire_->server_has_left = true;
    wire_->changed.notify_all();
  }
  void send(MessageKind kind, uint64_t number, std::span<const MessageBytes> body) override {
    MessageHeader header{.kind = kind, .number = number};
    for (const MessageBytes part : body) header.n_bytes += part.size();
    const std::lock_guard lock(wire_->mutex);
    const auto add = [&](MessageBytes bytes) {
      wire_->to_peer.insert(wire_->to_peer.end(), bytes.begin(), bytes.end());
    };
    add(std::as_bytes(std::span(&header, 1)));
    for (const MessageBytes part : body) add(part);
    wire_->to_peer.resize(wire_->to_peer.size() + padding_of(header.n_bytes));
    wire_->changed.notify_all();
  }
  bool is_sent() const override { return true; }
  void set_reading(bool reads) override { reads_ = reads; }
  void encrypt(const SessionKey&, bool) override { check(false, "the secret only proves"); }
  bool progress(MessageSink& sink) override {
    bool any = false;
    while (reads_) {
      if (reader_.has_header()) {  // from before a pause
        reader_.begin(sink);
        any = true;
        continue;
      }
      std::vector<std::byte> piece;
      {
        const std::lock_guard lock(wire_->mutex);
        if (wire_->to_server.empty()) {
          if (wire_->peer_has_left) throw ConnectionError("the peer has left");
          wire_->is_read = true;
          wire_->changed.notify_all();
          return any;
        }
        piece = std::move(wire_->to_server.front());
        wire_->to_server.pop_front();
      }
      any = true;
      MessageBytes left = piece;
      while (reads_ && (!left.empty() || reader_.has_header())) {
        if (reader_.has_header()) {
          reader_.begin(sink);
          continue;
        }
        const size_t n = give(reader_, left);
        check(n > 0, "room for a byte");
        left = left.subspan(n);
        reader_.received(n, sink);
      }
      const std::lock_guard lock(wire_->mutex);
      if (!left.empty()) wire_->to_server.emplace_front(left.begin(), left.end());
    }
    return any;
  }

 private:
  const std::shared_ptr<Wire> wire_;
  MessageReader reader_;
  bool reads_ = true;
};

class MemoryTransport final : public Transport {
 public:
  std::unique_ptr<MessageConnection> connect(const std::string&,
                                             std::chrono::milliseconds) override {
    throw ConnectionError("only the server's side is here");
  }
  std::unique_ptr<MessageListener> listen(const std::string&) override {
    return std::make_unique<Listener>(*this);
  }
  std::unique_ptr<MessageWaiter> waiter() override {
    auto made = std::make_unique<MemoryWaiter>();
    waiter_ = made.get();
    return made;
  }
  void add(std::shared_ptr<Wire> wire) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(wire));
  }
  void wake() { waiter_->wake(); }

 private:
  class Listener final : public MessageListener {
   public:
    explicit Listener(MemoryTransport& transport) : transport_(transport) {}
    std::unique_ptr<MessageConnection> accept() override {
      const std::lock_guard lock(transport_.mutex_);
      if (transport_.waiting_.empty()) return nullptr;
      auto made = std::make_unique<MemoryConnection>(std::move(transport_.waiting_.front()));
      transport_.waiting_.pop_front();
      return made;
    }
    int port() const override { return 1; }
    bool is_local() const override { return true; }

   private:
    MemoryTransport& transport_;
  };

  std::mutex mutex_;
  std::deque<std::shared_ptr<Wire>> waiting_;
  MemoryWaiter* waiter_ = nullptr;
};

// What a side has sent, message by message, up to bytes that are no message.
class Sent final : public MessageSink {
 public:
  struct Message {
    MessageHeader header;
    std::vector<std::byte> body;
  };
  explicit Sent(MessageBytes bytes) {
    MessageReader reader;
    try {
      while (!bytes.empty()) {
        const size_t n = give(reader, bytes);
        bytes = bytes.subspan(n);
        reader.received(n, *this);
        if (reader.has_header()) reader.begin(*this);
      }
      is_whole = true;
    } catch (const ProtocolError&) {
    }
  }
  std::span<std::byte> place(const MessageHeader& header) override {
    require_protocol(header.n_bytes <= kMostWelcomeBytes, "a long message");
    body_.resize(header.n_bytes);
    return body_;
  }
  void arrived(const MessageHeader& header) override { all.push_back({header, body_}); }
  // The numbers of the requests.
  std::vector<uint64_t> numbers() const {
    std::vector<uint64_t> numbers;
    for (const Message& message : all)
      if (message.header.kind == MessageKind::kRequest) numbers.push_back(message.header.number);
    return numbers;
  }

  std::vector<Message> all;
  bool is_whole = false;

 private:
  std::vector<std::byte> body_;
};

// The side of a backbone or a decode server.
class Client {
 public:
  Client(MemoryTransport& transport, const Secret& secret, uint32_t version)
      : transport_(transport), secret_(secret), version_(version) {
    transport_.add(wire_);
    transport_.wake();
  }
  ~Client() {
    {
      const std::lock_guard lock(wire_->mutex);
      wire_->peer_has_left = true;
    }
    await([&] { return wire_->server_has_left; });
  }
  Client(const Client&) = delete;

  void send(MessageBytes bytes, size_t piece) {
    {
      const std::lock_guard lock(wire_->mutex);
      wire_->is_read = false;
      for (; !bytes.empty(); bytes = bytes.subspan(std::min(piece, bytes.size()))) {
        const MessageBytes first = bytes.first(std::min(piece, bytes.size()));
        wire_->to_server.emplace_back(first.begin(), first.end());
      }
    }
    await([&] { return wire_->is_read || wire_->server_has_left; });
  }
  void send(MessageKind kind, MessageBytes body) {
    const MessageHeader header{.kind = kind, .n_bytes = body.size()};
    std::vector<std::byte> bytes(sizeof header);
    std::memcpy(bytes.data(), &header, sizeof header);
    bytes.insert(bytes.end(), body.begin(), body.end());
    bytes.resize(bytes.size() + padding_of(header.n_bytes));
    send(bytes, bytes.size());
  }
  // With the right secret.
  void shake_hands() {
    WorkerHello mine = {.version = version_, .protection = secret_.protection(), .nonce = {}};
    send(MessageKind::kHello, std::as_bytes(std::span(&mine, 1)));
    WorkerHello theirs;
    const std::vector<std::byte> hello = body_of(MessageKind::kHello);
    check(hello.size() == sizeof theirs, "a hello");
    std::memcpy(&theirs, hello.data(), sizeof theirs);
    send(MessageKind::kProof, secret_.proof(Prover::kBackbone, mine.nonce, theirs.nonce));
    body_of(MessageKind::kWelcome);
  }
  // Waits for the first message of this kind.
  std::vector<std::byte> body_of(MessageKind kind) {
    std::vector<std::byte> body;
    await([&] {
      for (const Sent::Message& message : Sent(wire_->to_peer).all)
        if (message.header.kind == kind) {
          body = message.body;
          return true;
        }
      return false;
    });
    return body;
  }
  // Once so many answers have come, or a while is over.
  std::vector<Sent::Message> received(size_t n_answers) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
    while (true) {
      transport_.wake();
      std::unique_lock lock(wire_->mutex);
      Sent sent(wire_->to_peer);
      check(sent.is_whole, "a server sends messages");
      const auto n = std::count_if(sent.all.begin(), sent.all.end(), [](const auto& message) {
        return message.header.kind == MessageKind::kAnswer ||
               message.header.kind == MessageKind::kEnd;
      });
      if (static_cast<size_t>(n) >= n_answers || wire_->server_has_left ||
          std::chrono::steady_clock::now() > until)
        return sent.all;
      wire_->changed.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

 private:
  template <class Condition>
  void await(Condition is_so) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    std::unique_lock lock(wire_->mutex);
    while (!is_so()) {
      lock.unlock();
      transport_.wake();
      lock.lock();
      if (is_so()) break;
      wire_->changed.wait_for(lock, std::chrono::milliseconds(1));
      check(std::chrono::steady_clock::now() < until, "the server goes on");
    }
  }

  MemoryTransport& transport_;
  const Secret& secret_;
  const uint32_t version_;
  const std::shared_ptr<Wire> wire_ = std::make_shared<Wire>();
};

ModelConfig served_config() {
  ModelConfig config;
  config.dim = 32;
  config.n_layers = 2;
  config.n_dense_layers = 1;
  config.router.n_experts = 4;
  config.router.n_active = 2;
  return config;
}

// A worker with experts 0, 2 and 3, whose sums are zeros.
class Worker {
 public:
  explicit Worker(const Secret& secret) : server_(transport_, {.secret = secret}) {
    thread_ = std::thread([this] {
      Team team(1);
      NoExperts experts;
      cpu::KernelTable kernels{};
      kernels.decode = [](const cpu::DecodeArgs& a) { std::fill_n(a.to, a.n, 0.0f); };
      server_.run({.config = config_,
                   .kernels = kernels,
                   .experts = experts,
                   .team = team,
                   .welcome = {.model = 1,
                               .n_layers = 2,
                               .n_active = 2,
                               .dim = 32,
                               .max_rows = 4,
                               .takes_bf16 = true,
                               .experts = ExpertsOfLayers(2, {true, false, true, true}),
                               .arithmetic = "zeros"}});
    });
  }
  ~Worker() {
    server_.end();
    thread_.join();
  }
  MemoryTransport& transport() { return transport_; }

 private:
  const ModelConfig config_ = served_config();
  MemoryTransport transport_;
  ExpertServer server_;
  std::thread thread_;
};

class Prefill {
 public:
  Prefill(SimulatedEngine& simulated, const Secret& secret)
      : server_(transport_, {.secret = secret}) {
    server_.begin(simulated.engine(), {.model = 1,
                                       .key_bytes = 64,
                                       .page_size = kPageSize,
                                       .max_tokens = SimulatedEngine::kContext,
                                       .cache_type = "fp32",
                                       .arithmetic = "zeros"});
  }
  ~Prefill() { server_.end(); }
  MemoryTransport& transport() { return transport_; }

 private:
  MemoryTransport transport_;
  KvServer server_;
};

struct World {
  // OpenSSL, begun before it, is ended after the threads that use it.
  const Nonce random = random_nonce();
  const Secret none{}, shared{"a secret of this target", false};
  SimulatedEngine simulated;
  Worker open_worker{none}, worker{shared};
  Prefill open_prefill{simulated, none}, prefill{simulated, shared};
};

void check_sent(const std::vector<Sent::Message>& all, const std::vector<uint64_t>& numbers,
                bool is_stranger, bool is_worker) {
  size_t n_answers = 0;
  const auto is_asked = [&](uint64_t number) {
    return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
  };
  for (const auto& [header, body] : all) {
    switch (header.kind) {
      case MessageKind::kHello:
        check(body.size() == sizeof(WorkerHello), "a hello");
        continue;
      case MessageKind::kVerdict: {
        WorkerVerdict verdict;
        check(body.size() == sizeof verdict, "a verdict");
        std::memcpy(&verdict, body.data(), sizeof verdict);
        check(!is_stranger || (verdict.accepted == 0 && verdict.proof == Mac{}),
              "a stranger is refused, and learns no proof");
        continue;
      }
      default:
        check(!is_stranger, "a stranger is told nothing else");
    }
    switch (header.kind) {
      case MessageKind::kWelcome:
      case MessageKind::kBeat:
        continue;
      case MessageKind::kReady:
      case MessageKind::kPath:
        check(is_worker, "of a worker");
        continue;
      case MessageKind::kAnswer:
        if (is_worker) {
          check(body.size() % (32 * sizeof(float)) == 0 && body.size() <= 512, "rows");
          check(n_answers < numbers.size() && header.number == numbers[n_answers],
                "answers in the order of the requests");
          ++n_answers;
        } else {
          check(!body.empty() && is_asked(request_of_page(header.number)), "a page");
        }
        continue;
      case MessageKind::kEnd:
        check(!is_worker && body.empty() && is_asked(header.number), "of a prefill server");
        continue;
      default:
        check(false, "a message that no server sends");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2 || size > 4096) return 0;
  static World world;
  const bool is_worker = (data[0] & 1) == 0, is_stranger = (data[0] & 2) != 0,
             has_secret = is_stranger || (data[0] & 4) != 0;
  MemoryTransport& transport = is_worker
                                   ? (has_secret ? world.worker : world.open_worker).transport()
                                   : (has_secret ? world.prefill : world.open_prefill).transport();
  const Secret& secret = has_secret ? world.shared : world.none;
  const uint32_t version = is_worker ? kProtocolVersion : kKvProtocolVersion;
  {
    Client client(transport, secret, version);
    if (!is_stranger) client.shake_hands();
    const MessageBytes bytes = std::as_bytes(std::span(data + 2, size - 2));
    const std::vector<uint64_t> numbers = Sent(bytes).numbers();
    client.send(bytes, std::max<size_t>(1, data[1]));
    check_sent(client.received(numbers.size()), numbers, is_stranger, is_worker);
  }
  Client next(transport, secret, version);
  next.shake_hands();
  return 0;
}
