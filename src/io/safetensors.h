// Parses the header of a safetensors file into the list of its tensors. Strict, because all later
// code relies on these offsets.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace tandem {

// An element type of the format. Types that the engine does not use have no DType: their tensors
// are listed, and refused only where such a tensor is needed.
struct StoredType {
  std::string_view name;  // in the header, "F8_E4M3"
  int bits;               // per element
  std::optional<DType> dtype;
};

struct TensorEntry {
  std::string name;
  const StoredType* type;  // points into a static table
  std::vector<int64_t> shape;
  int64_t offset;  // from the first byte of data
  int64_t bytes;
};

constexpr int64_t kLengthBytes = 8;               // the file begins with the header's length
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // limit of the format

// Length of the header's text, which begins at byte kLengthBytes. `start` is the beginning of the
// file. Throws Error when no header of that length fits into the file.
int64_t header_length(std::span<const std::byte, kLengthBytes> start, int64_t file_bytes,
                      std::string_view file);

// The tensors in the order of their offsets. `data_bytes` is what follows the header. Throws Error,
// naming `file` and the tensor, for everything the format forbids: unknown fields, duplicate fields
// or names, unknown types, shapes of 2^63 bits or more, and offsets that lie outside the data,
// disagree with the shape, overlap or leave gaps.
std::vector<TensorEntry> parse_header(std::string_view header, int64_t data_bytes,
                                      std::string_view file);

// The shape in the form "[576, 7168]".
std::string shape_text(std::span<const int64_t> shape);

}  // namespace tandem
