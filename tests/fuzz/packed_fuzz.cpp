// Arbitrary bytes as the header of a packed cache, unchanged and with a matching checksum, give a
// PackedError or a header that is unchanged by writing and reading. The first 8 bytes of the input
// are the size of the file's data.
#include <cstring>
#include <string>

#include "io/packed_header.h"

namespace {

using namespace tandem;

void parse(const std::string& text, int64_t file_bytes) {
  try {
    const int64_t bytes = packed_header_bytes(text, file_bytes);
    check(bytes >= kPackedStartBytes && bytes <= file_bytes, "a header inside its file");
    if (bytes > static_cast<int64_t>(text.size())) return;  // reading the file would fail
    const PackedHeader header = parse_packed_header(text.substr(0, bytes), file_bytes);
    check(header.data_bytes == file_bytes - bytes, "all of the file is used");
    check(static_cast<int64_t>(header.checksums.size()) == n_packed_blocks(header.data_bytes),
          "a checksum a block");
    const PackedHeader again = parse_packed_header(packed_header_text(header), file_bytes);
    check(again.key == header.key && again.manifest == header.manifest &&
              again.checksums == header.checksums,
          "written as it was read");
  } catch (const PackedError& error) {
    const std::string_view what = error.what();
    check(what.find('\n') == what.npos && what.size() < 2000, "one line");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  int64_t data_bytes = 0;
  if (size < sizeof data_bytes) return 0;
  std::memcpy(&data_bytes, data, sizeof data_bytes);
  data_bytes &= INT64_MAX >> 1;
  std::string text(reinterpret_cast<const char*>(data) + sizeof data_bytes,
                   size - sizeof data_bytes);
  const auto text_bytes = static_cast<int64_t>(text.size());
  parse(text, text_bytes);
  parse(text, text_bytes + data_bytes);
  if (text_bytes < kPackedStartBytes) return 0;
  seal_packed_header(text);
  parse(text, text_bytes + data_bytes);
  return 0;
}
