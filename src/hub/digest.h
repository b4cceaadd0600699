// Digests by which a hub says what bytes a file has.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tandem {

struct Digest {
  enum class Kind {
    kNone,    // the hub says only the size
    kSha256,  // of large files
    kGit,     // of small ones: SHA-1 of "blob SIZE\0" and the bytes, as git names them
  };
  Kind kind = Kind::kNone;
  std::string hex;  // lower case

  bool operator==(const Digest&) const = default;
};

std::string_view digest_name(Digest::Kind kind);  // "SHA-256"

// The digest of the first `bytes` bytes of an open file. `go_on` is asked every few megabytes; if
// it says no, the result is empty. Throws Error when the file cannot be read or is shorter.
Digest digest_of(int fd, int64_t bytes, Digest::Kind kind, const std::function<bool()>& go_on);

}  // namespace tandem
