// Rows cross once to each host: to the GPU there that is in the plane of the one that sends, which
// sends them on within its host. Prompts go by all-to-all on both levels, only to hosts with one of
// their experts. Decode steps, whose numbers of rows no host knows, go to all hosts by gather, and
// from there by low latency.
#include <array>

#include "comm/agreement.h"
#include "offload/gpu/exchange/cuda_exchange.h"

namespace tandem {
namespace {

// Within a host sums travel as floats: what its ranks have computed is rounded once.
RowFormats formats_within(RowFormats formats) { return {formats.there, RowFormat::kF32}; }

CudaExchange::Parts parts_between(const CudaExchange::Parts& p) {
  return {p.config, p.hosts->plane(), p.hosts->hosts(), p.stream, p.network, p.formats};
}
CudaExchange::Parts parts_within(const CudaExchange::Parts& p) {
  return {p.config, p.hosts->within(), p.hosts->ranks(),
          p.stream, p.network,         formats_within(p.formats)};
}

// What travels between hosts is one exchange, whose "ranks" are hosts, and for what comes by it,
// instead of computing, there is another one within the host.
class CudaHostExchange final : public CudaExchange {
 public:
  CudaHostExchange(ExchangeMode mode, const Parts& parts, int64_t max_rows)
      : CudaExchange(max_rows),
        n_hosts_(parts.hosts->plane().n_ranks()),
        host_(parts.hosts->host()),
        between_(mode == ExchangeMode::kAllToAll
                     ? make_cuda_all_to_all(parts_between(parts), max_rows)
                     : make_cuda_gather(parts_between(parts), max_rows)),
        within_(mode == ExchangeMode::kAllToAll
                    ? make_cuda_all_to_all(parts_within(parts), max_rows * n_hosts_)
                    : make_cuda_low_latency(parts_within(parts), max_rows * n_hosts_)) {}

  void open(Group& all) override {
    const std::unique_ptr<Group> of_host = all.split(host_);
    run_on_all(all, [&] {
      try {
        within_->open(*of_host);
      } catch (const AgreedError& error) {  // of this host's ranks: one reports it to all others
        if (error.reported_here) fail("among the GPUs of host {}: {}", host_, error.what());
      }
    });
  }
  void close() override { within_->close(); }
  uint64_t progress() const override { return within_->progress(); }

  void send(const CudaLane& lane, const ExpertBatch& own) override { between_->send(lane, own); }
  void send_counted(const CudaLane& lane) override { between_->send_counted(lane); }
  // By all-to-all the host waits until rows have come from other hosts, to learn how many go on to
  // each GPU.
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
    return {.number = lane.number,
            .first = lane.first * n_hosts_,
            .n_of_rank = lane.n_of_rank * n_hosts_};
  }

  const int n_hosts_, host_;
  const std::unique_ptr<CudaExchange> between_, within_;
  std::array<Here, ExpertPool::kMaxTickets> here_ = {};  // rows from all hosts
};

}  // namespace

int64_t cuda_host_exchange_bytes(ExchangeMode mode, const ModelConfig& config,
                                 const HostLayout& layout, int64_t max_rows, RowFormats formats) {
  const int n_hosts = layout.n_hosts(), n_of_host = static_cast<int>(layout.ranks_of(0).size());
  const RowFormats within = formats_within(formats);
  if (mode == ExchangeMode::kAllToAll)
    return cuda_all_to_all_bytes(config, n_hosts, max_rows, formats) +
           cuda_all_to_all_bytes(config, n_of_host, max_rows * n_hosts, within);
  return cuda_gather_bytes(config, n_hosts, max_rows, formats) +
         cuda_low_latency_bytes(config, n_of_host, max_rows * n_hosts, within);
}

std::unique_ptr<CudaExchange> make_cuda_host_exchange(ExchangeMode mode,
                                                      const CudaExchange::Parts& parts,
                                                      int64_t max_rows) {
  check(mode != ExchangeMode::kGather, "gather sends all rows to all GPUs");
  return std::make_unique<CudaHostExchange>(mode, parts, max_rows);
}

}  // namespace tandem
