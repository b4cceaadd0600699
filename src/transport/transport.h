// Connections over which messages travel in order. Nothing here waits except Transport::connect()
// and MessageWaiter::wait(), and no thread is created: who uses a connection calls progress().
// tcp.h implements it, and ucx.h with shared memory and RDMA for what follows a handshake.
#pragma once
#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "transport/message.h"
#include "transport/secret.h"

namespace tandem {

class MessageConnection {
 public:
  virtual ~MessageConnection() = default;
  // Sends a message whose body consists of these parts, one after another, as progress() is called.
  // The parts must not change before is_sent(). Throws ConnectionError.
  virtual void send(MessageKind kind, uint64_t number, std::span<const MessageBytes> body) = 0;
  // Whether all that was given to send() has left this process.
  virtual bool is_sent() const = 0;
  // Sends and receives what it can without waiting, and returns whether any byte has come. Throws
  // ConnectionError when the connection is closed or lost, and what the sink throws; the connection
  // must not be used after either.
  virtual bool progress(MessageSink& sink) = 0;
  // Whether progress() receives; true at first. The bytes that come meanwhile stay in the network.
  virtual void set_reading(bool reads) = 0;
  // Encrypts what is sent and received from now on, by TLS 1.3 with this key, which the other side
  // has too; one side is the client. All that was given to send() has been sent. Bytes that are not
  // encrypted with the key make progress() throw.
  virtual void encrypt(const SessionKey& key, bool is_client) = 0;

  // A path is another way to the peer than the socket, which remains: its end is the end of the
  // connection. What is sent by a path is not encrypted.
  // What the peer needs to send by a path; empty where this transport has none. It stays the same
  // as long as the connection. Throws PathError.
  virtual MessageBytes path_address() { return {}; }
  // Prepares to send to the address that the peer's path_address() has returned. Throws PathError
  // if it is malformed or not reached.
  virtual void find_path(MessageBytes) { throw PathError("this program has only sockets"); }
  // After find_path(). All that was given to send() has been sent, and all that follows takes the
  // path, in both directions.
  virtual void use_path() {}
};

class MessageListener {
 public:
  virtual ~MessageListener() = default;
  // A connection that a peer has made; null: there is none.
  virtual std::unique_ptr<MessageConnection> accept() = 0;
  virtual int port() const = 0;
  // Whether only this machine can connect to it.
  virtual bool is_local() const = 0;
};

// Sleeps until connections of its transport may make progress. For one thread, except wake().
class MessageWaiter {
 public:
  virtual ~MessageWaiter() = default;
  // Returns when a connection can be progressed, the listener, which may be null, has a connection,
  // wake() was called since the last return, or so much time is over; sometimes earlier. False: the
  // listener has no connection.
  virtual bool wait(std::span<MessageConnection* const> connections, MessageListener* listener,
                    std::chrono::nanoseconds at_most) = 0;
  virtual void wake() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Throws Error for an address that is malformed, ConnectionError if nothing answers in this time.
  virtual std::unique_ptr<MessageConnection> connect(const std::string& address,
                                                     std::chrono::milliseconds at_most) = 0;
  // Throws Error for an address that cannot be listened on.
  virtual std::unique_ptr<MessageListener> listen(const std::string& address) = 0;
  virtual std::unique_ptr<MessageWaiter> waiter() = 0;
};

}  // namespace tandem
