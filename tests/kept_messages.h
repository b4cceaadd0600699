// What tests of connections send, and what comes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace tandem {

inline std::vector<std::byte> pattern(size_t n, int seed) {
  std::vector<std::byte> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>((i * 31 + i / 251 + seed) % 256);
  return bytes;
}

// Writes bytes where the reader wants them; returns how many had room.
inline size_t give(MessageReader& reader, MessageBytes bytes) {
  size_t n = 0;
  for (const std::span<std::byte> place : reader.wanted()) {
    const size_t here = std::min(place.size(), bytes.size() - n);
    std::memcpy(place.data(), bytes.data() + n, here);
    n += here;
    if (here < place.size()) break;
  }
  return n;
}

// Keeps what comes, and refuses bodies above a limit.
class Kept final : public MessageSink {
 public:
  struct Message {
    MessageHeader header;
    std::vector<std::byte> body;
  };
  explicit Kept(uint64_t most_bytes = 1 << 30) : most_bytes_(most_bytes) {}
  std::span<std::byte> place(const MessageHeader& header) override {
    if (header.n_bytes > most_bytes_) throw ProtocolError("too long");
    body_.assign(header.n_bytes, std::byte{0xee});
    return body_;
  }
  void arrived(const MessageHeader& header) override {
    messages.push_back({header, body_});
    if (pauses && messages.size() == n_before_pause) pauses->set_reading(false);
  }
  std::vector<Message> messages;
  MessageConnection* pauses = nullptr;  // stops reading after so many messages; null: none does
  size_t n_before_pause = 0;

 private:
  const uint64_t most_bytes_;
  std::vector<std::byte> body_;
};

}  // namespace tandem
