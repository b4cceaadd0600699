// Arbitrary bytes as the bodies of messages between prefill and decode servers: they are refused,
// or they are what is written again. Input: a byte that chooses the message, the body.
#include <cstdint>
#include <cstring>

#include "prefill/kv_messages.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  if (size == 0) return 0;
  const MessageBytes body = std::as_bytes(std::span(data + 1, size - 1));
  const auto is_same = [&](const std::vector<std::byte>& bytes) {
    return bytes.size() == body.size() && std::memcmp(bytes.data(), body.data(), body.size()) == 0;
  };
  try {
    if (data[0] % 2 == 0) {
      check(is_same(bytes_of(kv_welcome_from(body))), "the same welcome again");
    } else {
      constexpr int kPage = 4, kVocabulary = 100;
      const KvRequest request = kv_request_from(body, kPage, kVocabulary);
      check(is_same(bytes_of(request)), "the same request again");
      check(request.first_page >= 0 &&
                request.first_page * kPage < static_cast<int>(request.tokens.size()) - 1,
            "a page of the tokens");
      for (const int32_t token : request.tokens)
        check(token >= 0 && token < kVocabulary, "a token of the vocabulary");
    }
  } catch (const ProtocolError&) {
  }
  return 0;
}
