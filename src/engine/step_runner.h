// Runs the forward pass of a step: directly, or recorded and replayed by the device; as one pass,
// or as micro-batches that alternate while experts are computed on another device or by workers, or
// rows travel to other ranks.
#pragma once
#include <memory>

#include "engine/deepseek.h"
#include "engine/expert_mover.h"
#include "engine/host_pages.h"
#include "engine/logits_reader.h"
#include "engine/micro_batch_policy.h"
#include "engine/pipeline.h"
#include "engine/step_channel.h"
#include "model/micro_batches.h"

namespace tandem {

// A rank among those of a model.
struct PlaceInGrid {
  BackboneGrid grid = {};
  int rank = 0;
  std::vector<StageLayers> stages = {};  // [stages]; empty: there is one
};

class StepRunner {
 public:
  StepRunner(const ModelParts& parts, StepLimits limits, AttentionForm form,
             const PlaceInGrid& place = {});

  // Fills the cache for every token of a step and computes one row of logits() for each of its
  // logit_rows; [replicas], of which this rank computes its own. One that has nothing to compute
  // has an empty batch. The step may still be running when this returns; later work on device()
  // follows it. Throws RunError when a device was lost, and StepFailed where later steps can be
  // computed.
  void forward(std::span<const Batch> replicas, KvCache& cache);
  void forward(const Batch& only, KvCache& cache) { forward(std::span(&only, 1), cache); }
  // The same, and copies the logits [n_logits, vocab] to the host.
  void forward(const Batch& only, KvCache& cache, TensorView logits);
  // The same as forward() on rank 0, which has divided the step into so many micro-batches.
  void obey_forward(std::span<const Batch> replicas, KvCache& cache, int n_micro_batches);
  // In a pipeline: the same, but each stage computes what was announced as many calls before as its
  // number, so that all stages compute at the same time. logits() are then those of the call
  // n_stages - 1 before; until there is one they are undefined. Batches may all be empty. forward()
  // forgets what is still on its way.
  void forward_in_flight(std::span<const Batch> replicas, KvCache& cache);
  void obey_in_flight(std::span<const Batch> replicas, KvCache& cache, int n_micro_batches);
  // How long this rank waited for rows of other ranks in the last step, in seconds, if known.
  std::optional<double> seconds_waited() const { return parts_.experts.seconds_waited(); }
  // As ExpertPool::workers().
  std::vector<WorkerStatus> workers() const { return parts_.experts.workers(); }
  // After forward(): computes layer `module` for multi-token prediction, for a step whose token i
  // follows the token of hidden state i: fills the layer's cache, and computes logits() of the
  // tokens after logit_rows. Throws RunError as forward() does.
  void draft(int module, HiddenStates states, std::span<const Batch> replicas, KvCache& cache);
  void draft(int module, HiddenStates states, const Batch& only, KvCache& cache) {
    draft(module, states, std::span(&only, 1), cache);
  }
  // The pages in host memory of this rank's replica from now on. All ranks have as many, or none.
  void use(HostPages* pages) { host_pages_ = pages; }
  HostPages* host_pages() const { return host_pages_; }
  // Copies a page of a replica's cache; later steps see its result.
  void copy_page(KvCache& cache, int replica, const PageCopy& copy);

  // The keys of a page of a replica's cache in the layers of all stages, without those for
  // multi-token prediction: [layers][planes][page's bytes], after the steps before. All ranks of a
  // replica in a stage have the same keys of its layers: one of them is read, and all are written.
  int64_t key_bytes(const KvCache& cache) const;  // of a page
  // Called on rank 0, between steps. Writing leaves `keys` as they are.
  void read_page(const KvCache& cache, int replica, int32_t page, Bytes keys);
  void write_page(const KvCache& cache, int replica, int32_t page, Bytes keys);
  // What read_page() wants of this rank; empty if another one has it too and replies. Valid until
  // the next call.
  ConstBytes own_keys(const KvCache& cache, int replica, int32_t page);
  // Writes this rank's part of `keys`, key_bytes() of them, if it belongs to the replica.
  void write_own_keys(const KvCache& cache, int replica, int32_t page, ConstBytes keys);

  // Which tokens read_logits() draws from now on.
  void set_vocabulary(const DrawnVocabulary& vocabulary);
  // Whether read_logits() can draw tokens.
  bool draws() { return reader_ && reader_->draws(); }
  // Waits for the last step and reads its logits, [replicas]; called once after each step. What the
  // replicas give follows each other: tokens that are drawn, -1 where a logit of the row is not
  // finite, and rows of logits [.., vocab] in host memory.
  void read_logits(std::span<const LogitsWanted> replicas, std::span<int32_t> tokens,
                   TensorView rows);
  // What read_logits() wants of this rank, tokens and then rows; empty if another rank of the
  // replica replies. Valid until the next call.
  ConstBytes own_logits(std::span<const LogitsWanted> replicas);

  // From now on, before the first step, how often the routers choose each expert is counted. All
  // ranks call it.
  void count_experts();
  bool counts_experts() const { return counts_experts_; }
  // Waits for the steps before and reads the counts of all replicas and stages together, modulo
  // 2^32: [n_all_layers, n_experts], 0 for dense layers. Called on rank 0.
  void read_expert_uses(std::span<uint32_t> out);
  // What read_expert_uses() adds up of this rank; empty if another rank counts the same tokens and
  // layers. Valid until the next call.
  ConstBytes own_expert_uses();

  // What moves this rank's experts from now on; null: they stay. All ranks have one, or none.
  void use(ExpertMover* mover) { mover_ = mover; }
  ExpertMover* mover() const { return mover_; }
  // As ExpertMover's calls, on all ranks. Called on rank 0, between steps.
  void load_experts(std::span<const ExpertChange> changes);
  void move_experts();
  void keep_experts();
  // [ranks]. Called on rank 0; valid until the next call.
  std::span<const MoveStatus> move_status();
  ConstBytes own_move_status();  // of this rank; valid until the next call

  // From now on the other ranks of the channel are told of every call of the above; this is their
  // model of that number.
  void announce_on(StepChannel& channel, int number) {
    channel_ = &channel;
    number_ = number;
  }
  // Logits of this replica's last step in the device's memory, [max_logits, vocab].
  TensorView logits() const { return model_.logits(); }

  Device& device() { return parts_.device; }
  const ModelConfig& config() const { return parts_.config; }
  const StepLimits& limits() const { return limits_; }  // of each replica
  const BackboneGrid& grid() const { return grid_; }
  int n_replicas() const { return grid_.n_replicas; }

 private:
  // The operations of a step.
  struct Work {
    LayerRange layers;
    int variant;     // of these layers' operations
    bool is_decode;  // the next token of each sequence, with drafts or without: such steps repeat
    std::span<const Batch> replicas;  // that decide what is enqueued here
    const MicroBatches& step;  // of this rank, as it passes through the layers; some may be empty
    const Batch& batch;        // the same as a whole; empty: this rank has no tokens in the step
    KvCache& cache;
  };
  StepChannel::Turn announced(StepMessage message) const;
  // Where a stage's keys are among those of a page, in bytes.
  Slice keys_of_stage(const KvCache& cache, int stage) const;
  void copy_own_keys(const KvCache& cache, int32_t page, Bytes out);
  template <class BytesOf>
  ConstBytes replies(BytesOf bytes_of) const;
  void announce_and_compute(StepOrder::Kind kind, std::span<const Batch> replicas, KvCache& cache);
  // is_received: the residual stream has been received before.
  void forward_piece(std::span<const Batch> replicas, KvCache& cache, int64_t first_logits,
                     int n_micro_batches, bool is_received = false);
  const Batch& begin_step(std::span<const Batch> replicas, int n_micro_batches);
  std::span<const Batch> deciding(std::span<const Batch> replicas) const;
  Pass layers_for_others(LayerRange layers, int micro_batch, PassMemory& memory);
  void run_or_replay(const Work& work, const std::function<void()>& enqueue);
  int64_t bytes_of(const LogitsWanted& wanted) const;
  bool is_counter(int rank) const { return grid_.part_of(rank) == 0; }
  bool is_decode(const Batch& step) const;
  bool is_decode(std::span<const Batch> replicas) const;
  bool passes_in_pieces(std::span<const Batch> replicas) const;
  int micro_batches_of(std::span<const Batch> replicas);
  MicroBatchPolicy::Step measured_step(std::span<const Batch> replicas) const;
  void compute(const Work& work, const std::function<void()>& enqueue);
  void run(const Work& work);

  const ModelParts parts_;
  const StepLimits limits_;
  DeepSeek model_;
  PassMemory memory_;
  StepChannel* channel_ = nullptr;  // null: no other rank repeats the steps
  int number_ = 0;                  // of this model in the channel
  const BackboneGrid grid_;
  const int rank_;
  const std::vector<StageLayers> stages_;  // [stages]
  Pipeline pipeline_;
  StageQueue in_flight_;
  MicroBatchDivider divider_;
  MicroBatchPolicy policy_;               // used where this rank decides
  std::unique_ptr<LogitsReader> reader_;  // null: there is no vocabulary yet
  bool others_know_vocabulary_ = false;
  bool counts_experts_ = false;
  bool is_measured_ = false;  // whether policy_ decided the step, and learns from it
  HostPages* host_pages_ = nullptr;
  ExpertMover* mover_ = nullptr;
  std::vector<MoveStatus> move_status_;  // [ranks]
  std::vector<std::byte> reply_;
  std::vector<int64_t> reply_bytes_;  // [ranks]
};

}  // namespace tandem
