#include "transport/handshake.h"

#include <cstring>

namespace tandem {
namespace {

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

template <class T>
T value_of(const std::vector<std::byte>& body) {
  if (body.size() != sizeof(T)) throw ProtocolError("a message of another length");
  T value;
  std::memcpy(&value, body.data(), sizeof value);
  return value;
}

template <class T>
MessageBytes bytes_of_value(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace

ClientHandshake::ClientHandshake(Transport& transport, const Options& options)
    : options_(options),
      waiter_(transport.waiter()),
      connection_(transport.connect(options.address, options.patience)) {
  connection_->set_reading(false);
}

std::vector<std::byte> ClientHandshake::welcome(uint64_t most_bytes) {
  const Secret& secret = options_.secret;
  const WorkerHello mine = {
      .version = options_.version, .protection = secret.protection(), .nonce = random_nonce()};
  send(MessageKind::kHello, bytes_of_value(mine));
  const auto theirs = value_of<WorkerHello>(receive(MessageKind::kHello, sizeof(WorkerHello)));
  require_same_protocol(mine, theirs, options_.peer, options_.option);
  const Mac proof = secret.proof(Prover::kBackbone, mine.nonce, theirs.nonce);
  send(MessageKind::kProof, bytes_of_value(proof));
  const auto verdict =
      value_of<WorkerVerdict>(receive(MessageKind::kVerdict, sizeof(WorkerVerdict)));
  require(verdict.accepted != 0, "{} has another secret: give both the same {}", options_.peer,
          options_.option);
  require(is_same(verdict.proof, secret.proof(Prover::kWorker, mine.nonce, theirs.nonce)),
          "{} does not know the secret, so it is not used", options_.peer);
  if (secret.protection() == Protection::kEncryption)
    connection_->encrypt(secret.session_key(mine.nonce, theirs.nonce), true);
  return receive(MessageKind::kWelcome, most_bytes);
}

void ClientHandshake::use_path() {
  const MessageBytes mine = connection_->path_address();
  if (mine.empty()) throw PathError("this program has only sockets");
  send(MessageKind::kPath, mine);
  const PathAnswer theirs = path_answer_from(receive(MessageKind::kPath, kMostPathBytes));
  if (!theirs.why_not.empty()) throw PathError(theirs.why_not);
  connection_->find_path(theirs.address);
  connection_->use_path();
}

std::unique_ptr<MessageConnection> ClientHandshake::take() {
  connection_->set_reading(true);
  return std::move(connection_);
}

void ClientHandshake::send(MessageKind kind, MessageBytes body) {
  connection_->send(kind, 0, std::span(&body, 1));
  Expected nothing(*connection_, kind, 0);
  const auto until = Clock::now() + options_.patience;
  while (!connection_->is_sent()) {
    wait(until);
    connection_->progress(nothing);
  }
}

std::vector<std::byte> ClientHandshake::receive(MessageKind kind, uint64_t most_bytes) {
  Expected message(*connection_, kind, most_bytes);
  connection_->set_reading(true);
  const auto until = Clock::now() + options_.patience;
  while (connection_->progress(message), !message.is_complete()) wait(until);
  return message.body();
}

void ClientHandshake::wait(Clock::time_point until) {
  const auto left = until - Clock::now();
  if (left <= Clock::duration::zero()) throw ConnectionError("no answer");
  MessageConnection* const connection = connection_.get();
  waiter_->wait(std::span(&connection, 1), nullptr, left);
}

void answer_path(MessageConnection& connection, MessageBytes address,
                 std::vector<std::byte>& answer) {
  PathAnswer mine;
  try {
    const MessageBytes own = connection.path_address();
    if (own.empty())
      throw PathError("it was not started with --worker-transport ucx or auto, or has no UCX");
    connection.find_path(address);
    mine.address.assign(own.begin(), own.end());
  } catch (const PathError& error) {
    mine.why_not = error.what();
  }
  answer = bytes_of(mine);
  const MessageBytes body = answer;
  connection.send(MessageKind::kPath, 0, std::span(&body, 1));
  if (mine.why_not.empty()) connection.use_path();
}

ServerHandshake::ServerHandshake(const Secret& secret, uint32_t version) : secret_(secret) {
  mine_ = {.version = version, .protection = secret.protection(), .nonce = random_nonce()};
}

std::span<std::byte> ServerHandshake::place(const MessageHeader& header) {
  const auto exactly = [&](MessageKind kind, auto& body) {
    if (header.kind != kind || header.n_bytes != sizeof body)
      throw ProtocolError("another message than the next one of a handshake");
    return std::as_writable_bytes(std::span(&body, 1));
  };
  if (stage_ == Stage::kHello) return exactly(MessageKind::kHello, theirs_);
  if (stage_ == Stage::kProof) return exactly(MessageKind::kProof, proof_);
  throw ProtocolError("an unexpected message");
}

void ServerHandshake::arrived(MessageConnection& connection, MessageBytes welcome) {
  const auto send = [&](MessageKind kind, MessageBytes body) {
    connection.send(kind, 0, std::span(&body, 1));
  };
  if (stage_ == Stage::kHello) {
    send(MessageKind::kHello, bytes_of_value(mine_));
    const bool fits = theirs_.version == mine_.version && theirs_.protection == mine_.protection;
    stage_ = fits ? Stage::kProof : Stage::kRefused;
    return;
  }
  const Mac expected = secret_.proof(Prover::kBackbone, theirs_.nonce, mine_.nonce);
  verdict_.accepted = is_same(proof_, expected) ? 1 : 0;
  stage_ = verdict_.accepted != 0 ? Stage::kAccepted : Stage::kRefused;
  if (is_accepted()) verdict_.proof = secret_.proof(Prover::kWorker, theirs_.nonce, mine_.nonce);
  send(MessageKind::kVerdict, bytes_of_value(verdict_));
  if (!is_accepted()) return;
  if (secret_.protection() == Protection::kEncryption)
    connection.encrypt(secret_.session_key(theirs_.nonce, mine_.nonce), false);
  send(MessageKind::kWelcome, welcome);
}

}  // namespace tandem
