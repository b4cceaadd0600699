#include "io/packed_header.h"

#include <xxh_x86dispatch.h>

#include <algorithm>
#include <cstring>

#include "io/direct_file.h"

namespace tandem {
namespace {

constexpr std::string_view kMagic = "tandempk";
constexpr uint64_t kVersion = 1;  // to be raised whenever the file's layout changes

// All numbers have 8 bytes, little-endian.
struct Start {
  char magic[8];
  uint64_t version;
  uint64_t checksum;  // of the header from header_bytes on, including padding
  int64_t header_bytes, key_bytes, manifest_bytes, data_bytes, block_bytes;
};
static_assert(sizeof(Start) == kPackedStartBytes);
constexpr size_t kSealedFrom = offsetof(Start, header_bytes);

Start start_of(std::string_view text) {
  Start start;
  std::memcpy(&start, text.data(), sizeof start);
  return start;
}

int64_t needed_bytes(int64_t key_bytes, int64_t manifest_bytes, int64_t data_bytes) {
  return disk_page_up(kPackedStartBytes + key_bytes + manifest_bytes +
                      n_packed_blocks(data_bytes) * static_cast<int64_t>(sizeof(uint64_t)));
}

uint64_t seal_of(std::string_view text) {
  return checksum_of(std::as_bytes(std::span(text.substr(kSealedFrom))));
}

}  // namespace

uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits_dispatch(bytes.data(), bytes.size());
}

std::string packed_header_text(const PackedHeader& header) {
  Start start{.magic = {},
              .version = kVersion,
              .checksum = 0,
              .header_bytes = 0,
              .key_bytes = static_cast<int64_t>(header.key.size()),
              .manifest_bytes = static_cast<int64_t>(header.manifest.size()),
              .data_bytes = header.data_bytes,
              .block_bytes = kPackedBlockBytes};
  std::copy(kMagic.begin(), kMagic.end(), start.magic);
  start.header_bytes = needed_bytes(start.key_bytes, start.manifest_bytes, start.data_bytes);

  std::string text(reinterpret_cast<const char*>(&start), sizeof start);
  text += header.key;
  text += header.manifest;
  text.append(reinterpret_cast<const char*>(header.checksums.data()),
              header.checksums.size() * sizeof(uint64_t));
  text.resize(start.header_bytes);
  seal_packed_header(text);
  return text;
}

int64_t packed_header_bytes(std::string_view text, int64_t file_bytes) {
  require_sound(text.size() >= kPackedStartBytes && text.starts_with(kMagic),
                "it is not a packed cache, or its beginning is damaged");
  const Start start = start_of(text);
  require_sound(start.version == kVersion, "it has format {}, and this program writes format {}",
                start.version, kVersion);
  for (const int64_t n :
       {start.header_bytes, start.key_bytes, start.manifest_bytes, start.data_bytes})
    require_sound(n >= 0 && n <= file_bytes, "its header is damaged or the file was cut short");
  require_sound(start.block_bytes == kPackedBlockBytes &&
                    start.header_bytes ==
                        needed_bytes(start.key_bytes, start.manifest_bytes, start.data_bytes) &&
                    file_bytes - start.header_bytes == start.data_bytes,
                "it has {} bytes where {} are expected: it was cut short or its header is damaged",
                file_bytes, start.header_bytes + start.data_bytes);
  return start.header_bytes;
}

PackedHeader parse_packed_header(std::string_view text, int64_t file_bytes) {
  const int64_t header_bytes = packed_header_bytes(text, file_bytes);
  check(static_cast<int64_t>(text.size()) == header_bytes, "a header's text");
  const Start start = start_of(text);
  require_sound(start.checksum == seal_of(text), "its header does not have its checksum");
  text.remove_prefix(sizeof start);
  PackedHeader header{.key = std::string(text.substr(0, start.key_bytes)),
                      .manifest = std::string(text.substr(start.key_bytes, start.manifest_bytes)),
                      .data_bytes = start.data_bytes,
                      .checksums = std::vector<uint64_t>(n_packed_blocks(start.data_bytes))};
  text.remove_prefix(start.key_bytes + start.manifest_bytes);
  text.copy(reinterpret_cast<char*>(header.checksums.data()),
            header.checksums.size() * sizeof(uint64_t));
  return header;
}

void seal_packed_header(std::string& text) {
  const uint64_t checksum = seal_of(text);
  std::memcpy(text.data() + offsetof(Start, checksum), &checksum, sizeof checksum);
}

}  // namespace tandem
