// The header of a packed cache file: its key, the layout of its data, and a checksum of every block
// (docs/packed_cache.md describes the format).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/rounding.h"

namespace tandem {

// The file must not be used: it is not a packed cache, is damaged, or was made for another key.
struct PackedError : Error {
  using Error::Error;
};

// A block fits into a core's own cache, so that its checksum is computed from there.
constexpr int64_t kPackedBlockBytes = 256 << 10;
constexpr int64_t kPackedStartBytes = 64;  // enough for packed_header_bytes()

struct PackedHeader {
  std::string key;       // lines of text; a cache is used only if its key is the one wanted
  std::string manifest;  // layout of the data, in a format of its owner
  int64_t data_bytes;
  std::vector<uint64_t> checksums;  // per block of kPackedBlockBytes; the last may be shorter
};

template <class... Args>
void require_sound(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]]
    throw PackedError(fmt::format(message, std::forward<Args>(args)...));
}

// The XXH3 hash, 64 bits.
uint64_t checksum_of(std::span<const std::byte> bytes);

constexpr int64_t n_packed_blocks(int64_t data_bytes) {
  return ceil_div(data_bytes, kPackedBlockBytes);
}

// The header as it is written to the file, padded to a multiple of kDiskPage; the data follows.
std::string packed_header_text(const PackedHeader& header);

// Size of the header, from the first kPackedStartBytes of the file (or fewer) and the file's size.
// Throws PackedError when it is not a packed cache, has another version, or the sizes do not agree.
int64_t packed_header_bytes(std::string_view start, int64_t file_bytes);

// `text` is the first packed_header_bytes() bytes of the file. Throws PackedError when it is
// damaged.
PackedHeader parse_packed_header(std::string_view text, int64_t file_bytes);

// Writes the checksum of a header's text into it. For packed_header_text(), and for tests that make
// a damaged header with a valid checksum.
void seal_packed_header(std::string& text);

}  // namespace tandem
