#include "loader/gpu_model.h"

#include "bench/comm/gpu_calls.h"
#include "bench/gpu/gpu_benches.h"
#include "loader/gpu_experts.h"

namespace tandem {

void choose_gpu(int) {}

std::string why_no_gpu() {
  return "this program was built without CUDA: install the CUDA toolkit (12.4 or newer) and build "
         "it "
         "again, or use --device cpu";
}

std::string id_of_gpu() { fail("{}", why_no_gpu()); }
Gpu this_gpu() { fail("{}", why_no_gpu()); }

void require_fp8_gpu() { fail("{}", why_no_gpu()); }

GpuMemory gpu_memory(ModelWeights&, const ModelConfig&, const GpuModelOptions&) {
  fail("{}", why_no_gpu());
}

std::string require_hand_off(const GpuParts&) { fail("{}", why_no_gpu()); }

std::unique_ptr<GpuModel> load_gpu_model(const WeightStore&, ModelWeights&, const ModelConfig&,
                                         const GpuModelOptions&, const GpuParts&) {
  fail("{}", why_no_gpu());
}

GpuMemory gpu_expert_memory(ModelWeights&, const ModelConfig&, int) { fail("{}", why_no_gpu()); }

std::unique_ptr<GpuExperts> load_gpu_experts(const WeightStore&, ModelWeights&, const ModelConfig&,
                                             const GpuExpertsOptions&, const GpuParts&) {
  fail("{}", why_no_gpu());
}

Gpu measured_gpu(double) { fail("{}", why_no_gpu()); }
Gpu measured_gpu_bounds(double, bool) { fail("{}", why_no_gpu()); }

GpuBenchModels gpu_bench_models(bool) { return {}; }

SmallKernelTimer small_kernel_timer(const ModelConfig&, int, int64_t) { return {}; }
ProductTimer product_timer(const ModelConfig&, WeightFormat, std::string&,
                           std::span<const char* const>) {
  return {};
}
std::optional<double> measured_kernel_gap(double) { fail("{}", why_no_gpu()); }
HandOffs measured_hand_offs(double) { fail("{}", why_no_gpu()); }
std::unique_ptr<GpuCalls> connect_gpus(Group&) { fail("{}", why_no_gpu()); }

}  // namespace tandem
