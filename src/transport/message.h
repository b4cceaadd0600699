// Messages between two processes, a client and a server: a header of fixed size, and a body whose
// length the receiver accepts or refuses before it has a byte of it. Zeros fill the body up to a
// multiple of 64 bytes, so that every body begins at such a multiple of the stream: the kernel's
// copies into and out of a socket take up to three times as long where both ends are not aligned
// (docs/measurements/workers.md).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/run_error.h"

namespace tandem {

using MessageBytes = std::span<const std::byte>;

enum class MessageKind : uint16_t {
  kHello = 1,  // both ways: version and nonce
  kProof,      // from the backbone: it knows the secret
  kVerdict,    // from the worker: whether that is so, and that it knows the secret too
  kWelcome,    // from the worker: its model and its experts
  kSetup,      // from the backbone: how it will use them
  kReady,      // from the worker: it takes requests
  kRequest,    // from the backbone: rows of one layer
  kAnswer,     // from the worker: their sums, under the number of the request
  kBeat,       // from the worker: it is alive
  kGoodbye,    // from the worker: it answers what it has, and takes no more requests
  kEnd,        // from the server: the request of this number has no more answers
  kCancel,     // from the client: the request of this number is not wanted any more
  kLoad,       // from the backbone: experts that the worker is to load
  kLoading,    // from the worker: how far that is, and whether it refuses
  kPath,       // both ways, before the setup: an address beside the socket
  kUses,       // from the backbone: experts of a worker whose experts move that it uses
};
constexpr auto kLastMessageKind = MessageKind::kUses;

struct MessageHeader {
  static constexpr uint32_t kMagic = 0x6d646e74;  // "tndm"
  uint32_t magic = kMagic;
  MessageKind kind{};
  uint16_t zero = 0;
  uint64_t number = 0;   // of the request; 0 for other kinds
  uint64_t n_bytes = 0;  // of the body, without the zeros behind it
  std::array<uint64_t, 5> zeros{};
};
constexpr size_t kMessageAlignment = 64;
static_assert(sizeof(MessageHeader) == kMessageAlignment);
// The zeros that follow a body of n_bytes.
constexpr size_t padding_of(uint64_t n_bytes) { return -n_bytes % kMessageAlignment; }

// The peer does not keep to the protocol, or is no tandem at all.
struct ProtocolError : RunError {
  using RunError::RunError;
};
// Throws ProtocolError unless `ok`.
template <class... Args>
void require_protocol(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) throw ProtocolError(fmt::format(message, std::forward<Args>(args)...));
}
// The connection was closed or reset, or could not be made.
struct ConnectionError : RunError {
  using RunError::RunError;
};
// There is no path to the peer beside the socket.
struct PathError : RunError {
  using RunError::RunError;
};
// Throws ProtocolError for a header that no tandem sends.
void require_header(const MessageHeader& header);

// What takes the messages of a connection.
class MessageSink {
 public:
  virtual ~MessageSink() = default;
  // The memory for the body of a message, n_bytes of the header. Throws ProtocolError for a kind or
  // a length that is not expected now.
  virtual std::span<std::byte> place(const MessageHeader& header) = 0;
  // The body is in its place. Throws ProtocolError for one that is malformed.
  virtual void arrived(const MessageHeader& header) = 0;
};

// Divides a stream of bytes into messages.
class MessageReader {
 public:
  static constexpr size_t kMostPlaces = 3;
  // Where the next bytes of the stream are to be written, one place after another: the rest of a
  // header; or the rest of a body, of the zeros behind it, and the next header. The first one is
  // not empty.
  std::span<const std::span<std::byte>> wanted();
  // So many bytes of wanted() were written. Throws what the sink throws, and ProtocolError for
  // bytes that are no header; then nothing more is to be read.
  void received(size_t n, MessageSink& sink);
  // Whether a whole header has come, whose body has no place yet. begin() is called before the next
  // wanted().
  bool has_header() const { return !has_place_ && n_header_ == sizeof header_; }
  // Asks for the place of the body; a message without one has arrived. Throws as received() does.
  void begin(MessageSink& sink);

 private:
  MessageHeader header_, next_;   // of the message that comes, and of the one behind it
  size_t n_header_ = 0;           // bytes of header_ that have come
  bool has_place_ = false;        // the body that follows header_
  std::span<std::byte> body_;     // what is missing of it
  std::span<std::byte> padding_;  // and of the zeros behind it, which are not looked at
  std::array<std::byte, kMessageAlignment> zeros_;
  std::array<std::span<std::byte>, kMostPlaces> wanted_;
};

}  // namespace tandem
