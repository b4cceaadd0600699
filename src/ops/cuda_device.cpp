#include "ops/cuda_device.h"

#include <algorithm>

#include "gpu_kernels/sampling.h"
#include "model/cost.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

Buffer owned(int64_t bytes, gpu::Site site) {
  auto owner = std::make_shared<gpu::Buffer>(bytes, site);
  return {std::span(owner->as<std::byte>(), static_cast<size_t>(bytes)), owner};
}

class CudaSampler final : public DeviceSampler {
 public:
  CudaSampler(gpu::Stream& stream, std::span<const uint32_t> allowed, int n_tokens, int max_rows)
      : stream_(stream),
        n_tokens_(n_tokens),
        allowed_(static_cast<int64_t>(allowed.size_bytes()), gpu::Site::kDevice),
        draws_(max_rows * int64_t{sizeof(gpu::DrawRow)}, gpu::Site::kMapped),
        drawn_(max_rows * int64_t{sizeof(int32_t)}, gpu::Site::kMapped) {
    stream_.copy(allowed.data(), allowed_.bytes(), allowed_.as<uint32_t>());
    stream_.wait();
  }

  void draw(TensorView logits, std::span<const Draw> how, std::span<int32_t> tokens) override {
    for (size_t i = 0; i < how.size(); ++i)
      draws_.as<gpu::DrawRow>()[i] = {.row = how[i].row,
                                      .temperature = how[i].temperature,
                                      .top_p = how[i].top_p,
                                      .min_p = how[i].min_p,
                                      .top_k = how[i].top_k,
                                      .uniform = how[i].uniform};
    gpu::draw(stream_, {.logits = gpu_matrix(logits),
                        .how = draws_.as<gpu::DrawRow>(),
                        .allowed = allowed_.as<uint32_t>(),
                        .tokens = drawn_.as<int32_t>(),
                        .n = static_cast<int>(how.size()),
                        .vocab = n_tokens_});
    stream_.wait();
    std::copy_n(drawn_.as<int32_t>(), how.size(), tokens.begin());
  }

 private:
  gpu::Stream& stream_;
  const int n_tokens_;   // logits per row
  gpu::Buffer allowed_;  // a bit for each token
  gpu::Buffer draws_;    // mapped, [max_rows]
  gpu::Buffer drawn_;    // mapped, [max_rows]
};

}  // namespace

Buffer CudaDevice::allocate(int64_t bytes) { return owned(bytes, gpu::Site::kDevice); }

Buffer CudaDevice::allocate_on_host(int64_t bytes) { return owned(bytes, gpu::Site::kMapped); }

void CudaDevice::wait() {
  stream_.wait();
  if (ranks_) ranks_->end_work();
}

void CudaDevice::to_host(TensorView x, TensorView out) {
  check(x.stride == x.cols && out.stride == out.cols, "only dense matrices are copied to the host");
  stream_.copy(x.data, x.rows * x.row_bytes(), out.data);
  wait();
}

// Graphs are not padded to a larger size, because experts would be read for the padding rows.
bool CudaDevice::run_recorded(const RecordKey& key, const std::function<void()>& enqueue,
                              const std::function<void()>& follow) {
  n_nodes_of_last_step_ = n_early_of_last_step_ = 0;
  if (!records_ || key.n_tokens > kMaxRecordedTokens) {
    enqueue();
    return false;
  }
  auto known = recorded_.find(key);
  const bool is_new = known == recorded_.end();
  if (is_new) {
    gpu::Graph graph = stream_.capture(enqueue);
    const int64_t bytes = graph.bytes();
    while (!recorded_.empty() &&
           (recorded_.size() == kMaxRecorded || recorded_bytes_ + bytes > max_recorded_bytes_))
      drop_oldest();
    recorded_bytes_ += bytes;
    known = recorded_.emplace(key, Recorded{std::move(graph), 0}).first;
  }
  known->second.last_use = ++n_replays_;
  const gpu::Graph& graph = known->second.graph;
  n_nodes_of_last_step_ = graph.n_nodes();
  n_early_of_last_step_ = graph.n_early();
  if (!launcher_) {
    stream_.replay(graph);
    follow();
    return is_new;
  }
  const std::function<void()> launch = [this, &graph] { stream_.replay(graph); };
  launcher_->start(launch);
  try {
    follow();
  } catch (...) {
    launcher_->wait();  // a launch that failed is the cause
    throw;
  }
  launcher_->wait();
  return is_new;
}

void CudaDevice::drop_oldest() {
  const auto oldest = std::min_element(
      recorded_.begin(), recorded_.end(),
      [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; });
  recorded_bytes_ -= oldest->second.graph.bytes();
  recorded_.erase(oldest);
}

std::unique_ptr<DeviceSampler> CudaDevice::make_sampler(std::span<const uint32_t> allowed,
                                                        int n_tokens, int max_rows) {
  if (n_tokens > gpu::kMaxDrawTokens) return nullptr;
  return std::make_unique<CudaSampler>(stream_, allowed, n_tokens, max_rows);
}

}  // namespace tandem
