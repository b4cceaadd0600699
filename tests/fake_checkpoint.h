// Writes checkpoints for tests and benchmarks: real headers and index, with data given or left as
// holes of the file, which read as zeros and take no space.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/config.h"
#include "tests/temp_directory.h"

namespace tandem {

struct FakeTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::string data = {};  // its bytes; empty: zeros
  int64_t bytes() const;
};

// The header as JSON, padded to a multiple of 8 bytes.
std::string header_of(const std::vector<FakeTensor>& tensors);

// The length of a header, encoded as the first 8 bytes of a file.
std::string length_bytes(uint64_t length);

void write_safetensors(const std::string& path, const std::vector<FakeTensor>& tensors);

// Writes `n_files` files of about equal size with the tensors in the given order, and their index.
void write_checkpoint(const std::string& directory, const std::vector<FakeTensor>& tensors,
                      int n_files);

// The tensors of a model as DeepSeek stores them: FP8 matrices with scales if `config` has a
// scale_block, else BF16; packed INT4 experts if it has an expert_group; F32 router biases; MTP
// layers with copies of embedding and head.
std::vector<FakeTensor> tensors_of(const ModelConfig& config);

// Writes a small model of V3's form with random BF16 weights, in which `changed` replaces fields of
// config.json. By default it has two layers, both dense. `change` may replace the tensors' data.
void write_random_model(const TempDirectory& dir, const nlohmann::json& changed,
                        const std::function<void(std::vector<FakeTensor>&)>& change = {});

}  // namespace tandem
