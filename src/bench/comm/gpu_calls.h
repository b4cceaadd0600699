// `tandem bench comm --device cuda`: what the GPUs of ranks do together. The calls are NCCL's own
// (gpu_kernels/exchange/collectives.h), so they are compared in a recorded graph, as decode steps
// make them, and enqueued one by one, as prompts do.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/comm/comm.h"
#include "core/row_format.h"
#include "offload/ranks/expert_exchange.h"

namespace tandem {

enum class GpuCall : uint8_t { kBroadcast, kAllGather, kAllToAll, kReduceScatter, kAllReduce };
constexpr GpuCall kGpuCalls[] = {GpuCall::kBroadcast, GpuCall::kAllGather, GpuCall::kAllToAll,
                                 GpuCall::kReduceScatter, GpuCall::kAllReduce};
constexpr const char* name_of(GpuCall call) {
  constexpr const char* kNames[] = {"broadcast", "all_gather", "all_to_all", "reduce_scatter",
                                    "all_reduce"};
  return kNames[static_cast<int>(call)];
}

// The GPUs of all ranks. All ranks make the same calls.
class GpuCalls {
 public:
  static constexpr int kCalls = 8;  // of an invocation, which then waits for the GPU
  struct Prepared {
    ComparedCalls calls;      // own: a recorded graph; raw: calls that are enqueued one by one
    int64_t bytes;            // of a call: the whole vector, or what this rank sends
    RowFormats formats = {};  // of an exchange of rows
    // Called by all ranks before the object is destroyed.
    std::function<void()> close = [] {};
  };

  virtual ~GpuCalls() = default;
  virtual std::string gpu() const = 0;  // its name
  // A call with about `bytes` in all, once its result has been found right, recorded and enqueued.
  // Throws RunError where it is wrong. The GPUs outlive it.
  virtual Prepared prepare(GpuCall call, int64_t bytes) = 0;
  // All-to-all with `sizes` bytes, multiples of 4, to and from each rank, in the same way.
  // sizes: [ranks]
  virtual Prepared all_to_all(std::span<const int64_t> sizes) = 0;
  // A way of the rows of n_tokens tokens of each rank.
  struct RowsTravel {
    ExchangeMode mode;
    ExpertRows rows;
    int n_tokens;
    const HostLayout* hosts = nullptr;  // a row goes once to each host; null: once to each rank
  };
  // Rows to the experts of a layer, dealt in turns, and sums back, with the model's shapes, random
  // routing and sums of zeros. Experts round rows to BF16. kAllToAll is not recorded, so both calls
  // enqueue it. `bytes` are those that this rank sends there and gets back, its own too; with
  // `hosts` they are those between hosts and those within, which others send on. Throws AgreedError
  // where the GPUs cannot.
  virtual Prepared exchange(const ModelConfig& config, const RowsTravel& travel) = 0;
};

// Connects the GPUs; the ranks have one each. Throws Error where NCCL is missing or cannot.
std::unique_ptr<GpuCalls> connect_gpus(Group& group);

// The calls of every size, and what --out gets: `gpu_link` of a host with several GPUs, and
// `network` between hosts. `machine`: the text of --out before; empty: there is no --out. Returns
// the text after. hosts: of the ranks
std::string bench_gpu_calls(const BenchInput& bench, const HostLayout& hosts, GpuCalls& gpus,
                            const std::string& machine, const OnRow& on_row);

// A machine file with this link between the GPUs of a host. `source`: in messages. Throws Error for
// a file that describes no machine, or hosts of several kinds.
std::string with_gpu_link(const std::string& machine, const std::string& source, Link link);

}  // namespace tandem
