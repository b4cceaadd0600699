#include "transport/message.h"

#include <algorithm>
#include <utility>

namespace tandem {

void require_header(const MessageHeader& header) {
  const bool is_known = header.kind >= MessageKind::kHello && header.kind <= kLastMessageKind;
  require_protocol(header.magic == MessageHeader::kMagic && is_known && header.zero == 0 &&
                       header.zeros == MessageHeader().zeros,
                   "a message of an unknown kind");
}

std::span<const std::span<std::byte>> MessageReader::wanted() {
  size_t n = 0;
  if (has_place_) {
    for (const std::span<std::byte> rest : {body_, padding_})
      if (!rest.empty()) wanted_[n++] = rest;
    wanted_[n++] = std::as_writable_bytes(std::span(&next_, 1));
  } else {
    wanted_[n++] = std::as_writable_bytes(std::span(&header_, 1)).subspan(n_header_);
  }
  return std::span(wanted_).first(n);
}

void MessageReader::received(size_t n, MessageSink& sink) {
  if (has_place_) {
    for (std::span<std::byte>* const rest : {&body_, &padding_}) {
      const size_t here = std::min(n, rest->size());
      *rest = rest->subspan(here);
      n -= here;
    }
    if (!body_.empty() || !padding_.empty()) return;
    const MessageHeader of_body = std::exchange(header_, next_);
    has_place_ = false;
    n_header_ = n;
    sink.arrived(of_body);
  } else {
    n_header_ += n;
  }
  // The first bytes of a stranger are looked at before it has sent a whole header.
  if (n_header_ >= sizeof header_.magic && header_.magic != MessageHeader::kMagic)
    throw ProtocolError("the peer does not speak tandem's protocol");
}

void MessageReader::begin(MessageSink& sink) {
  require_header(header_);
  body_ = sink.place(header_);
  check(body_.size() == header_.n_bytes, "a place for the whole body");
  padding_ = std::span(zeros_).first(padding_of(header_.n_bytes));
  has_place_ = !body_.empty();
  if (has_place_) return;
  n_header_ = 0;
  sink.arrived(header_);
}

}  // namespace tandem
