#include "engine/step_runner.h"

#include <functional>

namespace tandem {

StepRunner::StepRunner(const ModelParts& parts, StepLimits limits, AttentionForm form)
    : parts_(parts), limits_(limits), model_(parts, limits, form) {}

void StepRunner::forward(const Batch& batch, KvCache& cache) {
  check(batch.n() > 0 && batch.n() <= limits_.max_tokens, "a step has 1 to max_tokens tokens");
  const MicroBatches step = micro_batches_of(batch);
  const auto enqueue = [&] {
    model_.embed(batch);
    run(model_.main_layers(), step, cache);
    model_.head(batch);
  };
  parts_.ops.begin(batch);
  if (!model_.attention().is_uniform(batch)) {
    enqueue();
  } else {
    const RecordKey key = {logits().data, cache.layer(0).data, batch.n(),
                           static_cast<int>(batch.logit_rows.size()), step.at[0].n()};
    // std::ref: a copy of enqueue would allocate.
    if (parts_.device.run_recorded(key, std::ref(enqueue))) parts_.experts.follow(step);
  }
  parts_.experts.end_step(step);
}

void StepRunner::forward(const Batch& batch, KvCache& cache, TensorView logits) {
  forward(batch, cache);
  const auto n = static_cast<int64_t>(batch.logit_rows.size());
  if (n > 0) parts_.device.to_host(this->logits().rows_from(0, n), logits);
}

void StepRunner::draft(int module, const Batch& batch, KvCache& cache) {
  const MicroBatches step = {{batch}, 1};
  parts_.ops.begin(batch);
  model_.join(module, batch);
  run(model_.mtp_layers(module), step, cache);
  model_.mtp_head(module, batch);
  parts_.experts.end_step(step);
}

// A step with one token per sequence is divided in the middle.
MicroBatches StepRunner::micro_batches_of(const Batch& step) const {
  const size_t n = step.sequences.size();
  if (n < 2 || !model_.attention().is_uniform(step) ||
      !parts_.experts.prefers_micro_batches(static_cast<int>(n)))
    return {{step}, 1};
  const auto part = [&](size_t first, size_t count) {
    return Batch{step.tokens.subspan(first, count), step.positions.subspan(first, count),
                 step.sequences.subspan(first, count), step.logit_rows};
  };
  return {{part(0, (n + 1) / 2), part((n + 1) / 2, n / 2)}, 2};
}

// Each pass runs until it waits for another device; then the other pass runs.
void StepRunner::run(LayerRange range, const MicroBatches& step, KvCache& cache) {
  memory_.clear();
  const auto pass = [&](int i) { return model_.layers(range, step.at[i], cache, memory_); };
  if (step.n == 1) {
    for (Pass whole = pass(0); !whole.done();) whole.resume();
    return;
  }
  Pass first = pass(0), second = pass(1);
  while (!first.done() || !second.done())
    for (Pass* turn : {&first, &second})
      if (!turn->done()) turn->resume();
}

}  // namespace tandem
