// How the rows of tokens come to the GPUs that have their experts, and the sums back. What the
// forms of ExchangeMode enqueue differs in what travels and in what the host must know.
#pragma once
#include <memory>

#include "comm/group.h"
#include "gpu_kernels/exchange/collectives.h"
#include "model/backbone_share.h"
#include "model/config.h"
#include "offload/gpu/exchange/cuda_hosts.h"
#include "offload/gpu/exchange/cuda_owners.h"
#include "offload/ranks/expert_exchange.h"
#include "ops/expert_pool.h"

namespace tandem {

// The rows of a micro-batch.
struct CudaLane {
  int number = 0;         // of the micro-batch
  int64_t first = 0;      // of a rank's rows: those of the micro-batches before
  int64_t n_of_rank = 0;  // the most that a rank has
};

// Everything is enqueued, on the backbone's stream or on the network's, in the order of the calls
// of a micro-batch. A token's sum is that of all ranks, in ascending order of ranks but by gather,
// where it is in NCCL's; with Parts::hosts it is that of all hosts, each of the sum of its ranks.
class CudaExchange {
 public:
  struct Parts {
    const ModelConfig& config;
    gpu::Collectives& ranks;   // all ranks of the grid
    const CudaOwners& owners;  // of the same ranks
    gpu::Stream& stream;       // of the backbone
    gpu::Stream& network;      // of what ranks do together
    RowFormats formats = {};   // that are asked for, see formats_by()
    // With it all modes but gather send a row once to each host; null: once to each GPU.
    const CudaHosts* hosts = nullptr;
  };
  explicit CudaExchange(int64_t max_rows) : max_rows_(max_rows) {}
  virtual ~CudaExchange() = default;
  int64_t max_rows() const { return max_rows_; }  // of a rank in a step

  // Called by all ranks, of the group of Parts::ranks, once all have made the object. Throws
  // AgreedError.
  virtual void open(Group&) {}
  // The rows of this rank's tokens leave, at most n_of_rank, or are prepared for it.
  virtual void send(const CudaLane& lane, const ExpertBatch& own) = 0;
  // Rows leave whose number the host had to learn: it waits until they are prepared.
  virtual void send_counted(const CudaLane&) {}
  // The backbone's stream waits for rows. Returns those that this GPU computes, with ids of -1 for
  // experts of other ranks, and zeros for their sums, dense. May be none.
  struct Here {
    ExpertBatch batch;
    TensorView sums;
  };
  virtual Here arrived(const CudaLane& lane) = 0;
  virtual void send_back(const CudaLane& lane) = 0;
  // y += the sums of this rank's tokens.
  virtual void add_to(const CudaLane& lane, TensorView y) = 0;

  // Called by all ranks after their last use, before any of them destroys its object.
  virtual void close() {}

  // A number that changes while the GPU passes signals of others, beside Collectives::progress().
  virtual uint64_t progress() const { return 0; }

 private:
  const int64_t max_rows_;
};

// For up to max_rows rows of each rank in the micro-batches of a step together. References outlive
// what is made. All ranks call it, with a group of the same ranks. Throws AgreedError where a GPU
// has no memory, or kLowLatency needs that of a GPU that another one cannot reach.
std::unique_ptr<CudaExchange> make_cuda_exchange(ExchangeMode mode,
                                                 const CudaExchange::Parts& parts, Group& group,
                                                 int64_t max_rows);
// The same between GPUs, with and without Parts::hosts: gather sends rows that are not FP8 as
// floats too. Between hosts kLowLatency has its sums reduced.
constexpr RowFormats formats_by(ExchangeMode mode, bool by_hosts, RowFormats formats) {
  if (mode == ExchangeMode::kLowLatency && by_hosts) return {formats.there, RowFormat::kF32};
  if (mode == ExchangeMode::kGather && formats.there != RowFormat::kFp8)
    formats.there = RowFormat::kF32;
  return formats_by(mode, formats);
}
// Steps with kAllToAll cannot be recorded, because the host learns the numbers of rows in each
// layer.
constexpr bool can_record(ExchangeMode mode) { return mode != ExchangeMode::kAllToAll; }
// Bytes on each of the layout's GPUs at most, with and without Parts::hosts.
int64_t cuda_exchange_bytes(ExchangeMode mode, const ModelConfig& config, const HostLayout& layout,
                            int64_t max_rows, ExpertRows rows);

// One function each in the file of the form.
std::unique_ptr<CudaExchange> make_cuda_host_exchange(ExchangeMode mode,
                                                      const CudaExchange::Parts& parts,
                                                      int64_t max_rows);
int64_t cuda_host_exchange_bytes(ExchangeMode mode, const ModelConfig& config,
                                 const HostLayout& layout, int64_t max_rows, RowFormats formats);
std::unique_ptr<CudaExchange> make_cuda_gather(const CudaExchange::Parts& parts, int64_t max_rows);
std::unique_ptr<CudaExchange> make_cuda_all_to_all(const CudaExchange::Parts& parts,
                                                   int64_t max_rows);
std::unique_ptr<CudaExchange> make_cuda_low_latency(const CudaExchange::Parts& parts,
                                                    int64_t max_rows);
int64_t cuda_gather_bytes(const ModelConfig& config, int n_ranks, int64_t max_rows,
                          RowFormats formats);
int64_t cuda_all_to_all_bytes(const ModelConfig& config, int n_ranks, int64_t max_rows,
                              RowFormats formats);
int64_t cuda_low_latency_bytes(const ModelConfig& config, int n_ranks, int64_t max_rows,
                               RowFormats formats);

}  // namespace tandem
