#include "offload/gpu/hand_off.h"

#include <immintrin.h>

#include <algorithm>
#include <thread>

#include "core/clock.h"
#include "core/run_error.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

gpu::RowType row_type(cpu::ActivationType type) {
  switch (type) {
    case cpu::ActivationType::kBF16:
      return gpu::RowType::kBF16;
    case cpu::ActivationType::kU8:
      return gpu::RowType::kU8;
    case cpu::ActivationType::kF32:
      break;
  }
  return gpu::RowType::kF32;
}

DType dtype_of_rows(gpu::RowType type) {
  return type == gpu::RowType::kF32    ? DType::kF32
         : type == gpu::RowType::kBF16 ? DType::kBF16
                                       : DType::kI8;
}

int64_t row_bytes(const ModelConfig& c, gpu::RowType type) {
  return cpu::encoded_columns(c.dim) * bytes_of(type);
}

gpu::Buffer mapped(int64_t bytes) { return {bytes, gpu::Site::kMapped}; }

}  // namespace

HandOff::HandOff(const ModelConfig& config, const Form& form, gpu::Stream& stream)
    : c_(config), stream_(stream), places_(config, form.places, form.max_tokens, stream) {
  const std::string why_not = form.gpu_waits ? gpu::why_no_hand_off(stream_) : "";
  require(why_not.empty(), "{}", why_not);
  const int64_t pairs = int64_t{form.max_tokens} * config.router.n_active, word = sizeof(int32_t);
  for (size_t l = 0; l < form.places.size(); ++l) {
    const std::vector<int32_t>& of_layer = form.places[l];
    const bool on_cpu =
        std::find(of_layer.begin(), of_layer.end(), ExpertPlaces::kOnCpu) != of_layer.end();
    types_.push_back(on_cpu ? row_type(form.rows_on_cpu[l]) : gpu::RowType::kF32);
    if (on_cpu) row_place_ = std::max(row_place_, row_bytes(config, types_.back()));
  }
  ids_ = mapped(pairs * word);
  weights_ = mapped(pairs * word);
  scales_ = mapped(form.max_tokens * word);
  rows_ = mapped(form.max_tokens * row_place_);
  sum_ = mapped(form.max_tokens * int64_t{config.dim} * word);
}

int64_t HandOff::bytes_for(const ModelConfig& c, int max_tokens) {
  return ExpertPlaces::bytes_for(c, max_tokens);
}

void HandOff::hand_down(const ExpertBatch& batch) {
  const TensorView& ids = batch.routing.ids;
  const StepRows rows = rows_of(batch);
  const ExpertBatch to = this->batch(batch.layer, rows);
  gpu::hand_down(stream_, {.x = gpu_matrix(batch.x),
                           .ids = static_cast<const int32_t*>(ids.data),
                           .ids_stride = ids.stride,
                           .weights = gpu_matrix(batch.routing.weights),
                           .gpu_place = places_.of_layer(batch.layer),
                           .gpu_ids = gpu_ids(rows).row<int32_t>(0),
                           .to = {.ids = to.routing.ids.row<int32_t>(0),
                                  .weights = to.routing.weights.row<float>(0),
                                  .scales = scales_.as<float>() + rows.first,
                                  .rows = to.x.data,
                                  .row_bytes = row_bytes(c_, types_[batch.layer])},
                           .type = types_[batch.layer],
                           .tokens = rows.n,
                           .n_active = static_cast<int>(ids.cols),
                           .dim = c_.dim,
                           .handed_down = handed_down_.words()});
}

void HandOff::add_next_sum(StepRows rows, TensorView y) {
  gpu::add_awaited(stream_, {.y = gpu_matrix(y),
                             .sum = {sum(rows).row<float>(0), c_.dim},
                             .rows = rows.n,
                             .cols = c_.dim,
                             .sum_is_there = sum_is_there_.words()});
}

void HandOff::add_sum(StepRows rows, TensorView y) {
  gpu::add(stream_, {gpu_matrix(y), {sum(rows).row<float>(0), c_.dim}, rows.n, c_.dim});
}

// Polls for about as long as the GPU needs for the rest of a decode layer, then sleeps between
// checks. Time in which this program was stopped (Ctrl-Z) does not count as waiting.
void HandOff::await_batch(int layer, Team* team, std::chrono::duration<double> patience) {
  constexpr auto kPolling = std::chrono::milliseconds(2);
  constexpr auto kNap = std::chrono::microseconds(50);
  constexpr int kLooksBetweenClocks = 64;
  constexpr Clock::duration kMaxCountedGap = std::chrono::milliseconds(100);
  Clock::time_point last = Clock::now();
  Clock::duration waited{};
  Team::Awake awake(team);
  bool polls = true;
  for (int look = 1; !handed_down_.take(); ++look) {
    polls ? _mm_pause() : std::this_thread::sleep_for(kNap);
    if (look % kLooksBetweenClocks > 0) continue;
    const Clock::time_point now = Clock::now();
    waited += std::min(now - last, kMaxCountedGap);
    last = now;
    if (polls && waited >= kPolling) {
      polls = false;
      awake.end();
    }
    stream_.throw_if_failed();
    require_run(waited < patience,
                "the GPU did not reach layer {} in {:g} s: it hangs, or another program uses it",
                layer, patience.count());
  }
}

// A token's row starts at the same address in every layer, whatever the layer's type: a micro-batch
// may hand down its next layer while the CPU still reads the other's rows.
ExpertBatch HandOff::batch(int layer, StepRows rows) const {
  const int n_active = c_.router.n_active;
  const auto pairs = [&](const gpu::Buffer& b, DType dtype) {
    return TensorView{b.as<int32_t>() + int64_t{rows.first} * n_active, rows.n, n_active, n_active,
                      dtype};
  };
  const int64_t stride = cpu::encoded_columns(c_.dim);
  return {.layer = layer,
          .x = {rows_.as<std::byte>() + rows.first * row_place_, rows.n, c_.dim, stride,
                dtype_of_rows(types_[layer])},
          .routing = {pairs(ids_, DType::kI32), pairs(weights_, DType::kF32)},
          .first_row = rows.first,
          .x_scales = scales_.as<float>() + rows.first};
}

TensorView HandOff::sum(StepRows rows) const {
  return {sum_.as<float>() + int64_t{rows.first} * c_.dim, rows.n, c_.dim, c_.dim, DType::kF32};
}

}  // namespace tandem
