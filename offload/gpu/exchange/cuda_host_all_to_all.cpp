// Rows cross once to each host: to the GPU there that is in the plane of the one that sends, which
// sends them on within its host. Both ways are all-to-all by NCCL.
#include <array>

#include "offload/gpu/exchange/cuda_exchange.h"

namespace tandem {
namespace {

// Within a host sums travel as floats: what its ranks have computed is rounded once.
RowFormats formats_within(RowFormats formats) { return {formats.there, RowFormat::kF32}; }

// What travels between hosts is one exchange, whose "ranks" are hosts, and for what comes by it,
// instead of computing, there is another one within the host.
class CudaHostAllToAll final : public CudaExchange {
 public:
  CudaHostAllToAll(const Parts& parts, int64_t max_rows)
      : CudaExchange(max_rows),
        hosts_(*parts.hosts),
        between_(make_cuda_all_to_all({parts.config, hosts_.plane(), hosts_.hosts(), parts.stream,
                                       parts.network, parts.formats},
                                      max_rows)),
        within_(make_cuda_all_to_all({parts.config, hosts_.within(), hosts_.ranks(), parts.stream,
                                      parts.network, formats_within(parts.formats)},
                                     max_rows * hosts_.plane().n_ranks())) {}

  void send(const CudaLane& lane, const ExpertBatch& own) override { between_->send(lane, own); }
  void send_counted(const CudaLane& lane) override { between_->send_counted(lane); }
  // The host waits until rows have come from other hosts, to learn how many go on to each GPU.
  Here arrived(const CudaLane& lane) override {
    Here& here = here_[lane.number];
    here = between_->arrived(lane);
    within_->send(within(lane), here.batch);
    within_->send_counted(within(lane));
    return within_->arrived(within(lane));
  }
  void send_back(const CudaLane& lane) override {
    within_->send_back(within(lane));
    within_->add_to(within(lane), here_[lane.number].sums);
    between_->send_back(lane);
  }
  void add_to(const CudaLane& lane, TensorView y) override { between_->add_to(lane, y); }

 private:
  // A GPU has the rows of its plane within its host.
  CudaLane within(const CudaLane& lane) const {
    const int n = hosts_.plane().n_ranks();
    return {.number = lane.number, .first = lane.first * n, .n_of_rank = lane.n_of_rank * n};
  }

  const CudaHosts& hosts_;
  const std::unique_ptr<CudaExchange> between_, within_;
  std::array<Here, ExpertPool::kMaxTickets> here_ = {};  // rows from all hosts
};

}  // namespace

int64_t cuda_host_all_to_all_bytes(const ModelConfig& config, const HostLayout& layout,
                                   int64_t max_rows, RowFormats formats) {
  const int n_hosts = layout.n_hosts(), n_of_host = static_cast<int>(layout.ranks_of(0).size());
  return cuda_all_to_all_bytes(config, n_hosts, max_rows, formats) +
         cuda_all_to_all_bytes(config, n_of_host, max_rows * n_hosts, formats_within(formats));
}

std::unique_ptr<CudaExchange> make_cuda_host_all_to_all(const CudaExchange::Parts& parts,
                                                        int64_t max_rows) {
  return std::make_unique<CudaHostAllToAll>(parts, max_rows);
}

}  // namespace tandem
