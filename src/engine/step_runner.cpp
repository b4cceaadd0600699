#include "engine/step_runner.h"

#include <algorithm>
#include <functional>

namespace tandem {
namespace {

RecordKey::Part size_of_part(const Batch& batch) {
  const auto longest =
      std::max_element(batch.sequences.begin(), batch.sequences.end(),
                       [](const auto& a, const auto& b) { return a.n_tokens < b.n_tokens; });
  return {batch.n(), static_cast<int>(batch.sequences.size()), longest->n_tokens};
}

}  // namespace

StepRunner::StepRunner(const ModelParts& parts, StepLimits limits, AttentionForm form)
    : parts_(parts), limits_(limits), model_(parts, limits, form) {}

void StepRunner::forward(const Batch& batch, KvCache& cache) {
  check(batch.n() > 0 && batch.n() <= limits_.max_tokens, "a step has 1 to max_tokens tokens");
  const auto turn = announced({.kind = StepOrder::Kind::kForward}, batch);
  const MicroBatches step = micro_batches_of(batch);
  const Work work = {model_.main_layers(), 0, is_decode(batch), batch, step, cache};
  const auto enqueue = [&] {
    model_.embed(batch);
    run(work);
    model_.head(batch);
  };
  compute(work, std::ref(enqueue));  // a copy of enqueue would allocate
}

void StepRunner::forward(const Batch& batch, KvCache& cache, TensorView logits) {
  forward(batch, cache);
  const auto n = static_cast<int64_t>(batch.logit_rows.size());
  if (n > 0) parts_.device.to_host(this->logits().rows_from(0, n), logits);
}

void StepRunner::draft(int module, HiddenStates states, const Batch& batch, KvCache& cache) {
  check(batch.n() > 0 && batch.n() <= limits_.max_tokens, "a step has 1 to max_tokens tokens");
  const auto turn =
      announced({.kind = StepOrder::Kind::kDraft, .module = module, .states = states}, batch);
  const MicroBatches step = {{batch}, 1};
  const Work work = {.layers = model_.mtp_layers(module),
                     .variant = static_cast<int>(states),
                     .is_decode = model_.attention().is_uniform(batch),
                     .batch = batch,
                     .step = step,
                     .cache = cache};
  const auto enqueue = [&] {
    model_.join(module, states, batch);
    run(work);
    model_.mtp_head(module, batch);
  };
  compute(work, std::ref(enqueue));
}

void StepRunner::copy_page(KvCache& cache, int32_t from, int32_t to) {
  const auto turn =
      announced({.kind = StepOrder::Kind::kCopyPage, .from_page = from, .to_page = to});
  cache.for_each_pair(from, to, [&](auto source, auto target) {
    parts_.device.copy(source.data(), std::ssize(source), target.data());
  });
}

// Holds the channel while this rank computes what it has announced.
StepChannel::Turn StepRunner::announced(StepOrder order, const Batch& batch) const {
  if (!channel_) return {};
  order.model = number_;
  return channel_->announce(order, batch);
}

// Calls enqueue(), or replays what it enqueued for an equal step.
void StepRunner::compute(const Work& work, const std::function<void()>& enqueue) {
  parts_.ops.begin(work.batch);
  if (!work.is_decode) {
    enqueue();
  } else {
    RecordKey key = {.activations = logits().data,
                     .cache = work.cache.layer(0).data,
                     .first_layer = work.layers.first,
                     .variant = work.variant,
                     .n_logits = static_cast<int>(work.batch.logit_rows.size())};
    for (int i = 0; i < work.step.n; ++i) key.parts[i] = size_of_part(work.step.at[i]);
    const auto follow = [&] { parts_.experts.follow(work.layers, work.step); };
    parts_.device.run_recorded(key, enqueue, std::ref(follow));
  }
  parts_.experts.end_step(work.layers, work.step);
  if (channel_) parts_.device.wait();  // ranks make one step at a time
}

// In a decode step all tokens of a sequence have logits, if there are several.
bool StepRunner::is_decode(const Batch& step) const {
  return model_.attention().is_uniform(step) &&
         (step.n() == std::ssize(step.sequences) || step.n() == std::ssize(step.logit_rows));
}

// A decode step is divided between the two sequences in the middle.
MicroBatches StepRunner::micro_batches_of(const Batch& step) const {
  const size_t n = step.sequences.size(), n_first = (n + 1) / 2;
  if (n < 2 || !is_decode(step) || !parts_.experts.prefers_micro_batches(step)) return {{step}, 1};
  const auto begin = static_cast<size_t>(step.sequences[n_first].first_token);
  const auto part = [&](size_t first, size_t end, size_t first_sequence, size_t n_sequences) {
    return Batch{step.tokens.subspan(first, end - first),
                 step.positions.subspan(first, end - first),
                 step.sequences.subspan(first_sequence, n_sequences), step.logit_rows};
  };
  return {{part(0, begin, 0, n_first), part(begin, step.tokens.size(), n_first, n - n_first)}, 2};
}

// Each pass runs until it waits for another device; then the other pass runs.
void StepRunner::run(const Work& work) {
  memory_.clear();
  const auto pass = [&](int i) {
    return model_.layers(work.layers, work.step.at[i], work.cache, memory_);
  };
  if (work.step.n == 1) {
    for (Pass whole = pass(0); !whole.done();) whole.resume();
    return;
  }
  Pass first = pass(0), second = pass(1);
  while (!first.done() || !second.done())
    for (Pass* turn : {&first, &second})
      if (!turn->done()) turn->resume();
}

}  // namespace tandem
