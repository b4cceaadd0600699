#include "loader/weights/mtp_layers.h"

#include "io/load_jobs.h"
#include "io/packed_header.h"
#include "model/checkpoint.h"
#include "model/parameters.h"

namespace tandem {
namespace {

// The XXH3 hashes of a tensor's pieces.
std::vector<uint64_t> checksums_of(const WeightStore& store, const StoredTensor& t, int n_threads) {
  const int64_t n = (t.bytes + kLoadJobBytes - 1) / kLoadJobBytes;
  std::vector<uint64_t> checksums(n);
  std::vector<LoadJob> jobs;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = i * kLoadJobBytes, bytes = std::min(kLoadJobBytes, t.bytes - first);
    jobs.push_back({t.data + first, bytes, [&checksums, i, bytes](const std::byte* data) {
                      checksums[i] = checksum_of({data, static_cast<size_t>(bytes)});
                    }});
  }
  run_load_jobs(store.files(), std::move(jobs), {n_threads, {}});
  return checksums;
}

}  // namespace

std::string why_no_mtp(const std::string& directory, const WeightStore& store,
                       const ModelConfig& config) {
  const std::string first = fmt::format("model.layers.{}.eh_proj.weight", config.n_layers);
  if (config.n_mtp_layers > 0 && store.find(first)) return {};
  return fmt::format(
      "{} has no layer for multi-token prediction ({})", directory,
      config.n_mtp_layers > 0 ? first + " is missing" : "num_nextn_predict_layers is 0");
}

double mtp_share(const ModelConfig& config) {
  const ParameterCounts counts = count_parameters(config);
  return static_cast<double>(counts.mtp_activated) / static_cast<double>(counts.activated);
}

void find_mtp_copies(const WeightStore& store, int n_threads, ModelConfig& config) {
  config.mtp_has_embedding = config.mtp_has_head = false;
  const auto differs = [&](const std::string& copy, const std::string& of) {
    const StoredTensor *const a = store.find(copy), *const b = store.find(of);
    if (!a || !b) return a != nullptr;
    return a->type->dtype != b->type->dtype || a->shape != b->shape ||
           checksums_of(store, *a, n_threads) != checksums_of(store, *b, n_threads);
  };
  store.require_unchanged();
  const char* const embedding = "model.embed_tokens.weight";
  const char* const head = config.tied_head ? embedding : "lm_head.weight";
  for (int i = 0; i < config.n_used_mtp_layers; ++i) {
    const std::string p = fmt::format("model.layers.{}.", config.n_layers + i);
    config.mtp_has_embedding =
        config.mtp_has_embedding || differs(p + "embed_tokens.weight", embedding);
    config.mtp_has_head = config.mtp_has_head || differs(p + "shared_head.head.weight", head);
  }
}

ModelWeights stored_with_mtp(const WeightStore& store, int n_threads, ModelConfig& config) {
  ModelWeights stored = stored_weights(store, config);  // throws before much is read
  if (config.n_used_mtp_layers == 0) return stored;
  find_mtp_copies(store, n_threads, config);
  if (config.mtp_has_embedding || config.mtp_has_head) return stored_weights(store, config);
  return stored;
}

}  // namespace tandem
