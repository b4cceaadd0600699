#include "hub/digest.h"

#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "core/check.h"

namespace tandem {
namespace {

constexpr int64_t kReadBytes = 4 << 20;

struct Free {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

}  // namespace

std::string_view digest_name(Digest::Kind kind) {
  return kind == Digest::Kind::kSha256 ? "SHA-256"
         : kind == Digest::Kind::kGit  ? "git blob"
                                       : "none";
}

Digest digest_of(int fd, int64_t bytes, Digest::Kind kind, const std::function<bool()>& go_on) {
  if (kind == Digest::Kind::kNone) return {};
  const std::unique_ptr<EVP_MD_CTX, Free> context(EVP_MD_CTX_new());
  const EVP_MD* const function = kind == Digest::Kind::kSha256 ? EVP_sha256() : EVP_sha1();
  bool ok = context && EVP_DigestInit_ex(context.get(), function, nullptr) == 1;
  if (kind == Digest::Kind::kGit) {
    const std::string header = fmt::format("blob {}", bytes);
    ok = ok && EVP_DigestUpdate(context.get(), header.c_str(), header.size() + 1) == 1;
  }
  std::vector<std::byte> buffer(std::min(bytes, kReadBytes));
  for (int64_t at = 0; at < bytes;) {
    if (!go_on()) return {};
    const ssize_t n = pread(fd, buffer.data(), std::min(bytes - at, kReadBytes), at);
    if (n < 0 && errno == EINTR) continue;
    require(n > 0, "a file of {} bytes cannot be read at byte {}: {}", bytes, at,
            n == 0 ? "it is shorter" : std::strerror(errno));
    ok = ok && EVP_DigestUpdate(context.get(), buffer.data(), n) == 1;
    at += n;
  }
  unsigned char value[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  ok = ok && EVP_DigestFinal_ex(context.get(), value, &length) == 1;
  require(ok, "OpenSSL computes no {}", digest_name(kind));
  Digest digest{kind, ""};
  for (unsigned i = 0; i < length; ++i) digest.hex += fmt::format("{:02x}", value[i]);
  return digest;
}

}  // namespace tandem
