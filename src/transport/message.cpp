#include "transport/message.h"

#include <cstring>

namespace tandem {

void require_header(const MessageHeader& header) {
  const bool is_known = header.kind >= MessageKind::kHello && header.kind <= kLastMessageKind;
  require_protocol(header.magic == MessageHeader::kMagic && is_known && header.zero == 0 &&
                       header.zeros == MessageHeader().zeros,
                   "a message of an unknown kind");
}

void MessageReader::received(size_t n, MessageSink& sink) {
  MessageHeader header;
  if (n_header_ < sizeof header_) {
    n_header_ += n;
    // The first bytes of a stranger are looked at before it has sent a whole header.
    std::memcpy(&header, header_.data(), sizeof header);
    if (n_header_ >= sizeof header.magic && header.magic != MessageHeader::kMagic)
      throw ProtocolError("the peer does not speak tandem's protocol");
    if (n_header_ < sizeof header_) return;
    require_header(header);
    body_ = sink.place(header);
    check(body_.size() == header.n_bytes, "a place for the whole body");
    padding_ = std::span(zeros_).first(padding_of(header.n_bytes));
  } else {
    std::memcpy(&header, header_.data(), sizeof header);
    std::span<std::byte>& missing = body_.empty() ? padding_ : body_;
    missing = missing.subspan(n);
  }
  if (!body_.empty() || !padding_.empty()) return;
  n_header_ = 0;
  sink.arrived(header);
}

}  // namespace tandem
