#include "offload/gpu/hybrid_experts.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/run_error.h"
#include "offload/gpu/cuda_even_batch.h"

namespace tandem {
namespace {

// As ExpertPlaces takes them.
std::vector<std::vector<int32_t>> places_of(const ModelConfig& config,
                                            const HybridExperts::Parts& parts) {
  std::vector<std::vector<int32_t>> places =
      CudaExperts::places(config, parts.weights, parts.on_other_ranks);
  for (std::vector<int32_t>& of_layer : places)
    if (parts.hands_all_down) std::ranges::fill(of_layer, ExpertPlaces::kOnCpu);
  return places;
}

constexpr const char* kFailed =
    "an earlier step failed between the GPU and the CPU: start the program again";

}  // namespace

HybridExperts::HybridExperts(const ModelConfig& config, const Parts& parts, int max_tokens)
    : HybridExperts(config, parts, max_tokens, places_of(config, parts)) {}

HybridExperts::HybridExperts(const ModelConfig& config, const Parts& parts, int max_tokens,
                             const Places& places)
    : parts_(parts),
      stream_(parts.stream),
      hand_off_(config, {places, parts.rows_on_cpu, max_tokens, parts.gpu_waits}, parts.stream),
      trace_(parts.stream, config.n_all_layers()) {
  handed_down_.reserve(kMaxTickets);
  for (const std::vector<int32_t>& of_layer : places) {
    StepTrace::Layer& layer = layers_.emplace_back();
    layer.on_gpu = std::any_of(of_layer.begin(), of_layer.end(), [](int32_t p) { return p >= 0; });
    layer.on_cpu =
        std::find(of_layer.begin(), of_layer.end(), ExpertPlaces::kOnCpu) != of_layer.end();
  }
}

// Without what an error has left of the step before.
void HybridExperts::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  handed_down_.clear();
  on_cpu_.fill({});
  parts_.on_cpu.begin_step(replicas, n_micro_batches);
}

// Hands the batch down and starts the GPU's own experts. A micro-batch of a small step may be
// empty, and what the pool then computes for other ranks needs no GPU.
Ticket HybridExperts::start(const ExpertBatch& batch) {
  require_not_failed();
  const Ticket ticket = batch.micro_batch;
  require_run(batches_[ticket].x.empty(), kFailed);  // left by an error
  batches_[ticket] = batch;
  if (batch.x.rows == 0) {
    if (computes_for_ranks(batch.layer)) parts_.on_cpu.submit(batch);
    return ticket;
  }
  const StepTrace::Layer& layer = layers_[batch.layer];
  ExpertBatch on_gpu = batch;
  trace_.stamp(batch.layer, ticket, StepTrace::kEntered);
  if (layer.on_cpu) {
    hand_off_.hand_down(batch);
    on_gpu.routing.ids = hand_off_.gpu_ids(rows_of(batch));
    if (cpu_computes(batch) && !stream_.is_recording())
      handed_down_.push_back({batch.layer, rows_of(batch), ticket});
  } else if (layer.on_gpu && !parts_.on_other_ranks.empty()) {
    on_gpu.routing.ids = hand_off_.placed(batch);
  }
  trace_.stamp(batch.layer, ticket, StepTrace::kHandedDown);
  if (layer.on_gpu) parts_.on_gpu.submit(on_gpu);
  trace_.stamp(batch.layer, ticket, StepTrace::kSubmitted);
  return ticket;
}

bool HybridExperts::waits(Ticket ticket) {
  const ExpertBatch& batch = batches_[ticket];
  if (batch.x.rows == 0) return false;
  trace_.stamp(batch.layer, ticket, StepTrace::kSharedDone);
  return cpu_computes(batch);
}

void HybridExperts::add_to(Ticket ticket, TensorView y) {
  const ExpertBatch batch = std::exchange(batches_[ticket], {});
  const int layer = batch.layer;
  if (batch.x.rows == 0) {
    if (computes_for_ranks(layer)) parts_.on_cpu.add_to(ticket, y);
    return;
  }
  trace_.stamp(layer, ticket, StepTrace::kResumed);
  if (layers_[layer].on_gpu) parts_.on_gpu.add_to(ticket, y);
  trace_.stamp(layer, ticket, StepTrace::kOwnDone);
  if (cpu_computes(batch))
    add_from_cpu(batch, y);
  else if (layers_[layer].on_cpu)
    share(batch, ticket, y);
  else
    trace_.stamp(layer, ticket, StepTrace::kSumSeen);
  trace_.stamp(layer, ticket, StepTrace::kLeft);
}

bool HybridExperts::computes_for_ranks(int layer) const {
  return layers_[layer].on_cpu && parts_.on_cpu.computes_for_others();
}

bool HybridExperts::streams(int64_t n_tokens) const {
  return division_.stream_from > 0 && n_tokens >= division_.stream_from && !stream_.is_recording();
}

// Whether the CPU computes all experts of the batch that the GPU does not have.
bool HybridExperts::cpu_computes(const ExpertBatch& batch) const {
  return layers_[batch.layer].on_cpu && !streams(batch.x.rows);
}

// Where there is one replica, a step with workers may be divided, and with the CPU beside the GPU a
// decode step in which each micro-batch has a sequence.
int HybridExperts::micro_batches(std::span<const Batch> replicas, bool is_decode) const {
  if (replicas.size() > 1 || streams(replicas[0].n())) return 1;
  if (division_.micro_batches_from == 0) return parts_.on_cpu.micro_batches(replicas, is_decode);
  const auto n_sequences = std::ssize(replicas[0].sequences);
  return is_decode && n_sequences >= std::max(2, division_.micro_batches_from) ? 2 : 1;
}

// The kernels that wait for the sum are enqueued before it is computed, so the GPU needs no further
// launches to continue. Where it must not wait, they find the sum there.
void HybridExperts::add_from_cpu(const ExpertBatch& batch, TensorView y) {
  constexpr int kMaxPollingRows = 32;
  const StepRows rows = rows_of(batch);
  const Ticket ticket = batch.micro_batch;
  if (!parts_.gpu_waits) compute_or_give_up(ticket);
  if (rows.n <= kMaxPollingRows && !trace_.records()) {
    hand_off_.add_next_sum(rows, y);
  } else {
    hand_off_.await_sum();
    trace_.stamp(batch.layer, ticket, StepTrace::kSumSeen);
    hand_off_.add_sum(rows, y);
  }
  if (parts_.gpu_waits && !stream_.is_recording()) compute_or_give_up(ticket);
}

void HybridExperts::compute_or_give_up(Ticket ticket) {
  try {
    compute_on_cpu(ticket);
  } catch (...) {
    give_up(1);
    throw;
  }
}

// Computes the CPU's part of a layer of a micro-batch. Where others compute it, the rows of the
// next micro-batches leave before its sums are awaited: the GPU hands these down without them.
void HybridExperts::compute_on_cpu(Ticket ticket) {
  std::optional<HandedDown>& part = on_cpu_[ticket];
  for (bool more = true; !handed_down_.empty() && (more || !part);) more = submit_next();
  check(part.has_value(), "a batch that was handed down");
  const TensorView sum = hand_off_.sum(part->rows);
  step_.unless_failed([&] { parts_.on_cpu.add_to(part->on_cpu, sum); });
  hand_off_.raise_sum();
  trace_.add_cpu(part->layer, ticket, {part->waits, part->begins, StepTrace::now()});
  part.reset();
}

// Submits the batch that the GPU hands down next, once it has. Returns whether the next one may
// be submitted before its sums are added.
bool HybridExperts::submit_next() {
  HandedDown part = handed_down_.front();
  handed_down_.erase(handed_down_.begin());
  part.waits = StepTrace::now();
  hand_off_.await_batch(part.layer, parts_.team, parts_.patience);
  part.begins = StepTrace::now();
  const TensorView sum = hand_off_.sum(part.rows);
  std::memset(sum.data, 0, static_cast<size_t>(sum.rows * sum.row_bytes()));
  ExpertBatch batch = hand_off_.batch(part.layer, part.rows);
  batch.micro_batch = part.ticket;
  bool waits = false;
  step_.unless_failed([&] {
    part.on_cpu = parts_.on_cpu.submit(batch);
    waits = parts_.on_cpu.waits(part.on_cpu);
  });
  on_cpu_[part.ticket] = part;
  return waits;
}

// The same as compute_on_cpu() for a layer with streamed experts. The GPU waits for the link only,
// so an error does not block it.
void HybridExperts::share(const ExpertBatch& batch, Ticket ticket, TensorView y) {
  const StepRows rows = rows_of(batch);
  streamed_ = true;
  division_.streaming->prefetch(batch.layer);
  const double waits = StepTrace::now();
  try {
    hand_off_.await_batch(batch.layer, parts_.team, parts_.patience);
  } catch (...) {
    failed_ = true;
    throw;
  }
  const double begins = StepTrace::now();
  division_.streaming->add_to({batch, hand_off_.batch(batch.layer, rows), hand_off_.sum(rows)}, y);
  trace_.add_cpu(batch.layer, ticket, {waits, begins, StepTrace::now()});
}

// With n micro-batches the GPU hands a batch down once it has the sum of the n-th before it.
void HybridExperts::follow(LayerRange layers, const MicroBatches& step) {
  auto ahead = [&, layer = layers.first, i = 0]() mutable -> std::optional<HandedDown> {
    for (; layer < layers.end; ++layer, i = 0)
      while (layers_[layer].on_cpu && i < step.n) {
        const Batch& batch = step.at[i++];
        if (batch.n() > 0) return HandedDown{layer, rows_of(batch), batch.micro_batch};
      }
    return {};
  };
  auto now = ahead;
  const auto n_batches = static_cast<int>(
      std::count_if(step.begin(), step.end(), [](const Batch& batch) { return batch.n() > 0; }));
  auto n_left = n_batches * static_cast<int>(std::count_if(layers_.begin() + layers.first,
                                                           layers_.begin() + layers.end,
                                                           [](const auto& l) { return l.on_cpu; }));
  const auto hand_down_next = [&] {
    if (const auto part = ahead()) handed_down_.push_back(*part);
  };
  try {
    require_not_failed();
    for (int i = 1; i < n_batches; ++i) hand_down_next();
    while (const auto part = now()) {
      hand_down_next();
      compute_on_cpu(part->ticket);
      --n_left;
    }
  } catch (...) {
    give_up(n_left);
    throw;
  }
}

void HybridExperts::end_step(LayerRange layers, const MicroBatches& step) {
  ExpertPool::end_step(layers, step);
  trace_.end_step(layers, layers_, step, std::exchange(streamed_, false));
  step_.end();
}

void HybridExperts::require_not_failed() const { require_run(!failed_, kFailed); }

// Releases the GPU from waiting for this many sums.
void HybridExperts::give_up(int n_sums) {
  failed_ = true;
  for (int i = 0; i < n_sums; ++i) hand_off_.raise_sum();
}

int HybridExperts::measured_crossover(int max_tokens, CudaStreaming& streaming) {
  const int least = std::min(32, max_tokens);
  const auto first =
      std::find_if(layers_.begin(), layers_.end(), [](const auto& layer) { return layer.on_cpu; });
  const auto layer = static_cast<int>(first - layers_.begin());
  const ModelConfig& c = streaming.config();
  std::vector<int> all(c.router.n_experts);
  std::iota(all.begin(), all.end(), 0);
  const EvenBatch batch(c, max_tokens, all);
  const Division before = division_;
  const auto seconds_once = [&](int n, bool streamed) {
    division_ = {.stream_from = streamed ? 1 : 0, .streaming = &streaming};
    const double start = StepTrace::now();
    add_to(submit(batch.of(layer, n)), batch.y(n));
    stream_.wait();
    return StepTrace::now() - start;
  };
  // The faster of two runs, because a disturbance would affect all later prompts.
  const auto seconds = [&](int n, bool streamed) {
    const double once = seconds_once(n, streamed);
    return std::min(once, seconds_once(n, streamed));
  };
  int found = 0;
  for (const bool streamed : {false, true}) seconds_once(least, streamed);
  for (int n = least; n <= max_tokens && found == 0; n *= 2)
    if (seconds(n, true) < seconds(n, false)) found = n;
  division_ = before;
  streamed_ = false;
  return found;
}

}  // namespace tandem
