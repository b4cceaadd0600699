// Hyper-parameters of a DeepSeek-family checkpoint (V2, V2-Lite, V3, R1, Kimi-K2, Moonlight). Plain
// data; each comment gives the key in config.json. Defaults are those of DeepSeek-V3.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/simulated_choices.h"

namespace tandem {

enum class Scoring { kSoftmax, kSigmoid };                         // scoring_func
enum class TopkMethod { kGreedy, kGroupLimitedGreedy, kNoauxTc };  // topk_method

struct RouterConfig {
  int n_experts = 256;      // n_routed_experts; 0 = no MoE layers
  int n_active = 8;         // num_experts_per_tok
  int n_groups = 8;         // n_group
  int n_active_groups = 4;  // topk_group
  Scoring scoring = Scoring::kSigmoid;
  TopkMethod method = TopkMethod::kNoauxTc;
  bool normalize = true;  // norm_topk_prob
  float scale = 2.5f;     // routed_scaling_factor
  bool scale_normalized =
      true;  // multiply normalised weights by `scale` as well; false for DeepseekV2ForCausalLM
  // For measurements: replaces the experts that the router chooses, and not their weights. Null: it
  // chooses.
  std::shared_ptr<const SimulatedChoices> simulated = {};
  bool has_bias() const { return method == TopkMethod::kNoauxTc; }
};

// rope_theta and rope_scaling. Without YaRN, factor is 1.
struct RopeConfig {
  double theta = 10000;
  bool yarn = true;
  double factor = 40, beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 1;
  int original_context = 4096;  // original_max_position_embeddings
  bool operator==(const RopeConfig&) const = default;
};

struct MlaConfig {
  int n_heads = 128;   // num_attention_heads
  int q_rank = 1536;   // q_lora_rank; 0 = one q_proj
  int kv_rank = 512;   // kv_lora_rank
  int nope_dim = 128;  // qk_nope_head_dim
  int rope_dim = 64;   // qk_rope_head_dim
  int v_dim = 128;     // v_head_dim
  int qk_dim() const { return nope_dim + rope_dim; }
  int cache_dim() const { return kv_rank + rope_dim; }
};

struct ModelConfig {
  std::string architecture = "DeepseekV3ForCausalLM";  // architectures[0]
  int dim = 7168;                                      // hidden_size
  int vocab = 129280;                                  // vocab_size
  int n_layers = 61;                                   // num_hidden_layers
  int n_dense_layers = 3;                              // first_k_dense_replace
  int moe_layer_freq = 1;                              // moe_layer_freq
  int dense_dim = 18432;                               // intermediate_size
  int expert_dim = 2048;                               // moe_intermediate_size
  int n_shared_experts = 1;                            // n_shared_experts; 0 = none
  int n_mtp_layers = 1;                                // num_nextn_predict_layers
  // Multi-token prediction as it is loaded: the number of its layers, which follow the model's in
  // weights, KV cache and experts, and whether the checkpoint stores an embedding and a head for
  // them that differ from the model's. 0: the stored layers are not used.
  int n_used_mtp_layers = 0;
  bool mtp_has_embedding = false, mtp_has_head = false;
  int max_context = 163840;  // max_position_embeddings
  int scale_block = 128;     // quantization_config.weight_block_size; 0 = none
  // quantization_config of compressed-tensors (group_size): routed experts are packed INT4 with a
  // scale for every expert_group columns of a row; 0 = they are not INT4
  int expert_group = 0;
  bool tied_head = false;  // tie_word_embeddings
  float norm_eps = 1e-6f;  // rms_norm_eps
  float latent_norm_eps =
      1e-6f;  // q_a_layernorm, kv_a_layernorm: the reference code does not use rms_norm_eps there
  MlaConfig mla;
  RopeConfig rope;
  RouterConfig router;
  std::vector<int>
      eos_ids;      // eos_token_id of generation_config.json if present, else of config.json
  int bos_id = -1;  // bos_token_id; -1 = none

  int n_all_layers() const { return n_layers + n_used_mtp_layers; }
  // MTP layers are MoE layers in every model with experts.
  bool is_moe(int layer) const {
    if (layer >= n_layers) return router.n_experts > 0;
    return router.n_experts > 0 && layer >= n_dense_layers && layer % moe_layer_freq == 0;
  }
  int shared_dim() const { return n_shared_experts * expert_dim; }
  int ffn_dim(int layer) const { return is_moe(layer) ? shared_dim() : dense_dim; }

  // Reads `directory`/config.json (and generation_config.json). Throws Error naming the key, its
  // value and what is supported, for an unsupported architecture, a missing key and values that
  // contradict each other. In a config that is returned, products of sizes do not overflow: rows
  // and columns fit int, the parameter count fits int64.
  static ModelConfig from_directory(const std::string& directory);
  // Reads the text of a config.json; `source_name` names the file in messages.
  static ModelConfig from_json(std::string_view text, std::string_view source_name);
};

}  // namespace tandem
