#include "prefill/kv_messages.h"

#include <algorithm>
#include <cstring>

namespace tandem {
namespace {

struct KvWelcomeHead {
  uint64_t model;
  int64_t key_bytes, max_tokens;
  int32_t page_size;
  uint16_t n_type, n_text;  // bytes of the texts, which follow
};
constexpr size_t kMostType = 16, kMostText = 4000;
static_assert(sizeof(KvWelcomeHead) + kMostType + kMostText <= kMostKvWelcomeBytes);

struct TokensHead {
  int32_t first_page, n_tokens;
};

}  // namespace

std::vector<std::byte> bytes_of(const KvWelcome& w) {
  check(w.cache_type.size() <= kMostType, "a short name");
  const std::string texts = w.cache_type + w.arithmetic.substr(0, kMostText);
  const KvWelcomeHead head = {.model = w.model,
                              .key_bytes = w.key_bytes,
                              .max_tokens = w.max_tokens,
                              .page_size = w.page_size,
                              .n_type = static_cast<uint16_t>(w.cache_type.size()),
                              .n_text = static_cast<uint16_t>(texts.size() - w.cache_type.size())};
  std::vector<std::byte> body(sizeof head + texts.size());
  std::memcpy(body.data(), &head, sizeof head);
  std::memcpy(body.data() + sizeof head, texts.data(), texts.size());
  return body;
}

KvWelcome kv_welcome_from(MessageBytes body) {
  KvWelcomeHead head;
  require_protocol(body.size() >= sizeof head, "a welcome of {} bytes", body.size());
  std::memcpy(&head, body.data(), sizeof head);
  require_protocol(head.n_type <= kMostType && head.n_text <= kMostText &&
                       body.size() == sizeof head + head.n_type + head.n_text,
                   "a welcome of {} bytes with texts of {} and {}", body.size(), head.n_type,
                   head.n_text);
  const auto* const text = reinterpret_cast<const char*>(body.data() + sizeof head);
  return {.model = head.model,
          .key_bytes = head.key_bytes,
          .page_size = head.page_size,
          .max_tokens = head.max_tokens,
          .cache_type = std::string(text, head.n_type),
          .arithmetic = std::string(text + head.n_type, head.n_text)};
}

std::vector<std::byte> bytes_of(const KvRequest& request) {
  const TokensHead head = {request.first_page, static_cast<int32_t>(request.tokens.size())};
  std::vector<std::byte> body(sizeof head + request.tokens.size() * sizeof(int32_t));
  std::memcpy(body.data(), &head, sizeof head);
  if (!request.tokens.empty())
    std::memcpy(body.data() + sizeof head, request.tokens.data(),
                request.tokens.size() * sizeof(int32_t));
  return body;
}

KvRequest kv_request_from(MessageBytes body, int page_size, int n_vocabulary) {
  TokensHead head;
  require_protocol(body.size() >= sizeof head, "a request of {} bytes", body.size());
  std::memcpy(&head, body.data(), sizeof head);
  require_protocol(
      head.n_tokens > 1 && body.size() == sizeof head + uint64_t(head.n_tokens) * sizeof(int32_t),
      "a request of {} bytes with {} tokens", body.size(), head.n_tokens);
  require_protocol(head.first_page >= 0 && head.first_page * int64_t{page_size} < head.n_tokens - 1,
                   "a request for page {} of {} tokens", head.first_page, head.n_tokens);
  KvRequest request = {head.first_page, std::vector<int32_t>(head.n_tokens)};
  std::memcpy(request.tokens.data(), body.data() + sizeof head,
              request.tokens.size() * sizeof(int32_t));
  for (const int32_t token : request.tokens)
    require_protocol(token >= 0 && token < n_vocabulary, "token {} of {}", token, n_vocabulary);
  return request;
}

}  // namespace tandem
