#include "engine/step_runner.h"

#include <algorithm>
#include <cstring>
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

StepRunner::StepRunner(const ModelParts& parts, StepLimits limits, AttentionForm form,
                       BackboneGrid grid, int rank)
    : parts_(parts),
      limits_(limits),
      model_(parts, limits, form),
      grid_(grid),
      rank_(rank),
      reply_bytes_(grid.n_ranks()) {}

void StepRunner::forward(std::span<const Batch> replicas, KvCache& cache) {
  const auto turn = announced({.order = {.kind = StepOrder::Kind::kForward}, .batches = replicas});
  const LayerRange layers = model_.main_layers();
  if (only_takes_part(replicas, layers)) return;
  const Batch& batch = own(replicas);
  const MicroBatches step = micro_batches_of(batch);
  const Work work = {layers, 0, is_decode(batch), batch, step, cache};
  const auto enqueue = [&] {
    model_.embed(batch);
    run(work);
    model_.head(batch);
  };
  compute(work, std::ref(enqueue));  // a copy of enqueue would allocate
}

void StepRunner::forward(const Batch& only, KvCache& cache, TensorView logits) {
  forward(only, cache);
  const auto n = static_cast<int64_t>(only.logit_rows.size());
  if (n > 0) parts_.device.to_host(this->logits().rows_from(0, n), logits);
}

void StepRunner::draft(int module, HiddenStates states, std::span<const Batch> replicas,
                       KvCache& cache) {
  const auto turn =
      announced({.order = {.kind = StepOrder::Kind::kDraft, .module = module, .states = states},
                 .batches = replicas});
  const LayerRange layers = model_.mtp_layers(module);
  if (only_takes_part(replicas, layers)) return;
  const Batch& batch = own(replicas);
  const MicroBatches step = {{batch}, 1};
  const Work work = {.layers = layers,
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

const Batch& StepRunner::own(std::span<const Batch> replicas) const {
  check(std::ssize(replicas) == grid_.n_replicas, "a batch for each replica");
  return replicas[grid_.replica_of(rank_)];
}

// Begins a step. Returns whether this rank has no tokens in it: it computes experts for the others.
bool StepRunner::only_takes_part(std::span<const Batch> replicas, LayerRange layers) {
  int n_tokens = 0;
  for (const Batch& batch : replicas) n_tokens = std::max(n_tokens, batch.n());
  check(n_tokens > 0 && n_tokens <= limits_.max_tokens, "a step has 1 to max_tokens tokens");
  parts_.experts.begin_step(replicas);
  if (own(replicas).n() > 0) return false;
  parts_.experts.take_part(layers);
  return true;
}

void StepRunner::copy_page(KvCache& cache, int replica, int32_t from, int32_t to) {
  const auto turn = announced({.order = {.kind = StepOrder::Kind::kCopyPage,
                                         .replica = replica,
                                         .from_page = from,
                                         .to_page = to}});
  if (replica != grid_.replica_of(rank_)) return;
  cache.for_each_pair(from, to, [&](auto source, auto target) {
    parts_.device.copy(source.data(), std::ssize(source), target.data());
  });
}

// Holds the channel while this rank computes what it has announced.
StepChannel::Turn StepRunner::announced(StepMessage message) const {
  if (!channel_) return {};
  message.order.model = number_;
  return channel_->announce(message);
}

void StepRunner::set_vocabulary(const DrawnVocabulary& vocabulary) {
  if (reader_ && n_drawn_tokens_ == vocabulary.n_tokens &&
      std::ranges::equal(allowed_, vocabulary.allowed))
    return;
  others_know_vocabulary_ = false;
  reader_ = std::make_unique<LogitsReader>(parts_.device, vocabulary, limits_.max_logits);
  allowed_.assign(vocabulary.allowed.begin(), vocabulary.allowed.end());
  n_drawn_tokens_ = vocabulary.n_tokens;
}

void StepRunner::read_logits(std::span<const LogitsWanted> replicas, std::span<int32_t> tokens,
                             TensorView rows) {
  const auto wants = [](const LogitsWanted& w) { return !w.copied.empty() || !w.draws.empty(); };
  const LogitsWanted& first = replicas[0];
  if (std::none_of(replicas.begin() + 1, replicas.end(), wants))
    return reader_->read(logits(), first, tokens, rows);
  if (!others_know_vocabulary_)
    announced({.order = {.kind = StepOrder::Kind::kVocabulary},
               .vocabulary = {allowed_, n_drawn_tokens_}});
  others_know_vocabulary_ = true;
  const auto turn = announced({.order = {.kind = StepOrder::Kind::kLogits}, .logits = replicas});
  reader_->read(logits(), first, tokens, rows);
  for (int r = 1; r < grid_.n_replicas; ++r)
    reply_bytes_[grid_.first_rank_of(r)] = bytes_of(replicas[r]);
  const std::byte* reply = channel_->replies(reply_bytes_).data();
  auto token = tokens.begin() + std::ssize(first.draws);
  auto row = std::ssize(first.copied);
  for (const LogitsWanted& wanted : replicas.subspan(1)) {
    const auto n_rows = std::ssize(wanted.copied), n_draws = std::ssize(wanted.draws);
    std::memcpy(&*token, reply, wanted.draws.size() * sizeof(int32_t));
    const TensorView out = rows.rows_from(row, n_rows);
    check(out.stride == out.cols, "rows of logits are dense");
    if (n_rows > 0)
      std::memcpy(out.data, reply + n_draws * sizeof(int32_t), n_rows * out.row_bytes());
    token += n_draws;
    row += n_rows;
    reply += bytes_of(wanted);
  }
}

int64_t StepRunner::bytes_of(const LogitsWanted& wanted) const {
  return std::ssize(wanted.draws) * int64_t{sizeof(int32_t)} +
         std::ssize(wanted.copied) * logits().row_bytes();
}

ConstBytes StepRunner::own_logits(std::span<const LogitsWanted> replicas) {
  if (grid_.part_of(rank_) > 0) return {};
  const LogitsWanted& wanted = replicas[grid_.replica_of(rank_)];
  reply_.resize(bytes_of(wanted));
  const auto n = static_cast<int64_t>(wanted.copied.size());
  auto* const tokens = reinterpret_cast<int32_t*>(reply_.data());
  reader_->read(logits(), wanted, {tokens, wanted.draws.size()},
                {tokens + wanted.draws.size(), n, logits().cols, logits().cols});
  return reply_;
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
