#include "tests/fake_checkpoint.h"

#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "core/check.h"
#include "model/weights.h"

namespace tandem {

int64_t FakeTensor::bytes() const {
  static const std::map<std::string, int64_t> kBytes = {
      {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"BF16", 2}, {"F16", 2}, {"F32", 4}, {"I32", 4}, {"I64", 8}};
  int64_t n = kBytes.at(dtype);
  for (const int64_t d : shape) n *= d;
  return n;
}

std::string header_of(const std::vector<FakeTensor>& tensors) {
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t offset = 0;
  for (const FakeTensor& t : tensors) {
    header[t.name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {offset, offset + t.bytes()}}};
    offset += t.bytes();
  }
  std::string text = header.dump();
  return text.append((8 - text.size() % 8) % 8, ' ');
}

std::string length_bytes(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i));
  return bytes;
}

void write_safetensors(const std::string& path, const std::vector<FakeTensor>& tensors) {
  const std::string header = header_of(tensors);
  std::ofstream file(path, std::ios::binary);
  file << length_bytes(header.size()) << header;
  int64_t bytes = 8 + static_cast<int64_t>(header.size());
  for (const FakeTensor& t : tensors) {
    if (!t.data.empty()) {
      check(static_cast<int64_t>(t.data.size()) == t.bytes(), "a fake tensor's data");
      file.seekp(bytes);
      file << t.data;
    }
    bytes += t.bytes();
  }
  file.close();
  check(file.good() && truncate(path.c_str(), bytes) == 0, "a fake checkpoint was not written");
}

void write_checkpoint(const std::string& directory, const std::vector<FakeTensor>& tensors,
                      int n_files) {
  int64_t total = 0, done = 0;
  for (const FakeTensor& t : tensors) total += t.bytes();
  std::vector<std::vector<FakeTensor>> files(n_files);
  nlohmann::json map;
  const auto file_name = [&](int64_t i) {
    return fmt::format("model-{:05}-of-{:06}.safetensors", i + 1, n_files);
  };
  for (const FakeTensor& t : tensors) {
    const int64_t file = static_cast<int64_t>(static_cast<double>(done) / total * n_files);
    map[t.name] = file_name(file);
    files[file].push_back(t);
    done += t.bytes();
  }
  for (int i = 0; i < n_files; ++i) write_safetensors(directory + "/" + file_name(i), files[i]);
  std::ofstream(directory + "/model.safetensors.index.json")
      << nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(1);
}

std::vector<FakeTensor> tensors_of(const ModelConfig& config) {
  std::vector<FakeTensor> tensors;
  const auto add = [&](const WeightSpec& spec, const QuantView&) {
    if (spec.group > 0) {
      tensors.push_back({spec.name + "_packed", "I32", {spec.rows, spec.cols / 8}});
      tensors.push_back({spec.name + "_scale", "BF16", {spec.rows, spec.cols / spec.group}});
      tensors.push_back({spec.name + "_shape", "I64", {2}});
      return;
    }
    const bool vector = spec.use == WeightUse::kNorm || spec.use == WeightUse::kRouterBias;
    const bool fp8 = config.scale_block > 0 && !vector && spec.use != WeightUse::kRouter &&
                     spec.use != WeightUse::kEmbedding && spec.use != WeightUse::kHead;
    const std::string type =
        spec.use == WeightUse::kRouterBias ? "F32" : (fp8 ? "F8_E4M3" : "BF16");
    tensors.push_back({spec.name, type, {spec.rows, spec.cols}});
    if (vector) tensors.back().shape = {spec.cols};
    const int64_t block = config.scale_block;
    if (fp8)
      tensors.push_back({spec.name + "_scale_inv",
                         "F32",
                         {(spec.rows + block - 1) / block, (spec.cols + block - 1) / block}});
  };
  ModelWeights slots;
  for_each_weight(slots, config, add);

  ModelConfig longer = config;
  longer.n_layers += config.n_mtp_layers;
  for_each_weight(slots, longer, [&](const WeightSpec& spec, const QuantView& slot) {
    if (spec.layer >= config.n_layers) add(spec, slot);
  });
  for (int i = 0; i < config.n_mtp_layers; ++i) {
    const std::string p = fmt::format("model.layers.{}.", config.n_layers + i);
    tensors.push_back({p + "embed_tokens.weight", "BF16", {config.vocab, config.dim}});
    tensors.push_back({p + "enorm.weight", "BF16", {config.dim}});
    tensors.push_back({p + "hnorm.weight", "BF16", {config.dim}});
    tensors.push_back({p + "eh_proj.weight", "BF16", {config.dim, 2 * config.dim}});
    tensors.push_back({p + "shared_head.norm.weight", "BF16", {config.dim}});
    tensors.push_back({p + "shared_head.head.weight", "BF16", {config.vocab, config.dim}});
  }
  return tensors;
}

void write_random_model(const TempDirectory& dir, const nlohmann::json& changed,
                        const std::function<void(std::vector<FakeTensor>&)>& change) {
  nlohmann::json config = {{"architectures", {"DeepseekV3ForCausalLM"}},
                           {"model_type", "deepseek_v3"},
                           {"hidden_size", 64},
                           {"vocab_size", 61},
                           {"num_hidden_layers", 2},
                           {"first_k_dense_replace", 2},
                           {"intermediate_size", 96},
                           {"moe_intermediate_size", 32},
                           {"n_routed_experts", 8},
                           {"num_experts_per_tok", 2},
                           {"n_shared_experts", 1},
                           {"n_group", 2},
                           {"topk_group", 1},
                           {"topk_method", "noaux_tc"},
                           {"scoring_func", "sigmoid"},
                           {"norm_topk_prob", true},
                           {"routed_scaling_factor", 1.0},
                           {"num_attention_heads", 3},
                           {"q_lora_rank", 24},
                           {"kv_lora_rank", 32},
                           {"qk_nope_head_dim", 16},
                           {"qk_rope_head_dim", 8},
                           {"v_head_dim", 16},
                           {"max_position_embeddings", 256},
                           {"rms_norm_eps", 1e-6},
                           {"rope_theta", 10000},
                           {"tie_word_embeddings", false}};
  config.update(changed);
  dir.write("config.json", config.dump());
  std::mt19937 rng(5);
  std::vector<FakeTensor> tensors = tensors_of(ModelConfig::from_directory(dir.path()));
  for (FakeTensor& t : tensors) {
    const bool norm = t.shape.size() == 1;
    std::normal_distribution<float> draw(norm ? 1.f : 0.f,
                                         norm ? 0.1f : 1 / std::sqrt(float(t.shape.back())));
    for (int64_t i = 0; i < t.bytes() / 2; ++i) {
      const auto bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(draw(rng)) >> 16);
      t.data.append(reinterpret_cast<const char*>(&bits), 2);
    }
  }
  if (change) change(tensors);
  write_safetensors(dir.file("model.safetensors"), tensors);
}

}  // namespace tandem
