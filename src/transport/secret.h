// A secret that two processes share, by which each knows that the other one may be talked to
// (HMAC-SHA256 over fresh random numbers of both), and from which the key is made that encrypts
// what they say afterwards.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tandem {

using Nonce = std::array<std::byte, 32>;
using Mac = std::array<std::byte, 32>;
using SessionKey = std::array<std::byte, 32>;

Nonce random_nonce();

enum class Prover : uint8_t { kBackbone, kWorker };

// What protects a connection. Both sides have the same.
enum class Protection : uint32_t {
  kNone,
  kProof,       // a shared secret: each knows who the other is
  kEncryption,  // also TLS: no third party can read or change what they say
};

class Secret {
 public:
  Secret() = default;  // none: anyone may be talked to
  // The content of the file without the newline at its end, 16 to 4096 bytes. Throws Error.
  static Secret from_file(const std::string& file, bool encrypts = true);
  explicit Secret(std::string text, bool encrypts = true)
      : text_(std::move(text)), encrypts_(encrypts) {}
  bool is_set() const { return !text_.empty(); }
  Protection protection() const {
    if (!is_set()) return Protection::kNone;
    return encrypts_ ? Protection::kEncryption : Protection::kProof;
  }
  // What `side` sends to prove that it knows the secret and wants this protection; zeros without a
  // secret.
  Mac proof(Prover side, const Nonce& of_backbone, const Nonce& of_worker) const;
  // The key of one connection. Neither the secret nor the proofs can be computed from it.
  SessionKey session_key(const Nonce& of_backbone, const Nonce& of_worker) const;

 private:
  Mac mac(std::string text, const Nonce& of_backbone, const Nonce& of_worker) const;

  std::string text_;
  bool encrypts_ = true;
};

// As commands take it.
struct SecretOptions {
  std::string file = {};  // empty: none
  bool encrypts = true;
  Secret read() const { return file.empty() ? Secret() : Secret::from_file(file, encrypts); }
};

// Takes the same time wherever they differ.
bool is_same(const Mac& a, const Mac& b);

}  // namespace tandem
