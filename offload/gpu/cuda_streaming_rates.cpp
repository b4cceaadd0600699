// Seconds that uploading an expert takes, and computing it on either device.
#include <algorithm>

#include "core/clock.h"
#include "core/rounding.h"
#include "offload/gpu/cuda_even_batch.h"
#include "offload/gpu/cuda_streaming.h"

namespace tandem {
namespace {

// Seconds of the second run: the first one touches memory and loads kernels.
double seconds_of_second(auto&& work) {
  work();
  return seconds_of(work);
}

}  // namespace

ExpertRates CudaStreaming::measured_rates(int max_tokens) {
  int layer = 0;
  while (upload_.experts(layer).empty()) ++layer;
  const std::vector<int>& experts = upload_.experts(layer);
  const auto n_experts = static_cast<int>(experts.size());
  ExpertRates rates = upload_rates(layer);

  const EvenBatch batch(c_, max_tokens, experts);
  for (int i = 0; i < n_experts; ++i) places_.as<int32_t>()[experts[i]] = i;
  division_.n_on_gpu = n_experts;
  constexpr int kStep = 4;  // times as many tokens
  const int n_active = c_.router.n_active, least = ceil_div(n_experts, n_active);
  for (int n = std::min(least, max_tokens);; n = std::min(n * kStep, max_tokens)) {
    const int used = std::min(n_experts, n * n_active),
              rows = std::max(1, (n * n_active + n_experts / 2) / n_experts);
    const auto of_one = [&](auto work) {
      return SecondsByRows::Point{rows, seconds_of_second(work) / used};
    };
    rates.cpu.points.push_back(of_one([&] {
      cpu_.begin(batch.of(layer, n));
      cpu_.compute_below(c_.router.n_experts);
    }));
    sort_on_gpu(batch.of(layer, n));
    rates.gpu.points.push_back(of_one([&] {
      for (int first = 0; first < used; first += kAtOnce)
        compute(layer, Experts(experts).subspan(first, std::min(kAtOnce, used - first)), 0, first);
      stream_.wait();
    }));
    if (n == max_tokens) return rates;
  }
}

// Rates of the experts that fit one stage.
ExpertRates CudaStreaming::upload_rates(int layer) {
  const std::vector<int>& all = upload_.experts(layer);
  const Experts experts = Experts(all).first(std::min<size_t>(all.size(), kAtOnce));
  const auto n = static_cast<double>(experts.size());
  int64_t bytes = 0;
  ExpertRates rates = {};
  rates.copy_seconds = seconds_of_second([&] { bytes = upload_.copy(layer, experts, 0); }) / n;
  rates.link_seconds = seconds_of_second([&] {
                         upload_.send(bytes, 0);
                         upload_.wait();
                       }) /
                       n;
  return rates;
}

}  // namespace tandem
