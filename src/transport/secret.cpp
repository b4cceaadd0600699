#include "transport/secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <fstream>
#include <sstream>

#include "core/check.h"

namespace tandem {

Nonce random_nonce() {
  Nonce nonce;
  check(RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), nonce.size()) == 1,
        "random numbers");
  return nonce;
}

Secret Secret::from_file(const std::string& file, bool encrypts) {
  constexpr size_t kLeast = 16, kMost = 4096;
  std::ifstream in(file, std::ios::binary);
  require(
      in.is_open(),
      "{}: cannot be read: copy the other host's file, or write one with `openssl rand -hex 32`",
      file);
  std::string text(kMost + 2, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  require(!in.bad(), "{}: cannot be read", file);
  text.resize(in.gcount());
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  require(text.size() >= kLeast && text.size() <= kMost,
          "{}: a secret has {} to {} bytes, this one {}: write one with `openssl rand -hex 32`",
          file, kLeast, kMost, text.size());
  return Secret(std::move(text), encrypts);
}

Mac Secret::proof(Prover side, const Nonce& of_backbone, const Nonce& of_worker) const {
  if (!is_set()) return {};
  std::string text = side == Prover::kBackbone ? "tandem backbone" : "tandem worker";
  if (protection() == Protection::kEncryption) text += ", encrypted";
  return mac(std::move(text), of_backbone, of_worker);
}

SessionKey Secret::session_key(const Nonce& of_backbone, const Nonce& of_worker) const {
  check(is_set(), "a secret");
  return mac("tandem session key", of_backbone, of_worker);
}

// `text` differs in its first bytes for each purpose.
Mac Secret::mac(std::string text, const Nonce& of_backbone, const Nonce& of_worker) const {
  Mac mac{};
  for (const Nonce* nonce : {&of_backbone, &of_worker})
    text.append(reinterpret_cast<const char*>(nonce->data()), nonce->size());
  unsigned n = 0;
  const unsigned char* made = HMAC(EVP_sha256(), text_.data(), static_cast<int>(text_.size()),
                                   reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                                   reinterpret_cast<unsigned char*>(mac.data()), &n);
  check(made != nullptr && n == mac.size(), "HMAC-SHA256");
  return mac;
}

bool is_same(const Mac& a, const Mac& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace tandem
