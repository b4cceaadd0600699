#include "offload/workers/worker_link.h"

#include <cstring>

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kAgain(500);             // between two tries to connect
constexpr std::chrono::milliseconds kConnectPatience(2000);  // for each step of the handshake

// Takes the one message that is expected next, and leaves later ones in the connection.
class Expected final : public MessageSink {
 public:
  Expected(MessageConnection& connection, MessageKind kind, uint64_t most_bytes)
      : connection_(connection), kind_(kind), most_bytes_(most_bytes) {}
  std::span<std::byte> place(const MessageHeader& header) override {
    if (header.kind != kind_ || header.n_bytes > most_bytes_)
      throw ProtocolError(fmt::format("an unexpected message of kind {} and {} bytes",
                                      static_cast<int>(header.kind), header.n_bytes));
    body_.resize(header.n_bytes);
    return body_;
  }
  void arrived(const MessageHeader&) override {
    is_complete_ = true;
    connection_.set_reading(false);
  }
  bool is_complete() const { return is_complete_; }
  const std::vector<std::byte>& body() const { return body_; }

 private:
  MessageConnection& connection_;
  const MessageKind kind_;
  const uint64_t most_bytes_;
  std::vector<std::byte> body_;
  bool is_complete_ = false;
};

// The backbone's side of a handshake. Throws ConnectionError when an answer is late.
class Handshake {
 public:
  Handshake(Transport& transport, const WorkerLinkOptions& options)
      : options_(options),
        waiter_(transport.waiter()),
        connection_(transport.connect(options.address, kConnectPatience)) {
    connection_->set_reading(false);
  }

  // The worker tells its version and its random number before it learns anything but ours.
  WorkerWelcome run() {
    WorkerHello mine = {.has_secret = options_.secret.is_set(), .nonce = random_nonce()};
    send(MessageKind::kHello, mine);
    const auto theirs = receive<WorkerHello>(MessageKind::kHello);
    require_same_protocol(mine, theirs, fmt::format("the worker {}", options_.address));
    send(MessageKind::kProof, options_.secret.proof(Prover::kBackbone, mine.nonce, theirs.nonce));
    const auto verdict = receive<WorkerVerdict>(MessageKind::kVerdict);
    require(verdict.accepted != 0,
            "the worker {} has another secret: give both the same --worker-secret",
            options_.address);
    require(
        is_same(verdict.proof, options_.secret.proof(Prover::kWorker, mine.nonce, theirs.nonce)),
        "{} does not know the secret, so it is not the worker: it is not used", options_.address);
    return welcome_from(receive_bytes(MessageKind::kWelcome, kMostWelcomeBytes));
  }

  std::unique_ptr<MessageConnection> set_up(const WorkerSetup& setup) {
    send(MessageKind::kSetup, setup);
    receive_bytes(MessageKind::kReady, 0);
    connection_->set_reading(true);
    return std::move(connection_);
  }

 private:
  template <class T>
  void send(MessageKind kind, const T& body) {
    const MessageBytes part = std::as_bytes(std::span(&body, 1));
    connection_->send(kind, 0, std::span(&part, 1));
    Expected nothing(*connection_, kind, 0);
    const auto until = Clock::now() + kConnectPatience;
    while (!connection_->is_sent()) {
      wait(until);
      connection_->progress(nothing);
    }
  }

  std::vector<std::byte> receive_bytes(MessageKind kind, uint64_t most_bytes) {
    Expected message(*connection_, kind, most_bytes);
    connection_->set_reading(true);
    const auto until = Clock::now() + kConnectPatience;
    while (connection_->progress(message), !message.is_complete()) wait(until);
    return message.body();
  }

  template <class T>
  T receive(MessageKind kind) {
    const std::vector<std::byte> body = receive_bytes(kind, sizeof(T));
    if (body.size() != sizeof(T)) throw ProtocolError("a message of another length");
    T value;
    std::memcpy(&value, body.data(), sizeof value);
    return value;
  }

  void wait(Clock::time_point until) {
    const auto left = until - Clock::now();
    if (left <= Clock::duration::zero()) throw ConnectionError("no answer");
    MessageConnection* const connection = connection_.get();
    waiter_->wait(std::span(&connection, 1), nullptr, left);
  }

  const WorkerLinkOptions& options_;
  const std::unique_ptr<MessageWaiter> waiter_;
  std::unique_ptr<MessageConnection> connection_;
};

}  // namespace

// Takes what a worker sends after the handshake.
class WorkerLink::Receiver final : public MessageSink {
 public:
  // `answers` is null where no request is under way.
  Receiver(WorkerLink& link, AnswerSink* answers) : link_(link), answers_(answers) {}
  std::span<std::byte> place(const MessageHeader& header) override {
    if (header.kind == MessageKind::kAnswer && answers_)
      return answers_->place_of_answer(header.number, header.n_bytes);
    const bool is_known = header.kind == MessageKind::kBeat || header.kind == MessageKind::kGoodbye;
    if (!is_known || header.n_bytes != 0)
      throw ProtocolError(fmt::format("an unexpected message of kind {} and {} bytes",
                                      static_cast<int>(header.kind), header.n_bytes));
    return {};
  }
  void arrived(const MessageHeader& header) override {
    if (header.kind == MessageKind::kGoodbye && link_.state_ == State::kUp) {
      link_.down_since_ = Clock::now();
      link_.state_ = State::kLeaving;
    }
    if (header.kind != MessageKind::kAnswer) return;
    --link_.n_requests_;
    answers_->answered(header.number);
  }

 private:
  WorkerLink& link_;
  AnswerSink* const answers_;
};

WorkerLink::WorkerLink(Transport& transport, WorkerLinkOptions options)
    : transport_(transport), options_(std::move(options)), thread_([this] { run(); }) {}

WorkerLink::~WorkerLink() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

WorkerWelcome WorkerLink::ask() { return Handshake(transport_, options_).run(); }

void WorkerLink::keep(const WorkerWelcome& expected, int max_rows, MessageWaiter& changed) {
  {
    const std::lock_guard lock(mutex_);
    expected_ = expected;
    max_rows_ = max_rows;
    changed_ = &changed;
    down_since_ = Clock::now();
    begins_ = true;
  }
  stopped_.notify_all();
}

void WorkerLink::run() {
  std::unique_lock lock(mutex_);
  stopped_.wait(lock, [&] { return begins_ || stops_; });
  while (!stops_) {
    lock.unlock();
    const bool was_down = state_ == State::kDown;
    if (was_down)
      connect_again();
    else
      listen();
    const auto pause = state_ == State::kDown && was_down
                           ? kAgain
                           : std::max(std::chrono::milliseconds(5), options_.deadline / 4);
    lock.lock();
    stopped_.wait_for(lock, pause, [&] { return stops_; });
  }
}

void WorkerLink::connect_again() {
  try {
    Handshake handshake(transport_, options_);
    const WorkerWelcome welcome = handshake.run();
    require(welcome == expected_,
            "it has another model, other experts or other kernels than when this program started: "
            "start it as it was");
    const auto beat = std::max<int64_t>(1, options_.deadline.count() / 5);
    std::unique_ptr<MessageConnection> connection = handshake.set_up(
        {.beat_ms = static_cast<uint32_t>(beat), .max_rows = static_cast<uint32_t>(max_rows_)});
    {
      const std::lock_guard lock(in_use_);
      connection_ = std::move(connection);
      n_requests_ = 0;
      heard_ = Clock::now();
      state_ = State::kUp;
    }
    changed_->wake();
    options_.note(fmt::format("worker {} is up", options_.address));
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    if (why_down_ != error.what())
      options_.note(fmt::format("worker {} is down: {}", options_.address, error.what()));
    why_down_ = error.what();
  }
}

// Between steps.
void WorkerLink::listen() {
  const std::unique_lock lock(in_use_, std::try_to_lock);
  if (!lock.owns_lock() || !connection_) return;
  class Nothing final : public AnswerSink {
    std::span<std::byte> place_of_answer(uint64_t number, uint64_t) override {
      throw ProtocolError(fmt::format("an answer to request {}, which was not made", number));
    }
    void answered(uint64_t) override {}
  } nothing;
  try {
    Receiver receiver(*this, &nothing);
    if (connection_->progress(receiver)) heard_ = Clock::now();
    if (state_ == State::kLeaving) return lose("it has said goodbye", false);
    if (Clock::now() - heard_ > options_.deadline)
      lose(fmt::format("silent for {} ms", options_.deadline.count()), true);
  } catch (const Error& error) {
    lose(error.what(), state_ != State::kLeaving);
  }
}

void WorkerLink::lose(const std::string& why, bool is_failure) {
  connection_.reset();
  n_requests_ = 0;
  if (state_ == State::kUp) down_since_ = Clock::now();
  if (is_failure) ++n_failures_;
  {
    const std::lock_guard lock(mutex_);
    why_down_ = why;
  }
  state_ = State::kDown;
  options_.note(fmt::format("worker {} is down: {}", options_.address, why));
}

std::string WorkerLink::why_down() const {
  const std::lock_guard lock(mutex_);
  return why_down_;
}

WorkerStatus WorkerLink::status() const {
  return {.address = options_.address,
          .is_up = is_up(),
          .n_requests = n_all_requests_,
          .n_failures = n_failures_,
          .seconds = seconds_};
}

bool WorkerLink::take() {
  if (!is_up()) return false;
  in_use_.lock();
  if (is_up()) return true;
  in_use_.unlock();
  return false;
}

bool WorkerLink::request(uint64_t number, std::span<const MessageBytes> body) {
  if (n_requests_ == 0) heard_ = Clock::now();
  ++n_requests_;
  ++n_all_requests_;
  try {
    connection_->send(MessageKind::kRequest, number, body);
    return true;
  } catch (const Error& error) {
    lose(error.what(), state_ != State::kLeaving);
    return false;
  }
}

bool WorkerLink::progress(AnswerSink& sink) {
  try {
    Receiver receiver(*this, &sink);
    if (connection_->progress(receiver)) heard_ = Clock::now();
    if (n_requests_ == 0 || Clock::now() - heard_ <= options_.deadline) return true;
    lose(fmt::format("silent for {} ms", options_.deadline.count()), true);
  } catch (const Error& error) {
    lose(error.what(), true);
  }
  return false;
}

void WorkerLink::drop() { lose("its requests were given up", false); }

}  // namespace tandem
