// What a server that computes prompts (prefill) and one that uses their keys (decode) say to each
// other after the handshake: the bodies of the messages. All numbers are little-endian.
//
// A decode server sends a kRequest: first_page and n_tokens (int32_t each), then the ids. The keys
// of all tokens but the last are wanted; the last page may be partly filled. The prefill server
// sends one kAnswer a page, in ascending order, with the keys as its body, and a kEnd. Answers are
// numbered by page_number().
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "transport/message.h"

namespace tandem {

constexpr uint32_t kKvProtocolVersion = 0x4b560003;  // no worker has this one

// What a prefill server has.
struct KvWelcome {
  uint64_t model = 0;      // model_identity()
  int64_t key_bytes = 0;   // of a page, as StepRunner::key_bytes()
  int32_t page_size = 0;   // tokens
  int64_t max_tokens = 0;  // of a request
  std::string cache_type;  // of the numbers, as "bf16"
  // Devices, kernels, formats: with the same, answers have equal bits. Cut where it is longer than
  // 4000 bytes.
  std::string arithmetic;
};
constexpr uint64_t kMostKvWelcomeBytes = 4096;
std::vector<std::byte> bytes_of(const KvWelcome& welcome);
// Throws ProtocolError.
KvWelcome kv_welcome_from(MessageBytes body);

struct KvRequest {
  int32_t first_page = 0;
  std::vector<int32_t> tokens;
};
constexpr uint64_t most_bytes_of_request(int64_t max_tokens) {
  return 8 + 4 * static_cast<uint64_t>(max_tokens);
}
std::vector<std::byte> bytes_of(const KvRequest& request);
// Throws ProtocolError for a length that does not fit, another number of tokens, tokens that are
// not below n_vocabulary, and a first page that is none of theirs.
KvRequest kv_request_from(MessageBytes body, int page_size, int n_vocabulary);

// The number of the answer with page `index` of a request, whose own number is below 2^32.
constexpr uint64_t page_number(uint64_t request, int index) {
  return request << 32 | static_cast<uint32_t>(index);
}
constexpr uint64_t request_of_page(uint64_t number) { return number >> 32; }
constexpr int index_of_page(uint64_t number) { return static_cast<int>(number & 0x7fffffff); }

}  // namespace tandem
