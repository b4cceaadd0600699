#include "transport/message.h"

#include <cstring>

namespace tandem {

void MessageReader::received(size_t n, MessageSink& sink) {
  MessageHeader header;
  if (n_header_ < sizeof header_) {
    n_header_ += n;
    // The first bytes of a stranger are looked at before it has sent a whole header.
    std::memcpy(&header, header_.data(), sizeof header);
    if (n_header_ >= sizeof header.magic && header.magic != MessageHeader::kMagic)
      throw ProtocolError("the peer does not speak tandem's protocol");
    if (n_header_ < sizeof header_) return;
    if (header.kind < MessageKind::kHello || header.kind > kLastMessageKind || header.zero != 0)
      throw ProtocolError("a message of an unknown kind");
    body_ = sink.place(header);
    check(body_.size() == header.n_bytes, "a place for the whole body");
  } else {
    std::memcpy(&header, header_.data(), sizeof header);
    body_ = body_.subspan(n);
  }
  if (!body_.empty()) return;
  n_header_ = 0;
  sink.arrived(header);
}

}  // namespace tandem
