#include "loader/weights/model_identity.h"

#include <algorithm>

#include "io/json.h"
#include "io/packed_header.h"

namespace tandem {

uint64_t model_identity(const WeightStore& store) {
  constexpr int64_t kMaxConfigBytes = 10'000'000;
  constexpr size_t kSampledTensors = 64, kSampledBytes = 64;
  std::vector<const StoredTensor*> tensors;
  for (const StoredTensor& tensor : store.tensors()) tensors.push_back(&tensor);
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return std::string_view(a->name) < std::string_view(b->name);
  });
  std::string text = read_text_file(store.directory() + "/config.json", kMaxConfigBytes);
  for (const StoredTensor* t : tensors) {
    text += fmt::format("\n{} {}", t->name, t->type->name);
    for (const int64_t n : t->shape) text += fmt::format(" {}", n);
  }
  const size_t step = std::max<size_t>(1, tensors.size() / kSampledTensors);
  for (size_t i = 0; i < tensors.size(); i += step) {  // the middle of each
    const auto n = std::min<size_t>(kSampledBytes, tensors[i]->bytes);
    const std::byte* const from = tensors[i]->data + (tensors[i]->bytes - n) / 2;
    text.append(reinterpret_cast<const char*>(from), n);
  }
  return checksum_of(std::as_bytes(std::span(text)));
}

}  // namespace tandem
