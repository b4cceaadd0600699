#include "bench/bench_model.h"

#include <algorithm>
#include <filesystem>

#include "core/machine_info.h"
#include "core/program_files.h"
#include "core/rounding.h"
#include "io/json.h"
#include "model/cost.h"
#include "model/parameters.h"

namespace tandem {
namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int kMaxLayers = 1000;

}  // namespace

ModelConfig bench_config(const std::string& name, const char* option) {
  namespace fs = std::filesystem;
  const std::string folder = program_file("models/configs");
  const bool is_path = name.find('/') != std::string::npos;
  const std::string named = folder + "/" + name + ".json";
  std::error_code ignored;
  if (!folder.empty() && !is_path && fs::exists(named, ignored))
    return ModelConfig::from_json(read_text_file(named, kMaxConfigBytes), named);
  if (fs::is_directory(name, ignored)) return ModelConfig::from_directory(name);
  require(fs::exists(name, ignored), "{} {} does not exist, and it is none of {}", option, name,
          names_of_program_files("models/configs"));
  return ModelConfig::from_json(read_text_file(name, kMaxConfigBytes), name);
}

int64_t cold_bytes() {
  return std::max(int64_t{2'000'000'000}, 4 * machine_info().last_level_cache_bytes);
}

Resident resident_experts(const ModelConfig& c, WeightFormat format, int64_t budget, int64_t cold) {
  require(c.router.n_experts > 0, "this model has no routed experts: choose another --config");
  const int64_t bytes = routed_expert_bytes(c, format);
  const int64_t group = c.router.n_groups;
  const int64_t fewest = std::min(c.router.n_experts, 2 * c.router.n_active);
  const int64_t fit = std::min<int64_t>(c.router.n_experts, budget / bytes) / group * group;
  require(fit >= fewest,
          "the experts do not fit: {} of {:.1f} MB need {:.2f} GB and {:.2f} GB may be used; "
          "choose a smaller format or raise --memory",
          fewest, static_cast<double>(bytes) * 1e-6, gigabytes(fewest * bytes), gigabytes(budget));
  const int64_t layer = fit * bytes;
  const int64_t wanted = std::min(ceil_div(cold, layer), budget / layer);
  return {static_cast<int>(std::max<int64_t>(1, wanted)), static_cast<int>(fit)};
}

int most_of(const std::vector<int>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

void check_layers(int n_layers) {
  require(n_layers >= 1 && n_layers <= kMaxLayers, "--layers {}: must be between 1 and {}",
          n_layers, kMaxLayers);
}

ModelConfig with_experts(ModelConfig c, int n_experts) {
  c.router.n_experts = n_experts;
  return c;
}

ModelConfig with_layers(ModelConfig c, int n_layers) {
  check_layers(n_layers);
  c.n_layers = n_layers;
  c.n_dense_layers = std::min({1, c.n_dense_layers, c.n_layers});
  c.n_mtp_layers = 0;
  return c;
}

ModelConfig with_resident_experts(const ModelConfig& c, WeightFormat format, int64_t budget) {
  const int moe = moe_layers(c);
  return with_experts(c, moe == 0 ? 0 : resident_experts(c, format, budget / moe, 0).experts);
}

void add_cut_model(nlohmann::ordered_json& report, const char* isa, int n_threads,
                   const ModelConfig& c, WeightFormats formats) {
  report["isa"] = isa;
  report["threads"] = n_threads;
  report["layers"] = c.n_layers;
  report["dense_layers"] = c.n_dense_layers;
  report["experts"] = format_name(formats.experts);
  report["format"] = format_name(formats.backbone);
  report["resident_experts"] = c.router.n_experts;
}

}  // namespace tandem
