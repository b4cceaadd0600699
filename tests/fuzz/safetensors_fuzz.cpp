// Arbitrary bytes as a safetensors file and as the index of its shards give an Error, or tensors
// that fill the file's data without gap or overlap. The first 8 bytes are the header's length and,
// with the bytes after them as the header, the number of bytes of data.
#include <set>
#include <string_view>

#include "io/safetensors.h"
#include "io/shard_index.h"

namespace {

using namespace tandem;

template <class Work>
void expect_one_line(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    const std::string_view what = error.what();
    check(what.find('\n') == what.npos && what.size() < 2000, "one line");
  }
}

void parse(std::string_view header, int64_t data_bytes) {
  int64_t end = 0;
  std::set<std::string_view> names;
  const std::vector<TensorEntry> entries = parse_header(header, data_bytes, "model.safetensors");
  for (const TensorEntry& e : entries) {
    check(e.offset == end && e.bytes >= 0 && e.type != nullptr, "gap or overlap");
    check(names.insert(e.name).second, "double name");
    end = e.offset + e.bytes;
  }
  check(end == data_bytes, "data beyond the tensors");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kLengthBytes) return 0;
  const auto start = std::as_bytes(std::span<const uint8_t, kLengthBytes>(data, kLengthBytes));
  uint64_t number = 0;
  for (int i = 0; i < kLengthBytes; ++i) number |= uint64_t{data[i]} << (8 * i);
  const std::string_view rest(reinterpret_cast<const char*>(data) + kLengthBytes,
                              size - kLengthBytes);

  expect_one_line([&] {
    const int64_t length = header_length(start, static_cast<int64_t>(size), "model.safetensors");
    parse(rest.substr(0, length), static_cast<int64_t>(rest.size()) - length);
  });
  expect_one_line([&] { parse(rest, static_cast<int64_t>(number >> 1)); });
  expect_one_line([&] {
    const ShardIndex index = parse_shard_index(rest, "index.json");
    for (const ShardIndex::Entry& e : index.entries)
      check(e.file >= 0 && e.file < static_cast<int>(index.files.size()), "file number");
  });
  return 0;
}
