#include "engine/step_runner.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>

#include "core/clock.h"

namespace tandem {
namespace {

RecordKey::Part size_of_part(const Batch& batch) {
  if (batch.n() == 0) return {};
  const auto longest =
      std::max_element(batch.sequences.begin(), batch.sequences.end(),
                       [](const auto& a, const auto& b) { return a.n_tokens < b.n_tokens; });
  return {batch.n(), static_cast<int>(batch.sequences.size()), longest->n_tokens};
}

int most_tokens(std::span<const Batch> replicas) {
  int n = 0;
  for (const Batch& batch : replicas) n = std::max(n, batch.n());
  return n;
}

// FNV-1a of the sizes of all batches and of their micro-batches.
uint64_t checksum_of_sizes(std::span<const Batch> replicas, int n_micro_batches) {
  uint64_t sum = 0xcbf29ce484222325;
  const auto add = [&sum](int n) { sum = (sum ^ static_cast<uint64_t>(n)) * 0x100000001b3; };
  for (const Batch& batch : replicas) {
    const RecordKey::Part size = size_of_part(batch);
    for (const int n :
         {size.n_tokens, size.n_sequences, size.longest, static_cast<int>(batch.logit_rows.size())})
      add(n);
    for (const int cut : micro_batch_cuts(batch, n_micro_batches)) add(cut);
  }
  return sum;
}

// Whether all batches that are not empty are so.
template <class Is>
bool all_of(std::span<const Batch> replicas, Is is) {
  return std::all_of(replicas.begin(), replicas.end(),
                     [&](const Batch& batch) { return batch.n() == 0 || is(batch); });
}

}  // namespace

StepRunner::StepRunner(const ModelParts& parts, StepLimits limits, AttentionForm form,
                       const PlaceInGrid& place)
    : parts_(parts),
      limits_(limits),
      model_({parts.config, parts.weights, parts.device, parts.ops, parts.experts,
              place.grid.replica_of(place.rank), place.grid.n_replicas},
             limits, form),
      grid_(place.grid),
      rank_(place.rank),
      stages_(place.stages),
      pipeline_(grid_, limits.max_tokens),
      in_flight_(grid_, grid_.stage_of(rank_)),
      divider_(limits.max_tokens),
      move_status_(grid_.n_ranks()),
      reply_bytes_(grid_.n_ranks()) {
  check(grid_.n_stages == 1 || std::ssize(stages_) == grid_.n_stages, "the layers of each stage");
}

void StepRunner::forward(std::span<const Batch> replicas, KvCache& cache) {
  announce_and_compute(StepOrder::Kind::kForward, replicas, cache);
}

void StepRunner::announce_and_compute(StepOrder::Kind kind, std::span<const Batch> replicas,
                                      KvCache& cache) {
  const int n = micro_batches_of(replicas);
  const auto turn = announced({.order = {.kind = kind, .micro_batches = n}, .batches = replicas});
  const auto start = Clock::now();
  if (kind == StepOrder::Kind::kForward)
    obey_forward(replicas, cache, n);
  else
    obey_in_flight(replicas, cache, n);
  if (is_measured_)
    policy_.measured(measured_step(replicas), n, seconds_since(start), seconds_waited());
}

void StepRunner::obey_forward(std::span<const Batch> replicas, KvCache& cache,
                              int n_micro_batches) {
  in_flight_.clear();
  if (!passes_in_pieces(replicas)) return forward_piece(replicas, cache, 0, n_micro_batches);
  for (const PipelinePiece& piece : pipeline_.pieces_of(replicas))
    forward_piece(piece.batches, cache, piece.first_logits[grid_.replica_of(rank_)], 1);
}

void StepRunner::forward_in_flight(std::span<const Batch> replicas, KvCache& cache) {
  announce_and_compute(StepOrder::Kind::kForwardInFlight, replicas, cache);
}

// A stage receives the residual stream of its next step when it has sent on that of this one, so
// that the stage before, which has computed it meanwhile, waits no longer.
void StepRunner::obey_in_flight(std::span<const Batch> replicas, KvCache& cache,
                                int n_micro_batches) {
  in_flight_.push({replicas, n_micro_batches});
  const bool is_first = grid_.stage_of(rank_) == 0;
  const StageQueue::Step now = in_flight_.now(), next = in_flight_.next();
  if (most_tokens(now.replicas) > 0)
    forward_piece(now.replicas, cache, 0, now.n_micro_batches, !is_first);
  const Batch& to_come = next.replicas[grid_.replica_of(rank_)];
  if (is_first || to_come.n() == 0) return;
  model_.receive(to_come);
  parts_.device.wait();
}

bool StepRunner::passes_in_pieces(std::span<const Batch> replicas) const {
  return pipeline_.divides(replicas) && !is_decode(replicas);
}

void StepRunner::forward_piece(std::span<const Batch> replicas, KvCache& cache,
                               int64_t first_logits, int n_micro_batches, bool is_received) {
  const Batch& batch = begin_step(replicas, n_micro_batches);
  const MicroBatches step = divider_.divide(batch, n_micro_batches);
  const Batch whole = divider_.whole();
  const Work work = {.layers = model_.main_layers(),
                     .variant = is_received ? 1 : 0,
                     .is_decode = is_decode(deciding(replicas)),
                     .replicas = deciding(replicas),
                     .step = step,
                     .batch = whole,
                     .cache = cache};
  const auto enqueue = [&] {
    if (!is_received && whole.n() > 0) model_.embed(whole);
    run(work);
    if (whole.n() > 0 || model_.shares()) model_.head(whole, first_logits);
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
  const Batch& batch = begin_step(replicas, 1);
  const MicroBatches step = {{batch}, 1};
  const Work work = {
      .layers = model_.mtp_layers(module),
      .variant = static_cast<int>(states),
      .is_decode = all_of(deciding(replicas),
                          [&](const Batch& b) { return model_.attention().is_uniform(b); }),
      .replicas = deciding(replicas),
      .step = step,
      .batch = batch,
      .cache = cache};
  const auto enqueue = [&] {
    if (batch.n() > 0) model_.join(module, states, batch);
    run(work);
    if (batch.n() > 0 || model_.shares()) model_.mtp_head(module, batch);
  };
  compute(work, std::ref(enqueue));
}

// Returns what this rank computes.
const Batch& StepRunner::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  check(std::ssize(replicas) == grid_.n_replicas, "a batch for each replica");
  const int n_tokens = most_tokens(replicas);
  check(n_tokens > 0 && n_tokens <= limits_.max_tokens, "a step has 1 to max_tokens tokens");
  parts_.experts.begin_step(replicas, n_micro_batches);
  model_.begin_step(replicas, n_micro_batches);
  return replicas[grid_.replica_of(rank_)];
}

// Those of all replicas, or of this rank's alone where no experts are computed for others.
std::span<const Batch> StepRunner::deciding(std::span<const Batch> replicas) const {
  if (parts_.experts.depends_on_replicas()) return replicas;
  return replicas.subspan(grid_.replica_of(rank_), 1);
}

void StepRunner::copy_page(KvCache& cache, int replica, const PageCopy& copy) {
  const auto turn =
      announced({.order = {.kind = StepOrder::Kind::kCopyPage, .replica = replica, .copy = copy}});
  if (replica != grid_.replica_of(rank_)) return;
  if (copy.way != PageCopy::Way::kWithin) return host_pages_->copy(copy);
  cache.for_each_pair(copy.other, copy.page, [&](auto source, auto target) {
    parts_.device.copy(source.data(), std::ssize(source), target.data());
  });
}

int64_t StepRunner::key_bytes(const KvCache& cache) const {
  const Slice last = keys_of_stage(cache, grid_.n_stages - 1);
  return last.first + last.n;
}

Slice StepRunner::keys_of_stage(const KvCache& cache, int stage) const {
  const StageLayers layers = grid_.n_stages > 1 ? stages_[stage] : Slice{0, config().n_layers};
  const DType type = cache.layer(model_.main_layers().first).dtype;
  const auto bytes_before = [&](int64_t layer) {
    return kPageSize * kv_bytes_per_token(config(), type, 0, static_cast<int>(layer) - 1);
  };
  const int64_t first = bytes_before(layers.first);
  return {first, bytes_before(layers.first + layers.n) - first};
}

void StepRunner::read_page(const KvCache& cache, int replica, int32_t page, Bytes keys) {
  check(rank_ == 0 && std::ssize(keys) == key_bytes(cache), "rank 0 reads whole pages");
  const bool is_here = replica == 0;
  const int64_t n_here = is_here ? keys_of_stage(cache, 0).n : 0;
  StepChannel::Turn turn;
  const bool is_elsewhere = n_here < std::ssize(keys);
  if (is_elsewhere)
    turn = announced(
        {.order = {.kind = StepOrder::Kind::kReadPage, .replica = replica, .page = page}});
  if (is_here) copy_own_keys(cache, page, keys.first(n_here));
  if (!is_elsewhere) return;
  check(channel_ != nullptr, "other ranks reply over a channel");
  std::vector<int64_t> n_bytes(grid_.n_ranks());
  for (int stage = is_here ? 1 : 0; stage < grid_.n_stages; ++stage)
    n_bytes[grid_.first_rank(stage, replica)] = keys_of_stage(cache, stage).n;
  channel_->replies(n_bytes, keys.subspan(n_here));
}

ConstBytes StepRunner::own_keys(const KvCache& cache, int replica, int32_t page) {
  const int stage = grid_.stage_of(rank_);
  if (rank_ != grid_.first_rank(stage, replica)) return {};
  reply_.resize(keys_of_stage(cache, stage).n);
  copy_own_keys(cache, page, reply_);
  return reply_;
}

void StepRunner::copy_own_keys(const KvCache& cache, int32_t page, Bytes out) {
  cache.for_each_piece(page, config().n_layers, [&](std::span<std::byte> piece) {
    parts_.device.copy(piece.data(), std::ssize(piece), out.data());
    out = out.subspan(piece.size());
  });
  check(out.empty(), "the keys of this rank's layers");
  parts_.device.wait();
}

void StepRunner::write_page(const KvCache& cache, int replica, int32_t page, Bytes keys) {
  check(rank_ == 0 && std::ssize(keys) == key_bytes(cache), "rank 0 writes whole pages");
  StepChannel::Turn turn;
  if (replica > 0 || grid_.tp > 1 || grid_.n_stages > 1) {
    turn = announced(
        {.order = {.kind = StepOrder::Kind::kWritePage, .replica = replica, .page = page}});
    check(channel_ != nullptr, "other ranks get keys over a channel");
    channel_->give(keys);
  }
  write_own_keys(cache, replica, page, keys);
}

void StepRunner::write_own_keys(const KvCache& cache, int replica, int32_t page, ConstBytes keys) {
  if (grid_.replica_of(rank_) != replica) return;
  const Slice own = keys_of_stage(cache, grid_.stage_of(rank_));
  keys = keys.subspan(own.first, own.n);
  cache.for_each_piece(page, config().n_layers, [&](std::span<std::byte> piece) {
    parts_.device.copy(keys.data(), std::ssize(piece), piece.data());
    keys = keys.subspan(piece.size());
  });
  check(keys.empty(), "the keys of this rank's layers");
  parts_.device.wait();  // the caller's memory may go away
}

// Holds the channel while this rank computes what it has announced.
StepChannel::Turn StepRunner::announced(StepMessage message) const {
  if (!channel_) return {};
  message.order.model = number_;
  return channel_->announce(message);
}

void StepRunner::set_vocabulary(const DrawnVocabulary& vocabulary) {
  if (reader_ && reader_->draws_from(vocabulary)) return;
  others_know_vocabulary_ = false;
  reader_ = std::make_unique<LogitsReader>(parts_.device, vocabulary, limits_.max_logits);
}

void StepRunner::read_logits(std::span<const LogitsWanted> replicas, std::span<int32_t> tokens,
                             TensorView rows) {
  const auto wants = [](const LogitsWanted& w) { return !w.copied.empty() || !w.draws.empty(); };
  // All ranks of a replica have its logits; without a channel they make the same calls.
  const bool is_first_here = !channel_ || grid_.rank_of_logits(0) == rank_;
  if (is_first_here && std::none_of(replicas.begin() + 1, replicas.end(), wants))
    return reader_->read(logits(), replicas[0], tokens, rows);
  if (!others_know_vocabulary_)
    announced(
        {.order = {.kind = StepOrder::Kind::kVocabulary}, .vocabulary = reader_->vocabulary()});
  others_know_vocabulary_ = true;
  const auto turn = announced({.order = {.kind = StepOrder::Kind::kLogits}, .logits = replicas});
  if (is_first_here) reader_->read(logits(), replicas[0], tokens, rows);
  const int first_reply = is_first_here ? 1 : 0;
  for (int r = first_reply; r < grid_.n_replicas; ++r)
    reply_bytes_[grid_.rank_of_logits(r)] = bytes_of(replicas[r]);
  check(channel_ != nullptr, "other ranks reply over a channel");
  const std::byte* reply = channel_->replies(reply_bytes_).data();
  auto token = tokens.begin();
  int64_t row = 0;
  for (int r = 0; r < grid_.n_replicas; ++r) {
    const auto n_rows = std::ssize(replicas[r].copied), n_draws = std::ssize(replicas[r].draws);
    if (r >= first_reply) {
      if (n_draws > 0) std::memcpy(&*token, reply, n_draws * sizeof(int32_t));
      const TensorView out = rows.rows_from(row, n_rows);
      check(out.stride == out.cols, "rows of logits are dense");
      if (n_rows > 0)
        std::memcpy(out.data, reply + n_draws * sizeof(int32_t), n_rows * out.row_bytes());
      reply += bytes_of(replicas[r]);
    }
    token += n_draws;
    row += n_rows;
  }
}

int64_t StepRunner::bytes_of(const LogitsWanted& wanted) const {
  return std::ssize(wanted.draws) * int64_t{sizeof(int32_t)} +
         std::ssize(wanted.copied) * logits().row_bytes();
}

ConstBytes StepRunner::own_logits(std::span<const LogitsWanted> replicas) {
  const int replica = grid_.replica_of(rank_);
  if (rank_ != grid_.rank_of_logits(replica)) return {};
  const LogitsWanted& wanted = replicas[replica];
  reply_.resize(bytes_of(wanted));
  const auto n = static_cast<int64_t>(wanted.copied.size());
  auto* const tokens = reinterpret_cast<int32_t*>(reply_.data());
  reader_->read(logits(), wanted, {tokens, wanted.draws.size()},
                {tokens + wanted.draws.size(), n, logits().cols, logits().cols});
  return reply_;
}

// The ranks of a replica route the same tokens: its first one in each stage counts them.
void StepRunner::count_experts() {
  counts_experts_ = true;
  if (is_counter(rank_)) model_.count_experts();
}

void StepRunner::read_expert_uses(std::span<uint32_t> out) {
  check(rank_ == 0 && counts_experts_, "rank 0 reads what is counted");
  const TensorView uses = model_.expert_uses();
  check(std::ssize(out) == uses.rows * uses.cols, "a count for each expert of each layer");
  const bool others_count = grid_.n_ranks() > grid_.tp;
  StepChannel::Turn turn;
  if (others_count) turn = announced({.order = {.kind = StepOrder::Kind::kExpertUses}});
  parts_.device.to_host(uses, {out.data(), uses.rows, uses.cols, uses.cols, uses.dtype});
  if (!others_count) return;
  std::vector<uint32_t> theirs(out.size());
  for (ConstBytes all =
           replies([&](int rank) { return is_counter(rank) ? std::ssize(std::as_bytes(out)) : 0; });
       !all.empty(); all = all.subspan(out.size_bytes())) {
    std::memcpy(theirs.data(), all.data(), out.size_bytes());
    for (size_t i = 0; i < out.size(); ++i) out[i] += theirs[i];
  }
}

// In a turn of rank 0: what the other ranks reply, bytes_of(rank) each.
template <class BytesOf>
ConstBytes StepRunner::replies(BytesOf bytes_of) const {
  check(channel_ != nullptr, "other ranks reply over a channel");
  std::vector<int64_t> n_bytes(grid_.n_ranks());
  for (int rank = 1; rank < grid_.n_ranks(); ++rank) n_bytes[rank] = bytes_of(rank);
  return channel_->replies(n_bytes);
}

void StepRunner::load_experts(std::span<const ExpertChange> changes) {
  const auto turn =
      announced({.order = {.kind = StepOrder::Kind::kLoadExperts}, .changes = changes});
  mover_->load(changes);
}

// The device may still compute the last step.
void StepRunner::move_experts() {
  const auto turn = announced({.order = {.kind = StepOrder::Kind::kMoveExperts}});
  parts_.device.wait();
  mover_->move();
}

void StepRunner::keep_experts() {
  const auto turn = announced({.order = {.kind = StepOrder::Kind::kKeepExperts}});
  mover_->keep();
}

std::span<const MoveStatus> StepRunner::move_status() {
  check(rank_ == 0, "rank 0 decides what moves");
  move_status_[0] = mover_->status();
  if (grid_.n_ranks() == 1) return move_status_;
  const auto turn = announced({.order = {.kind = StepOrder::Kind::kMoveStatus}});
  const ConstBytes theirs = replies([](int) { return int64_t{sizeof(MoveStatus)}; });
  std::memcpy(move_status_.data() + 1, theirs.data(), theirs.size());
  return move_status_;
}

ConstBytes StepRunner::own_move_status() {
  move_status_[rank_] = mover_->status();
  return std::as_bytes(std::span(&move_status_[rank_], 1));
}

ConstBytes StepRunner::own_expert_uses() {
  if (!is_counter(rank_)) return {};
  const TensorView uses = model_.expert_uses();
  reply_.resize(uses.rows * uses.row_bytes());
  parts_.device.to_host(uses, {reply_.data(), uses.rows, uses.cols, uses.cols, uses.dtype});
  return reply_;
}

// Calls enqueue(), or replays what it enqueued for an equal step. Without tokens this rank computes
// experts for the others.
void StepRunner::compute(const Work& work, const std::function<void()>& enqueue) {
  if (work.batch.n() > 0) parts_.ops.begin(work.batch);
  run_or_replay(work, enqueue);
  if (channel_) parts_.device.wait();  // ranks make one step at a time, also after one that fails
  parts_.experts.end_step(work.layers, work.step);
}

// Takes part in the layers' experts without tokens of its own.
Pass StepRunner::layers_for_others(LayerRange layers, int micro_batch, PassMemory&) {
  const ModelConfig& c = config();
  const int64_t n_active = c.router.n_active;
  const TensorView none = {nullptr, 0, c.dim, c.dim};
  const Routing nowhere = {{nullptr, 0, n_active, n_active, DType::kI32},
                           {nullptr, 0, n_active, n_active}};
  for (int layer = layers.first; layer < layers.end; ++layer) {
    if (!c.is_moe(layer)) {
      model_.dense_for_others(layer, micro_batch);
      continue;
    }
    const Ticket ticket = parts_.experts.submit(
        {.layer = layer, .x = none, .routing = nowhere, .micro_batch = micro_batch});
    if (parts_.experts.waits(ticket)) co_await kOtherPass;
    if (parts_.experts.serve(ticket)) co_await kOtherPass;
    parts_.experts.add_to(ticket, none);
  }
}

// Ranks record and replay the same steps: what they enqueue together is the same in both.
void StepRunner::run_or_replay(const Work& work, const std::function<void()>& enqueue) {
  if (!work.is_decode || most_tokens(work.replicas) == 0) return enqueue();
  RecordKey key = {
      .activations = logits().data,
      .cache = work.cache.layer(work.layers.first).data,
      .first_layer = work.layers.first,
      .variant = work.variant,
      .n_logits = static_cast<int>(work.batch.logit_rows.size()),
      .n_parts = work.step.n,
      .n_tokens = most_tokens(work.replicas),
      .of_replicas = grid_.n_replicas > 1 ? checksum_of_sizes(work.replicas, work.step.n) : 0};
  for (int i = 0; i < work.step.n; ++i) key.parts[i] = size_of_part(work.step.at[i]);
  const auto follow = [&] { parts_.experts.follow(work.layers, work.step); };
  // What takes as long as recording says nothing about later steps.
  if (parts_.device.run_recorded(key, enqueue, std::ref(follow))) is_measured_ = false;
}

// In a decode step all tokens of a sequence have logits, if there are several.
bool StepRunner::is_decode(const Batch& step) const {
  return model_.attention().is_uniform(step) &&
         (step.n() == std::ssize(step.sequences) || step.n() == std::ssize(step.logit_rows));
}

bool StepRunner::is_decode(std::span<const Batch> replicas) const {
  return all_of(replicas, [&](const Batch& b) { return is_decode(b); });
}

// On rank 0, or where ranks make the same calls without a channel: several of those cannot decide
// by what only one of them has measured.
int StepRunner::micro_batches_of(std::span<const Batch> replicas) {
  is_measured_ = false;
  if (most_tokens(replicas) == 0 || passes_in_pieces(replicas)) return 1;
  const int n = parts_.experts.micro_batches(replicas, is_decode(replicas));
  is_measured_ = n == ExpertPool::kMeasured && (channel_ || grid_.n_ranks() == 1);
  if (n != ExpertPool::kMeasured) return n;
  return is_measured_ ? policy_.choose(measured_step(replicas)) : 1;
}

MicroBatchPolicy::Step StepRunner::measured_step(std::span<const Batch> replicas) const {
  const auto largest = std::max_element(replicas.begin(), replicas.end(),
                                        [](const auto& a, const auto& b) { return a.n() < b.n(); });
  const MicroBatchCuts cuts = micro_batch_cuts(*largest, kMaxMicroBatches);
  int n_filled = 0;
  for (int i = 0; i < kMaxMicroBatches; ++i) n_filled += cuts[i] < cuts[i + 1];
  return {largest->n(), is_decode(replicas), n_filled};
}

// Each pass runs until it waits for another device or rank; then the next pass runs.
void StepRunner::run(const Work& work) {
  memory_.clear();
  std::array<std::optional<Pass>, kMaxMicroBatches> passes;
  for (int i = 0; i < work.step.n; ++i) {
    const Batch& batch = work.step.at[i];
    passes[i].emplace(batch.n() > 0 ? model_.layers(work.layers, batch, work.cache, memory_)
                                    : layers_for_others(work.layers, i, memory_));
  }
  for (bool any = true; any;) {
    any = false;
    for (std::optional<Pass>& pass : passes) {
      if (!pass || pass->done()) continue;
      pass->resume();
      any = true;
    }
  }
}

}  // namespace tandem
