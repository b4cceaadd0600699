// Tokens whose routing is random, to measure exchanges with.
#pragma once
#include <algorithm>
#include <random>
#include <vector>

#include "gpu_kernels/runtime.h"
#include "model/config.h"
#include "offload/gpu/exchange/cuda_exchange.h"
#include "ops/router.h"

namespace tandem {

// n tokens of a rank, on its GPU, for the last layer.
class CudaRandomRows {
 public:
  CudaRandomRows(const ModelConfig& config, int rank, int64_t n)
      : x_(n * config.dim * 4, gpu::Site::kDevice),
        ids_(n * config.router.n_active * 4, gpu::Site::kMapped),
        weights_(ids_.bytes(), gpu::Site::kMapped) {
    std::mt19937 random(rank);
    chosen_ = random_experts(config.router, static_cast<int>(n), random);
    std::copy(chosen_.begin(), chosen_.end(), ids_.as<int32_t>());
    std::fill_n(weights_.as<float>(), chosen_.size(), 1.f);
    const int64_t n_active = config.router.n_active;
    batch_ = {.layer = config.n_layers - 1,
              .x = {x_.as<float>(), n, config.dim, config.dim},
              .routing = {{ids_.as<int32_t>(), n, n_active, n_active, DType::kI32},
                          {weights_.as<float>(), n, n_active, n_active}}};
  }
  // Enqueues an exchange of these rows, in a micro-batch of their number, with sums of zeros.
  void exchange(CudaExchange& way) const {
    const CudaLane lane = {.n_of_rank = batch_.x.rows};
    way.send(lane, batch_);
    way.send_counted(lane);
    way.arrived(lane);
    way.send_back(lane);
    way.add_to(lane, batch_.x);
  }
  const std::vector<int32_t>& experts() const { return chosen_; }  // [n, n_active]

 private:
  const gpu::Buffer x_, ids_, weights_;
  std::vector<int32_t> chosen_;
  ExpertBatch batch_;
};

}  // namespace tandem
