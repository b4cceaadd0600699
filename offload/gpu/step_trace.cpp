#include "offload/gpu/step_trace.h"

#include <algorithm>

#include "core/clock.h"
#include "gpu_kernels/stamp.h"

namespace tandem {

double StepTrace::now() { return seconds_since({}); }

// Compares the clocks once; the error is at most the time for which a stamp takes to arrive.
void StepTrace::record(Timeline& timeline) {
  timeline_ = &timeline;
  const int64_t places = int64_t{ExpertPool::kMaxTickets} * n_layers_;
  stamps_ = {places * kPoints * int64_t{sizeof(uint64_t)}, gpu::Site::kMapped};
  cpu_times_.resize(places);
  stamp(0, 0, kEntered);  // the first launch of a kernel takes longer
  stream_.wait();
  const double before = now();
  stamp(0, 0, kEntered);
  stream_.wait();
  clock_offset_ = 0;
  clock_offset_ = (before + now()) / 2 - seconds_of(0, 0, kEntered);
}

void StepTrace::stamp(int layer, Ticket ticket, Point point) {
  if (timeline_) gpu::stamp(stream_, stamp_at(layer, ticket, point));
}

void StepTrace::add_cpu(int layer, Ticket ticket, CpuTimes times) {
  if (timeline_) cpu_times_[int64_t{ticket} * n_layers_ + layer] = times;
}

double StepTrace::seconds_of(int layer, Ticket ticket, Point point) const {
  return static_cast<double>(*stamp_at(layer, ticket, point)) * 1e-9 + clock_offset_;
}

void StepTrace::end_step(LayerRange range, std::span<const Layer> layers, const MicroBatches& step,
                         bool streamed) {
  if (!timeline_) return;
  stream_.wait();
  if (range.first == 0) timeline_->start_step(step.n_tokens());
  for (const Batch& batch : step)
    if (batch.n() > 0) add_spans(range, layers, batch.micro_batch, streamed);
}

void StepTrace::add_spans(LayerRange range, std::span<const Layer> layers, Ticket ticket,
                          bool streamed) {
  using Track = Timeline::Track;
  double left = 0;  // end of the previous layer
  for (int l = range.first; l < range.end; ++l) {
    const Layer& layer = layers[l];
    if (!layer.on_gpu && !layer.on_cpu) continue;
    const auto at = [&](Point point) { return seconds_of(l, ticket, point); };
    const auto add = [&](const char* name, Track track, double begin, double end) {
      timeline_->add({name, track, l, ticket, begin, end});
    };
    const auto on_gpu = [&](const char* name, Point from, Point to) {
      add(name, Track::kGpu, at(from), at(to));
    };
    if (left > 0) add("attention and router", Track::kGpu, left, at(kEntered));
    left = at(kLeft);
    if (layer.on_cpu) on_gpu("hands down", kEntered, kHandedDown);
    if (layer.on_gpu) on_gpu("experts, gate and up", kHandedDown, kSubmitted);
    on_gpu("shared expert", kSubmitted, kSharedDone);
    if (layer.on_gpu) on_gpu("experts, down", kResumed, kOwnDone);
    if (!layer.on_cpu) continue;
    const CpuTimes& cpu = cpu_times_[int64_t{ticket} * n_layers_ + l];
    add("waits for the GPU", Track::kCpu, cpu.waits, cpu.begins);
    if (streamed) {
      on_gpu("experts of host memory", kOwnDone, kLeft);
      add("copies and experts", Track::kCpu, cpu.begins, cpu.ends);
      continue;
    }
    on_gpu("waits for the CPU", kOwnDone, kSumSeen);
    on_gpu("adds the CPU's sum", kSumSeen, kLeft);
    add("experts", Track::kCpu, cpu.begins, cpu.ends);
    // Delay between sending and seeing, without the time for which the receiver was busy.
    const double down = std::max(at(kHandedDown), cpu.waits), up = std::max(cpu.ends, at(kOwnDone));
    add("down", Track::kHandOff, std::min(down, cpu.begins), cpu.begins);
    add("up", Track::kHandOff, std::min(up, at(kSumSeen)), at(kSumSeen));
  }
}

}  // namespace tandem
