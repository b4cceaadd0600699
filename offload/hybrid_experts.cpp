#include "offload/hybrid_experts.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "core/run_error.h"
#include "gpu_kernels/stamp.h"
#include "offload/cuda_even_batch.h"
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

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

HybridExperts::HybridExperts(const ModelConfig& config, const Parts& parts, int max_tokens)
    : c_(config),
      card_(parts.on_card),
      cpu_(parts.on_cpu),
      stream_(parts.stream),
      layers_(parts.weights.layers.size()) {
  const std::string no_hand_off = gpu::why_no_hand_off(stream_);
  require(no_hand_off.empty(), "{}", no_hand_off);
  const int n_experts = config.router.n_experts;
  const int64_t pairs = int64_t{max_tokens} * config.router.n_active, word = sizeof(int32_t);
  std::vector<int32_t> places(layers_.size() * n_experts, -1);
  int64_t widest = 0;
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (!config.is_moe(static_cast<int>(l))) continue;
    const std::vector<int32_t> of_layer = CudaExperts::places(parts.weights.layers[l].experts);
    std::copy(of_layer.begin(), of_layer.end(), places.begin() + l * n_experts);
    const auto elsewhere = std::count(of_layer.begin(), of_layer.end(), -1);
    layers_[l].on_card = elsewhere < n_experts;
    layers_[l].on_cpu = elsewhere > 0;
    if (!layers_[l].on_cpu) continue;
    layers_[l].type = row_type(parts.rows_on_cpu[l]);
    widest = std::max(widest, row_bytes(config, layers_[l].type));
  }
  places_ = gpu::Buffer(std::ssize(places) * word, gpu::Site::kDevice);
  stream_.copy(places.data(), places_.bytes(), places_.as<int32_t>());
  stream_.wait();
  card_ids_ = gpu::Buffer(pairs * word, gpu::Site::kDevice);
  ids_ = mapped(pairs * word);
  weights_ = mapped(pairs * word);
  scales_ = mapped(max_tokens * word);
  rows_ = mapped(max_tokens * widest);
  sum_ = mapped(max_tokens * int64_t{config.dim} * word);
}

int64_t HybridExperts::bytes_for(const ModelConfig& c, int max_tokens) {
  return (int64_t{c.n_layers} * c.router.n_experts + int64_t{max_tokens} * c.router.n_active) *
         int64_t{sizeof(int32_t)};
}

void HybridExperts::submit(const ExpertBatch& batch) {
  require_run(!failed_,
              "an earlier step failed between the GPU and the CPU: start the program again");
  batch_ = batch;
  ++n_open_;
  const Layer& layer = layers_[batch.layer];
  const int half = rows_of(batch).half();
  ExpertBatch on_card = batch;
  stamp(batch.layer, half, kEntered);
  if (layer.on_cpu) {
    hand_down(batch);
    handed_down_.raise(stream_);
    on_card.routing.ids = dense_ids(batch.x.rows);
  }
  stamp(batch.layer, half, kHandedDown);
  if (layer.on_card) card_.submit(on_card);
  stamp(batch.layer, half, kSubmitted);
}

bool HybridExperts::streams(int64_t n_tokens) const {
  return streaming_ && n_tokens >= stream_from_ && !stream_.is_recording();
}

bool HybridExperts::wants_halves(int n_sequences) const {
  return halve_from_ > 0 && n_sequences >= halve_from_ && !streams(n_sequences);
}

void HybridExperts::add_to(TensorView y) {
  const int layer = batch_.layer, half = rows_of(batch_).half();
  stamp(layer, half, kOthersDone);
  if (layers_[layer].on_card) card_.add_to(y);
  stamp(layer, half, kCardDone);
  streamed_ = streams(y.rows);
  if (!streamed_ || !layers_[layer].on_cpu) return;
  stamp(layer, half, kSumSeen);
  share(layer, y);
}

void HybridExperts::add_rest_to(int layer, int first_row, TensorView y) {
  const Rows rows = {first_row, static_cast<int>(y.rows)};
  const int half = rows.half();
  const bool streamed = streams(rows.n), on_cpu = layers_[layer].on_cpu && !streamed;
  stamp(layer, half, kAwaits);
  if (on_cpu) sum_is_there_.await(stream_);
  if (!streamed) stamp(layer, half, kSumSeen);
  if (on_cpu)
    gpu::add(stream_, {gpu_matrix(y), {sum_for(rows).row<float>(0), c_.dim}, rows.n, c_.dim});
  stamp(layer, half, kLeft);
  --n_open_;
  if (stream_.is_recording()) return;
  try {
    if (on_cpu) serve(layer, rows);
  } catch (...) {
    give_up(1);
    throw;
  }
  if (layer + 1 == std::ssize(layers_) && n_open_ == 0) collect(rows.first + rows.n, half + 1);
}

void HybridExperts::follow(const StepParts& step) {
  streamed_ = false;
  auto n_left =
      step.n * static_cast<int>(std::count_if(layers_.begin(), layers_.end(),
                                              [](const Layer& layer) { return layer.on_cpu; }));
  try {
    require_run(!failed_,
                "an earlier step failed between the GPU and the CPU: start the program again");
    for (int layer = 0; layer < std::ssize(layers_); ++layer) {
      if (!layers_[layer].on_cpu) continue;
      for (const Batch& part : step) {
        serve(layer, {part.first_row(), part.n()});
        --n_left;
      }
    }
  } catch (...) {
    give_up(n_left);
    throw;
  }
  const Batch& last = step.at[step.n - 1];
  collect(last.first_row() + last.n(), step.n);
}

// The card would wait for ever for so many.
void HybridExperts::give_up(int n_sums) {
  failed_ = true;
  for (int i = 0; i < n_sums; ++i) sum_is_there_.raise();
}

TensorView HybridExperts::dense_ids(int64_t n_tokens) const {
  const int n_active = c_.router.n_active;
  return {card_ids_.as<void>(), n_tokens, n_active, n_active, DType::kI32};
}

void HybridExperts::hand_down(const ExpertBatch& batch) {
  const Layer& layer = layers_[batch.layer];
  const TensorView& ids = batch.routing.ids;
  const int n_experts = c_.router.n_experts;
  const ExpertBatch to = batch_on_cpu(batch.layer, rows_of(batch));
  gpu::hand_down(stream_,
                 {.x = gpu_matrix(batch.x),
                  .ids = static_cast<const int32_t*>(ids.data),
                  .ids_stride = ids.stride,
                  .weights = gpu_matrix(batch.routing.weights),
                  .place_on_card = places_.as<int32_t>() + int64_t{batch.layer} * n_experts,
                  .card_ids = card_ids_.as<int32_t>(),
                  .to = {.ids = to.routing.ids.row<int32_t>(0),
                         .weights = to.routing.weights.row<float>(0),
                         .scales = scales_.as<float>() + batch.first_row,
                         .rows = to.x.data,
                         .row_bytes = row_bytes(c_, layer.type)},
                  .type = layer.type,
                  .tokens = static_cast<int>(batch.x.rows),
                  .n_active = static_cast<int>(ids.cols),
                  .dim = c_.dim});
}

// One layer's part, once the card has handed it down.
void HybridExperts::serve(int layer, Rows rows) {
  const double waits = now();
  await_card(layer);
  const double begins = now();
  cpu_.submit(batch_on_cpu(layer, rows));
  const TensorView sum = sum_for(rows);
  std::memset(sum.data, 0, static_cast<size_t>(sum.rows * sum.row_bytes()));
  cpu_.add_to(sum);
  sum_is_there_.raise();
  if (timeline_) cpu_times(layer, rows.half()) = {waits, begins, now()};
}

// The same, of a layer whose experts are divided. What waits on the card waits for the link, so it
// is not held up by an error.
void HybridExperts::share(int layer, TensorView y) {
  const Rows rows = rows_of(batch_);
  streaming_->bring_ahead(layer);
  const double waits = now();
  try {
    await_card(layer);
  } catch (...) {
    failed_ = true;
    throw;
  }
  const double begins = now();
  streaming_->add_to({batch_, batch_on_cpu(layer, rows), sum_for(rows)}, y);
  if (timeline_) cpu_times(layer, rows.half()) = {waits, begins, now()};
}

// Polls, and the whole team with it, for about as long as the card takes for the rest of a layer of
// decoding, then sleeps between looks. Time in which this program was stopped (Ctrl-Z) is none of
// the card's.
void HybridExperts::await_card(int layer) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPolling = std::chrono::milliseconds(2);
  constexpr auto kNap = std::chrono::microseconds(50);
  constexpr int kLooksBetweenClocks = 64;
  constexpr Clock::duration kMostAtOnce = std::chrono::milliseconds(100);
  Clock::time_point last = Clock::now();
  Clock::duration waited{};
  Team::Awake awake(team_);
  bool polls = true;
  for (int look = 1; !handed_down_.take(); ++look) {
    polls ? _mm_pause() : std::this_thread::sleep_for(kNap);
    if (look % kLooksBetweenClocks > 0) continue;
    const Clock::time_point now = Clock::now();
    waited += std::min(now - last, kMostAtOnce);
    last = now;
    if (polls && waited >= kPolling) {
      polls = false;
      awake.end();
    }
    stream_.throw_if_failed();
    require_run(waited < patience_,
                "the GPU has not come to layer {} in {:g} s: it hangs, or another program has it",
                layer, patience_.count());
  }
}

TensorView HybridExperts::sum_for(Rows rows) const {
  return {sum_.as<float>() + int64_t{rows.first} * c_.dim, rows.n, c_.dim, c_.dim, DType::kF32};
}

// Where a layer's rows are handed down to.
ExpertBatch HybridExperts::batch_on_cpu(int layer, Rows rows) const {
  const int n_active = c_.router.n_active;
  const auto view = [&](const gpu::Buffer& b, int64_t cols, int64_t stride, DType dtype) {
    return TensorView{b.as<void>(), int64_t{rows.first} + rows.n, cols, stride, dtype}.rows_from(
        rows.first, rows.n);
  };
  return {
      .layer = layer,
      .x = view(rows_, c_.dim, cpu::encoded_columns(c_.dim), dtype_of_rows(layers_[layer].type)),
      .routing = {view(ids_, n_active, n_active, DType::kI32),
                  view(weights_, n_active, n_active, DType::kF32)},
      .first_row = rows.first,
      .x_scales = scales_.as<float>() + rows.first};
}

void HybridExperts::stream_from(int n_tokens, CudaStreaming& streaming) {
  stream_from_ = n_tokens;
  streaming_ = &streaming;
}

int HybridExperts::measured_crossover(int max_tokens, CudaStreaming& streaming) {
  const int least = std::min(32, max_tokens);
  const auto first =
      std::find_if(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.on_cpu; });
  const auto layer = static_cast<int>(first - layers_.begin());
  std::vector<int> all(c_.router.n_experts);
  std::iota(all.begin(), all.end(), 0);
  const EvenBatch batch(c_, max_tokens, all);
  const auto seconds_once = [&](int n, bool streamed) {
    stream_from(streamed ? 1 : max_tokens + 1, streaming);
    const double start = now();
    submit(batch.of(layer, n));
    add_to(batch.y(n));
    add_rest_to(layer, 0, batch.y(n));
    stream_.wait();
    return now() - start;
  };
  // The faster of two: a disturbance would decide for all prompts to come.
  const auto seconds = [&](int n, bool streamed) {
    const double once = seconds_once(n, streamed);
    return std::min(once, seconds_once(n, streamed));
  };
  int found = 0;
  for (const bool streamed : {false, true}) seconds_once(least, streamed);
  for (int n = least; n <= max_tokens && found == 0; n *= 2)
    if (seconds(n, true) < seconds(n, false)) found = n;
  streaming_ = nullptr;
  return found;
}

// The clocks are compared once, to within what a stamp takes to arrive.
void HybridExperts::record(Timeline& timeline) {
  timeline_ = &timeline;
  stamps_ = mapped(2 * std::ssize(layers_) * kPoints * int64_t{sizeof(uint64_t)});
  cpu_times_.resize(2 * layers_.size());
  stamp(0, 0, kEntered);  // the first start of a kernel takes longer
  stream_.wait();
  const double before = now();
  stamp(0, 0, kEntered);
  stream_.wait();
  clock_offset_ = 0;
  clock_offset_ = (before + now()) / 2 - seconds_of(0, 0, kEntered);
}

void HybridExperts::stamp(int layer, int half, Point point) {
  if (timeline_) gpu::stamp(stream_, stamp_at(layer, half, point));
}

double HybridExperts::seconds_of(int layer, int half, Point point) const {
  return static_cast<double>(*stamp_at(layer, half, point)) * 1e-9 + clock_offset_;
}

// The last layer is on its way: with a timeline, the step ends here.
void HybridExperts::collect(int n_tokens, int n_parts) {
  if (!timeline_) return;
  stream_.wait();
  timeline_->start_step(n_tokens);
  for (int half = 0; half < n_parts; ++half) collect_half(half);
}

void HybridExperts::collect_half(int half) {
  using Track = Timeline::Track;
  double left = 0;  // the layer before
  for (int l = 0; l < std::ssize(layers_); ++l) {
    const Layer& layer = layers_[l];
    if (!layer.on_card && !layer.on_cpu) continue;
    const auto at = [&](Point point) { return seconds_of(l, half, point); };
    const auto add = [&](const char* name, Track track, double begin, double end) {
      timeline_->add({name, track, l, half, begin, end});
    };
    const auto on_card = [&](const char* name, Point from, Point to) {
      add(name, Track::kGpu, at(from), at(to));
    };
    if (left > 0) add("attention and router", Track::kGpu, left, at(kEntered));
    left = at(kLeft);
    if (layer.on_cpu) on_card("hands down", kEntered, kHandedDown);
    if (layer.on_card) on_card("experts, gate and up", kHandedDown, kSubmitted);
    on_card("shared expert", kSubmitted, kOthersDone);
    if (layer.on_card) on_card("experts, down", kOthersDone, kCardDone);
    if (!layer.on_cpu) continue;
    const CpuTimes& cpu = cpu_times(l, half);
    add("waits for the GPU", Track::kCpu, cpu.waits, cpu.begins);
    if (streamed_) {
      on_card("experts of host memory", kSumSeen, kLeft);
      add("copies and experts", Track::kCpu, cpu.begins, cpu.ends);
      continue;
    }
    on_card("waits for the CPU", kAwaits, kSumSeen);
    on_card("adds the CPU's sum", kSumSeen, kLeft);
    add("experts", Track::kCpu, cpu.begins, cpu.ends);
    // What is seen later than it was sent, beyond the time that the receiver was busy.
    const double down = std::max(at(kHandedDown), cpu.waits), up = std::max(cpu.ends, at(kAwaits));
    add("down", Track::kHandOff, std::min(down, cpu.begins), cpu.begins);
    add("up", Track::kHandOff, std::min(up, at(kSumSeen)), at(kSumSeen));
  }
}

}  // namespace tandem
