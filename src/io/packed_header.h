// The first bytes of a packed cache file: what the rest depends on, what stands where in it, and a
// checksum of every block (docs/packed_cache.md has the layout).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"

namespace tandem {

// A packed cache that must not be used: no packed cache, damaged, or made for something else.
struct PackedError : Error {
  using Error::Error;
};

// A block is read into a core's own cache and checked there.
constexpr int64_t kPackedBlockBytes = 256 << 10;
constexpr int64_t kPackedStartBytes = 64;  // enough for packed_header_bytes()

struct PackedHeader {
  std::string key;       // lines of text; a cache with another key is for something else
  std::string manifest;  // where things lie in the data, as its owner writes it
  int64_t data_bytes;
  std::vector<uint64_t> checksums;  // of each block of kPackedBlockBytes, the last may be shorter
};

template <class... Args>
void require_sound(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]]
    throw PackedError(fmt::format(message, std::forward<Args>(args)...));
}

// XXH3, 64 bits.
uint64_t checksum_of(std::span<const std::byte> bytes);

constexpr int64_t n_packed_blocks(int64_t data_bytes) {
  return (data_bytes + kPackedBlockBytes - 1) / kPackedBlockBytes;
}

// As it stands in the file, whole disk pages; the data follows.
std::string packed_header_text(const PackedHeader& header);

// How many bytes the header has, from its first kPackedStartBytes (or fewer) and the size of the
// file. Throws PackedError when it is not a packed cache, has another version, or another size.
int64_t packed_header_bytes(std::string_view start, int64_t file_bytes);

// `text`: the header as packed_header_bytes() delimits it. Throws PackedError when it is damaged.
PackedHeader parse_packed_header(std::string_view text, int64_t file_bytes);

// Writes the checksum of a header's text into it. For packed_header_text(), and for tests that want
// a damaged header to pass for a sound one.
void seal_packed_header(std::string& text);

}  // namespace tandem
