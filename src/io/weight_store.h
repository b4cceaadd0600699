// A checkpoint on disk: memory-mapped safetensors files behind one index of names. Opening reads
// the headers only.
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
  // Into the mapping, read-only and at any address: the format aligns nothing, so copy before use
  // as float.
  const std::byte* data;
};

// Ends of the names of the tensors that hold a matrix of packed INT4 (compressed-tensors).
constexpr const char* kInt4Parts[] = {"_packed", "_scale", "_shape"};

class WeightStore {
 public:
  // Opens the files that `directory`/model.safetensors.index.json names; without it
  // model.safetensors; without that every *.safetensors there is. Throws Error for a missing file,
  // a damaged one, or an index that does not say what the files hold.
  explicit WeightStore(const std::string& directory);

  // nullptr when there is none. Names are those of the checkpoint.
  const StoredTensor* find(std::string_view name) const;
  // In the order of the files and of the bytes in them.
  std::span<const StoredTensor> tensors() const { return tensors_; }
  std::span<const MappedFile> files() const { return files_; }
  const std::string& directory() const { return directory_; }
  int64_t total_bytes() const { return total_bytes_; }  // of all tensors

  // The matrix (or the vector, as [1, n]) `tensor`, with `<name>_scale_inv` if it is FP8: F32
  // [ceil(rows / block)][ceil(cols / block)], which may lie in another file. Throws Error when it
  // has another rank, a type without DType, or no fitting scale.
  QuantView quant_view(const StoredTensor& tensor, int block) const;

  // The matrix `name` [rows, cols] of packed INT4 with a scale for every `group` columns of a row:
  // name_packed I32 [rows, cols / 8], name_scale BF16 [rows, cols / group]. Throws Error when one
  // is missing or another. name_shape, I64 or I32 [2], must be there too; reading it is left to
  // others.
  QuantView int4_view(const std::string& name, int64_t rows, int64_t cols, int group) const;

  // Asks every file for its size. Throws Error when one has changed since it was opened.
  void require_unchanged() const;

 private:
  std::string directory_;
  std::vector<MappedFile> files_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string_view, const StoredTensor*> by_name_;
  int64_t total_bytes_ = 0;
};

}  // namespace tandem
