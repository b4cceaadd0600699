// A secret that two processes share, by which each knows that the other one may be talked to
// (HMAC-SHA256 over fresh random numbers of both). What they say afterwards is neither encrypted
// nor signed.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tandem {

using Nonce = std::array<std::byte, 32>;
using Mac = std::array<std::byte, 32>;

Nonce random_nonce();

enum class Prover : uint8_t { kBackbone, kWorker };

class Secret {
 public:
  Secret() = default;  // none: anyone may be talked to
  // The content of the file without the newline at its end, 16 to 4096 bytes. Throws Error.
  static Secret from_file(const std::string& file);
  explicit Secret(std::string text) : text_(std::move(text)) {}
  bool is_set() const { return !text_.empty(); }
  // What `side` sends to prove that it knows the secret; zeros without one.
  Mac proof(Prover side, const Nonce& of_backbone, const Nonce& of_worker) const;

 private:
  std::string text_;
};

// Takes the same time wherever they differ.
bool is_same(const Mac& a, const Mac& b);

}  // namespace tandem
