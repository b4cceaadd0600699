#include "io/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "io/json.h"

namespace tandem {
namespace {

constexpr StoredType kTypes[] = {
    {"BOOL", 8, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"U8", 8, {}},
    {"I8", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E4M3", 8, DType::kF8E4M3},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"F16", 16, DType::kF16},
    {"BF16", 16, DType::kBF16},
    {"I32", 32, DType::kI32},
    {"U32", 32, {}},
    {"F32", 32, DType::kF32},
    {"C64", 64, {}},
    {"F64", 64, {}},
    {"I64", 64, DType::kI64},
    {"U64", 64, {}},
};

const StoredType* find_type(std::string_view name) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const StoredType& t) { return t.name == name; });
  return found == std::end(kTypes) ? nullptr : found;
}

// Receives the events of the JSON parser. The header's grammar is so small that `place_` and the
// last key determine what each event means. Anything else is refused at once, so deep nesting needs
// no limit.
class HeaderReader : public nlohmann::json::json_sax_t {
 public:
  explicit HeaderReader(std::string_view file) : file_(file) {}

  std::vector<TensorEntry> entries;

  bool start_object(size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kFile;
    } else if (place_ != Place::kFile) {
      refuse("an object is not allowed here");
    } else if (name_ == kMetadata) {
      if (std::exchange(has_metadata_, true)) refuse("appears twice");
      place_ = Place::kMetadata;
    } else {
      place_ = Place::kTensor;
      entry_ = {.name = name_, .type = nullptr, .shape = {}, .offset = 0, .bytes = 0};
      seen_ = {};
    }
    return true;
  }

  bool key(std::string& text) override {
    if (place_ == Place::kFile)
      name_ = std::move(text);
    else if (place_ == Place::kTensor)
      start_field(text);
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || field_ != Field::kType)
      refuse("the text {} is not allowed here", shown(text));
    entry_.type = find_type(text);
    if (!entry_.type) refuse("unknown dtype {}: a newer format, or a damaged file", shown(text));
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == Field::kType) refuse("a list is not allowed here");
    place_ = Place::kList;
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::kList) refuse("the number {} is not allowed here", value);
    if (value > std::numeric_limits<int64_t>::max()) refuse("{} is 2^63 or more", value);
    (field_ == Field::kShape ? entry_.shape : offsets_).push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) finish_entry();
    place_ = place_ == Place::kFile ? Place::kEnd : Place::kFile;
    return true;
  }

  bool null() override { refuse("null is not allowed here"); }
  bool boolean(bool) override { refuse("true or false is not allowed here"); }
  bool binary(nlohmann::json::binary_t&) override { refuse("binary data is not allowed here"); }
  bool number_integer(int64_t value) override { refuse("the number {} is negative", value); }
  bool number_float(double, const std::string& text) override {
    refuse("{} is no whole number below 2^63", shown(text));
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    fail("{}: broken JSON: {}: download the file again", file_, json_message(error));
  }

 private:
  enum class Place { kStart, kFile, kMetadata, kTensor, kList, kEnd };
  enum class Field { kType, kShape, kOffsets };
  static constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};
  static constexpr std::string_view kMetadata = "__metadata__";

  void start_field(const std::string& text) {
    const auto* found = std::find(std::begin(kFields), std::end(kFields), text);
    if (found == std::end(kFields))
      refuse("unknown field {}: a newer format, or a damaged file", shown(text));
    field_ = static_cast<Field>(found - std::begin(kFields));
    if (std::exchange(seen_[found - std::begin(kFields)], true)) refuse("{} appears twice", text);
    if (field_ == Field::kOffsets) offsets_.clear();
  }

  void finish_entry() {
    if (!entry_.type || !seen_[1] || !seen_[2])
      refuse("needs the fields dtype, shape and data_offsets");
    if (offsets_.size() != 2 || offsets_[0] > offsets_[1])
      refuse("data_offsets {} are no begin and end", shape_text(offsets_));
    entry_.offset = offsets_[0];
    entry_.bytes = offsets_[1] - offsets_[0];
    const int64_t needed = bytes_of_shape();
    if (needed != entry_.bytes)
      refuse("{} {} needs {} bytes, its data_offsets {} hold {}: the file is damaged",
             entry_.type->name, shape_text(entry_.shape), needed, shape_text(offsets_),
             entry_.bytes);
    entries.push_back(std::move(entry_));
  }

  int64_t bytes_of_shape() const {
    int64_t bits = entry_.type->bits;
    for (const int64_t n : entry_.shape)
      if (__builtin_mul_overflow(bits, n, &bits))
        refuse("shape {} is larger than any file", shape_text(entry_.shape));
    if (bits % 8 != 0)
      refuse("{} {} does not fill whole bytes", entry_.type->name, shape_text(entry_.shape));
    return bits / 8;
  }

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> message, Args&&... args) const {
    const std::string what = fmt::format(message, std::forward<Args>(args)...);
    if (place_ == Place::kStart) fail("{}: {}", file_, what);
    fail("{}: tensor {}: {}", file_, shown(name_), what);
  }

  std::string_view file_;
  Place place_ = Place::kStart;
  Field field_ = Field::kType;
  bool has_metadata_ = false;
  std::string name_;  // the entry of the file that is being read
  TensorEntry entry_;
  std::array<bool, 3> seen_ = {};  // by Field
  std::vector<int64_t> offsets_;
};

void require_distinct_names(const std::vector<TensorEntry>& entries, std::string_view file) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const TensorEntry& e : entries) names.push_back(e.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end())
    fail("{}: tensor {} appears twice: the file is damaged", file, shown(*twice));
}

// Sorted entries must follow each other from the first byte of data to the last.
void require_gapless(const std::vector<TensorEntry>& entries, int64_t data_bytes,
                     std::string_view file) {
  int64_t end = 0;
  for (const TensorEntry& e : entries) {
    if (e.offset < end)
      fail("{}: tensor {} begins at byte {}, inside the one before it: the file is damaged", file,
           shown(e.name), e.offset);
    if (e.offset > end)
      fail("{}: {} bytes before tensor {} belong to none: the file is damaged", file,
           e.offset - end, shown(e.name));
    if (e.bytes > data_bytes - e.offset)
      fail(
          "{}: tensor {} ends at byte {} of {} bytes of data: the file is cut short; download it "
          "again",
          file, shown(e.name), e.offset + e.bytes, data_bytes);
    end = e.offset + e.bytes;
  }
  require(end == data_bytes,
          "{}: its tensors end at byte {} of {} bytes of data: the file is damaged; download it "
          "again",
          file, end, data_bytes);
}

}  // namespace

int64_t header_length(std::span<const std::byte, kLengthBytes> start, int64_t file_bytes,
                      std::string_view file) {
  uint64_t length = 0;
  for (int i = 0; i < kLengthBytes; ++i) length |= std::to_integer<uint64_t>(start[i]) << (8 * i);
  require(length <= kMaxHeaderBytes,
          "{}: its header would have {} bytes, more than the format's {}: not a safetensors file "
          "(perhaps a Git LFS pointer: fetch the real file)",
          file, length, kMaxHeaderBytes);
  require(static_cast<int64_t>(length) <= file_bytes - kLengthBytes,
          "{}: its header has {} bytes and the file only {}: it is cut short; download it again",
          file, length, file_bytes);
  return static_cast<int64_t>(length);
}

std::vector<TensorEntry> parse_header(std::string_view header, int64_t data_bytes,
                                      std::string_view file) {
  require(header.starts_with('{'), "{}: its header is no JSON object: not a safetensors file",
          file);
  HeaderReader reader(file);
  scan_json(header, file, reader);
  auto& entries = reader.entries;
  require_distinct_names(entries, file);
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  require_gapless(entries, data_bytes, file);
  return std::move(entries);
}

std::string shape_text(std::span<const int64_t> shape) {
  constexpr size_t kShownDims = 8;
  return fmt::format("[{}{}]", fmt::join(shape.first(std::min(shape.size(), kShownDims)), ", "),
                     shape.size() > kShownDims ? ", .." : "");
}

}  // namespace tandem
