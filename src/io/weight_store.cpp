#include "io/weight_store.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <thread>

#include "core/rounding.h"
#include "io/json.h"
#include "io/shard_index.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// More threads give no further gain: the 163 headers of R1 are 14 MB of text.
constexpr int kMaxHeaderThreads = 16;

struct Shard {
  MappedFile file;
  std::vector<TensorEntry> entries;
  int64_t data_offset;
};

Shard open_shard(const std::string& path) {
  MappedFile file(path);
  require(file.bytes() >= kLengthBytes, "{} has only {} bytes: not a safetensors file", path,
          file.bytes());
  // Disables read-ahead, which would read weights.
  posix_fadvise(file.fd(), 0, 0, POSIX_FADV_RANDOM);
  std::array<std::byte, kLengthBytes> start;
  file.read(0, start);
  const int64_t length = header_length(start, file.bytes(), path);
  std::string header(length, '\0');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  posix_fadvise(file.fd(), 0, 0, POSIX_FADV_NORMAL);

  const int64_t data_offset = kLengthBytes + length;
  auto entries = parse_header(header, file.bytes() - data_offset, path);
  return {std::move(file), std::move(entries), data_offset};
}

// Opens all files in parallel. When several are damaged, the Error of the first one is thrown.
std::vector<Shard> open_shards(const std::vector<std::string>& paths) {
  const int n = static_cast<int>(paths.size());
  std::vector<std::optional<Shard>> shards(n);
  std::vector<std::exception_ptr> errors(n);
  std::atomic<int> next = 0;
  const auto work = [&] {
    for (int i = next++; i < n; i = next++) {
      try {
        shards[i] = open_shard(paths[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    }
  };
  std::vector<std::jthread> threads;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  for (int t = 1; t < std::min({n, cores, kMaxHeaderThreads}); ++t) threads.emplace_back(work);
  work();
  threads.clear();

  std::vector<Shard> opened;
  for (int i = 0; i < n; ++i) {
    if (errors[i]) std::rethrow_exception(errors[i]);
    opened.push_back(std::move(*shards[i]));
  }
  return opened;
}

std::vector<std::string> files_without_index(const std::string& directory) {
  std::error_code error;
  require(fs::is_directory(directory, error), "{} is not a directory: name a model directory",
          directory);
  const fs::path single = fs::path(directory) / "model.safetensors";
  if (fs::exists(single, error)) return {single.string()};
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(directory, error))
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  require(!error && !paths.empty(),
          "{} has no *.safetensors file: name the directory of a Hugging Face checkpoint",
          directory);
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::vector<std::string> paths_of(const ShardIndex& index, const std::string& directory) {
  std::vector<std::string> paths, missing;
  for (const std::string& file : index.files) {
    paths.push_back((fs::path(directory) / file).string());
    std::error_code error;
    if (!fs::exists(paths.back(), error)) missing.push_back(file);
  }
  if (!missing.empty())
    fail("{}: {} of its {} files are missing, the first is {}: download them", directory,
         missing.size(), paths.size(), shown(missing.front()));
  return paths;
}

// A view of the tensor; a vector is [1, n].
TensorView matrix(const StoredTensor& t) {
  const int64_t rows = t.shape.size() == 2 ? t.shape[0] : 1, cols = t.shape.back();
  return {const_cast<std::byte*>(t.data), rows, cols, cols, *t.type->dtype};
}

}  // namespace

WeightStore::WeightStore(const std::string& directory) : directory_(directory) {
  const std::string index_path = (fs::path(directory) / kShardIndexName).string();
  std::error_code error;
  const bool indexed = fs::exists(index_path, error);
  const ShardIndex index = indexed ? read_shard_index(index_path) : ShardIndex{};
  std::vector<Shard> shards =
      open_shards(indexed ? paths_of(index, directory) : files_without_index(directory));

  size_t count = 0;
  for (const Shard& shard : shards) count += shard.entries.size();
  tensors_.reserve(count);
  by_name_.reserve(count);
  for (Shard& shard : shards) {
    const int file = static_cast<int>(files_.size());
    const std::byte* data = shard.file.data() + shard.data_offset;
    files_.push_back(std::move(shard.file));
    for (TensorEntry& entry : shard.entries) {
      const std::byte* first = data + entry.offset;
      total_bytes_ += entry.bytes;
      const StoredTensor& t = tensors_.emplace_back(StoredTensor{{std::move(entry)}, file, first});
      const auto [other, is_new] = by_name_.try_emplace(t.name, &t);
      if (!is_new)
        fail("tensor {} is in {} and in {}: remove the file that does not belong", shown(t.name),
             files_[other->second->file].path(), files_[file].path());
    }
  }
  for (const ShardIndex::Entry& entry : index.entries) {
    const StoredTensor* t = find(entry.tensor);
    if (!t || t->file != entry.file)
      fail("{}: tensor {} is not in it, though {} says so: download both again",
           files_[entry.file].path(), shown(entry.tensor), kShardIndexName);
  }
}

const StoredTensor* WeightStore::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

QuantView WeightStore::quant_view(const StoredTensor& t, int block) const {
  if (t.shape.empty() || t.shape.size() > 2)
    fail("tensor {} has shape {}: neither a vector nor a matrix", shown(t.name),
         shape_text(t.shape));
  if (!t.type->dtype)
    fail("tensor {} is {}: not a type to compute with", shown(t.name), t.type->name);
  QuantView view{.q = matrix(t), .scale = {}};
  if (view.q.dtype != DType::kF8E4M3) return view;

  if (block <= 0)
    fail(
        "tensor {} is F8_E4M3, but config.json has no quantization_config that says how it is "
        "scaled",
        shown(t.name));
  const std::string name = t.name + "_scale_inv";
  const StoredTensor* scale = find(name);
  if (!scale) fail("tensor {} is missing: the F8_E4M3 tensor before it needs it", shown(name));
  const std::vector<int64_t> expected = {ceil_div(view.q.rows, block),
                                         ceil_div(view.q.cols, block)};
  if (scale->shape != expected || scale->type->dtype != DType::kF32)
    fail("tensor {} is {} {}, expected F32 {}: a scale for each {} x {} block of {}", shown(name),
         scale->type->name, shape_text(scale->shape), shape_text(expected), block, block,
         shape_text(t.shape));
  view.scale = matrix(*scale);
  view.block_rows = view.block_cols = block;
  return view;
}

QuantView WeightStore::int4_view(const std::string& name, int64_t rows, int64_t cols,
                                 int group) const {
  const auto part = [&](const char* suffix, DType dtype, const std::vector<int64_t>& shape) {
    const StoredTensor* t = find(name + suffix);
    if (!t) fail("{}{} is missing: the weight is packed INT4 in groups of {}", name, suffix, group);
    // A shape may be I64 or I32.
    const bool type = t->type->dtype == dtype || (dtype == DType::kI64 && t->type->name == "I32");
    if (!type || t->shape != shape)
      fail("{}{} is {} {}, expected {} {}", name, suffix, t->type->name, shape_text(t->shape),
           name_of(dtype), shape_text(shape));
    return t;
  };
  QuantView view{.q = matrix(*part("_packed", DType::kI32, {rows, cols / 8})),
                 .scale = matrix(*part("_scale", DType::kBF16, {rows, cols / group}))};
  part("_shape", DType::kI64, {2});
  view.q = {view.q.data, rows, cols, cols, DType::kI4Words};
  view.block_rows = 1;
  view.block_cols = group;
  return view;
}

void WeightStore::require_unchanged() const {
  for (const MappedFile& file : files_) file.require_unchanged();
}

}  // namespace tandem
