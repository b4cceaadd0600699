// A checkpoint on disk: memory-mapped safetensors files with one index of all tensors by name.
// Opening reads the headers only.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/tensor.h"
#include "io/mapped_file.h"
#include "io/safetensors.h"

namespace tandem {

struct StoredTensor : TensorEntry {
  int file;  // index in WeightStore::files()
  // Points into the mapping, read-only. The format guarantees no alignment, so copy before use as
  // float.
  const std::byte* data;
};

// Suffixes of the names of the tensors that make up a packed INT4 matrix (compressed-tensors).
constexpr const char* kInt4Parts[] = {"_packed", "_scale", "_shape"};

class WeightStore {
 public:
  // Opens the files named in `directory`/model.safetensors.index.json, or else model.safetensors,
  // or else every *.safetensors file. Throws Error for a missing or damaged file, for a tensor in
  // two files, and for an index that disagrees with the files.
  explicit WeightStore(const std::string& directory);

  // Returns nullptr when the checkpoint has no tensor of that name.
  const StoredTensor* find(std::string_view name) const;
  // In the order of the files, and within a file in the order of offsets.
  std::span<const StoredTensor> tensors() const { return tensors_; }
  std::span<const MappedFile> files() const { return files_; }
  const std::string& directory() const { return directory_; }
  int64_t total_bytes() const { return total_bytes_; }  // data of all tensors

  // A view of the matrix (or the vector, as [1, n]) `tensor`. An FP8 tensor comes with its scales
  // `<name>_scale_inv`, F32 [ceil(rows / block)][ceil(cols / block)], which may be in another file.
  // Throws Error when the tensor has another rank, a type without DType, or no fitting scales.
  QuantView quant_view(const StoredTensor& tensor, int block) const;

  // A view of the packed INT4 matrix `name` [rows, cols] with a scale for every `group` columns of
  // a row: name_packed I32 [rows, cols / 8], name_scale BF16 [rows, cols / group]. Throws Error
  // when a tensor is missing or has another type or shape. name_shape, I64 or I32 [2], must exist;
  // its values are not read here (check_int4_shape()).
  QuantView int4_view(const std::string& name, int64_t rows, int64_t cols, int group) const;

  // Throws Error when the size of a file has changed since it was opened.
  void require_unchanged() const;

 private:
  std::string directory_;
  std::vector<MappedFile> files_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string_view, const StoredTensor*> by_name_;
  int64_t total_bytes_ = 0;
};

}  // namespace tandem
