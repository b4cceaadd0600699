// How two processes begin a connection: each learns the other's version and random number, then
// that it knows the same secret. Only fixed memory is used for a peer before that.
#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/clock.h"
#include "transport/expert_messages.h"
#include "transport/transport.h"

namespace tandem {

// The side that connects.
class ClientHandshake {
 public:
  struct Options {
    std::string address;
    std::string peer;    // what messages call the other side: "the worker 10.0.0.2:9000"
    std::string option;  // that gives the secret: "--worker-secret"
    const Secret& secret;
    uint32_t version = kProtocolVersion;
    std::chrono::milliseconds patience{2000};  // for each step
  };
  // Connects. Throws ConnectionError; options and transport outlive the object.
  ClientHandshake(Transport& transport, const Options& options);
  // What the other side tells after both proofs, at most so many bytes. Throws ConnectionError when
  // an answer is late, ProtocolError for another protocol, and Error for another secret.
  std::vector<std::byte> welcome(uint64_t most_bytes);
  // After welcome(): both sides go on by a path beside the socket. Throws PathError where one of
  // them does not, and ConnectionError.
  void use_path();
  // The connection, after welcome().
  std::unique_ptr<MessageConnection> take();
  // Sends a message and waits for one, whose body is returned.
  void send(MessageKind kind, MessageBytes body);
  std::vector<std::byte> receive(MessageKind kind, uint64_t most_bytes);

 private:
  void wait(Clock::time_point until);

  const Options& options_;
  const std::unique_ptr<MessageWaiter> waiter_;
  std::unique_ptr<MessageConnection> connection_;
};

// What the side that listens does when a peer, after the welcome, has sent the address of its path:
// answers by the socket, and goes on by the path unless the answer says why not. `answer`, which is
// written, must not change before it is sent. Throws ConnectionError.
void answer_path(MessageConnection& connection, MessageBytes address,
                 std::vector<std::byte>& answer);

// The side that listens. It proves that it knows the secret only to a peer that has proved it.
class ServerHandshake {
 public:
  ServerHandshake(const Secret& secret, uint32_t version);
  // As a MessageSink's calls, until is_over(). What arrived() sends refers to this object and to
  // `welcome`.
  std::span<std::byte> place(const MessageHeader& header);
  void arrived(MessageConnection& connection, MessageBytes welcome);
  bool is_accepted() const { return stage_ == Stage::kAccepted; }
  // The peer was told: the connection is to be closed once all is sent.
  bool is_refused() const { return stage_ == Stage::kRefused; }
  bool is_over() const { return is_accepted() || is_refused(); }

 private:
  enum class Stage : uint8_t { kHello, kProof, kAccepted, kRefused };

  const Secret& secret_;
  Stage stage_ = Stage::kHello;
  WorkerHello mine_, theirs_;
  Mac proof_{};
  WorkerVerdict verdict_;
};

}  // namespace tandem
