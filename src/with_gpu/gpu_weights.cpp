#include "with_gpu/gpu_weights.h"

#include <unordered_map>

#include "with_gpu/upload_jobs.h"

namespace tandem {
namespace {

Home home_of(const WeightSpec& spec, const GpuSelection& s) {
  if (spec.use == WeightUse::kExpert)
    return s.parts.experts[spec.layer][spec.expert] ? Home::kGpu : Home::kNowhere;
  if (s.only_experts) return Home::kNowhere;
  return spec.use == WeightUse::kEmbedding && s.parts.embedding_on_cpu ? Home::kHost : Home::kGpu;
}

// Visits every stored tensor of which a part has a home, once, with the whole tensor; a tied head
// shares the embedding unless that is in host memory. `on_gpu`: weights_of_rank().
template <class Visit>
void for_each_pair(const GpuSelection& s, ModelWeights& on_gpu, Visit visit) {
  const ModelConfig& config = s.config;
  std::unordered_map<std::string, QuantView> sources;
  for_each_weight(s.stored, config,
                  [&](const WeightSpec& spec, QuantView& w) { sources[spec.name] = w; });
  for_each_weight(on_gpu, config, [&](const WeightSpec& spec, QuantView& w) {
    const Home home = home_of(spec, s);
    if (home != Home::kNowhere) visit(spec, home, sources.at(spec.name), w);
  });
  const BackboneShare share = on_gpu.share_of(config);
  const auto [first, n] = share.head();
  if (s.only_experts || !config.tied_head || n == 0 || !share.is_last_stage(config)) return;
  if (!s.parts.embedding_on_cpu) {
    if (!on_gpu.embed.empty()) on_gpu.head = on_gpu.embed.rows_from(first, n);
    return;
  }
  const WeightSpec head{"lm_head.weight", -1, -1, WeightUse::kHead, n, config.dim, 0, 0, first};
  visit(head, Home::kGpu, s.stored.head, on_gpu.head);
}

}  // namespace

ModelWeights weights_of_rank(const std::optional<BackboneShare>& share, const GpuParts& parts) {
  ModelWeights weights;
  weights.share = share;
  if (parts.expert_columns) weights.slices = {*parts.expert_columns};
  return weights;
}

int64_t weight_bytes(const GpuSelection& s, Home where) {
  int64_t bytes = 0;
  ModelWeights unused = weights_of_rank(s.share, s.parts);
  for_each_pair(s, unused,
                [&](const WeightSpec& spec, Home home, const QuantView& whole, QuantView&) {
                  if (home == where) bytes += CudaWeights::bytes_of(part_of(spec, whole), spec.use);
                });
  return bytes;
}

std::vector<LoadJob> upload_jobs(const GpuSelection& s, ModelWeights& on_gpu, CudaWeights& gpu,
                                 CudaWeights& host) {
  gpu.allocate(weight_bytes(s, Home::kGpu));
  host.allocate(weight_bytes(s, Home::kHost), gpu::Site::kMapped);
  std::vector<LoadJob> jobs;
  for_each_pair(s, on_gpu, [&](const WeightSpec& spec, Home home, QuantView whole, QuantView& to) {
    CudaWeights& memory = home == Home::kGpu ? gpu : host;
    const QuantView part = part_of(spec, whole);
    to = memory.reserve(part, spec.use);
    add_upload_jobs(memory, {spec.name, whole, part, spec.first_row, to}, jobs);
  });
  return jobs;
}

}  // namespace tandem
