#include "bench/self_test.h"

#include <algorithm>
#include <cmath>

#include "bench/machine/machine_speed.h"
#include "bench/random_inputs.h"
#include "engine/completion.h"

namespace tandem {
namespace {

// In a short prompt each key matters.
constexpr int kPromptTokens[] = {2, 16}, kMostTokens = 16;
constexpr int64_t kCacheTokens = 4 * kPageSize;
constexpr StepLimits kLimits = {kMostTokens, 1};

// Activations, keys and values of the fast kernels are BF16, or 8-bit integers in products with
// INT8 and INT4 weights: 0.2 and 0.4 % of a number, of a row's largest, in each of about ten
// products in a row. The largest of 200,000 errors was at most 3 % on three shapes; the faults of
// self_test_test are beyond the bound.
constexpr double kBound = 0.06;

// [prompts, vocab]: after the last token of each prompt.
std::vector<float> logits_of(StepRunner& model, KvCache& cache) {
  const int vocab = model.config().vocab;
  Engine engine(model, cache, {vocab, {}}, kMostTokens + 1, {.max_running = 1});
  std::vector<float> all;
  std::mt19937 rng(1);
  for (const int n : kPromptTokens)
    score(engine, random_tokens(n, vocab, rng), n - 1, [&](int64_t, std::span<const float> logits) {
      all.insert(all.end(), logits.begin(), logits.end());
    });
  return all;
}

// The largest difference of two rows of logits.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(double{a[i]} - b[i]));
  return most;
}

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

}  // namespace

void self_test(const SelfTest& test, Team& team,
               const std::function<void(const SelfTestRow& row)>& on_row) {
  const auto logits_on_cpu = [&](const ModelConfig& config, const cpu::KernelTable& kernels) {
    CpuBenchModel cpu(config, test.formats, kernels, team, kLimits, kCacheTokens);
    return logits_of(cpu.model, cpu.cache);
  };
  const cpu::KernelTable plain = cpu::kernels_for(cpu::Isa::kReference);
  // Random embeddings are far larger than what layers add to them, so errors are compared with the
  // latter.
  ModelConfig without_layers = test.config;
  without_layers.n_layers = without_layers.n_dense_layers = 0;
  const std::vector<float> embedded = logits_on_cpu(without_layers, plain);

  std::vector<float> reference;
  const auto check_one = [&](const std::string& device, const std::string& kernels,
                             const std::function<std::vector<float>()>& compute) {
    SelfTestRow row = {
        .device = device, .kernels = kernels, .vocab = test.config.vocab, .bound = kBound};
    std::vector<float> logits;
    row.seconds = seconds_of([&] { logits = compute(); });
    if (reference.empty()) reference = logits;
    row.n_rows = std::ssize(logits) / row.vocab;
    row.finite = all_finite(logits);
    row.error = distance(logits, reference) / distance(reference, embedded);
    on_row(row);
  };
  const auto check_on_cpu = [&](const cpu::KernelTable& kernels) {
    check_one("cpu", kernels.name, [&] { return logits_on_cpu(test.config, kernels); });
  };
  check_on_cpu(plain);
  for (const cpu::KernelTable& kernels : test.kernels) check_on_cpu(kernels);

  const ModelOnGpu gpu(test.gpus,
                       {.config = test.config,
                        .formats = test.formats,
                        .wanted = [](const WeightSpec&) { return true; },
                        .max_tokens = kMostTokens,
                        .context = kMostTokens + 1},
                       kLimits, kCacheTokens);
  if (gpu.model()) check_one("cuda", "gpu", [&] { return logits_of(*gpu.model(), *gpu.cache()); });
}

}  // namespace tandem
