// A row goes once to each rank that has one of its experts, and a sum comes back from each, by
// plain stores into windows of fixed size that the GPUs have in each other's memory. The numbers of
// rows stand beside them, so the host knows none, and steps can be recorded.
//
// Every rank signals every rank in both directions, also without rows. So a rank writes the rows of
// a layer only after all have read those of the layer before, and one window is enough.
#include "comm/agreement.h"
#include "offload/gpu/exchange/cuda_parcels.h"

namespace tandem {
namespace {

constexpr int kLanes = ExpertPool::kMaxTickets;

// A window: words [kind, micro-batch, rank], then parcels [ranks * max_rows], then sums.
struct RowWindow {
  enum Kind { kCount, kRows, kSums };  // number of rows; signals that these and sums are there
  int64_t n_ranks, max_rows, parcel_bytes, sum_bytes;

  int64_t word(Kind kind, int lane, int rank) const {
    return ((kind * kLanes + lane) * n_ranks + rank) * 4;
  }
  int64_t parcels() const { return round_up(3 * kLanes * n_ranks * 4, 16); }
  int64_t sums() const { return parcels() + n_ranks * max_rows * parcel_bytes; }
  int64_t bytes() const { return sums() + n_ranks * max_rows * sum_bytes; }
  // Where those of rank `from` are in a micro-batch.
  int64_t parcels_from(const CudaLane& lane, int from) const {
    return parcels() + (lane.first * n_ranks + from * lane.n_of_rank) * parcel_bytes;
  }
  int64_t sums_from(const CudaLane& lane, int from) const {
    return sums() + (lane.first * n_ranks + from * lane.n_of_rank) * sum_bytes;
  }
};

// Adds to an Error what a user can do who has asked for this form.
template <class Work>
auto with_advice(const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    fail("{}: give --ep-dispatch gather or all-to-all", error.what());
  }
}

class CudaLowLatency final : public CudaExchange {
 public:
  CudaLowLatency(const Parts& parts, int64_t max_rows)
      : CudaExchange(max_rows),
        p_(parts),
        n_ranks_(parts.ranks.n_ranks()),
        parcels_(parts, max_rows),
        window_{n_ranks_, max_rows, parcels_.shape().bytes(), parcels_.answer_bytes()},
        counts_(int64_t{kLanes} * n_ranks_ * 4, gpu::Site::kDevice),
        signals_(kSignals * 2 * kLanes * 4, gpu::Site::kDevice),
        passed_(int64_t{2} * kLanes * 4, gpu::Site::kMapped),
        windows_(window_.bytes()),
        handle_(with_advice([&] { return windows_.handle(); })) {}

  void open(Group& group) override {
    std::vector<gpu::PeerWindows::Handle> all(n_ranks_);
    group.all_gather_values(handle_, std::span(all));
    run_on_all(group, [&] {
      with_advice([&] {
        require(n_ranks_ <= gpu::kMaxPeers, "{} GPUs share memory, which at most {} can", n_ranks_,
                gpu::kMaxPeers);
        windows_.open(all, group.rank());
      });
    });
  }

  void close() override { windows_.close(); }

  void send(const CudaLane& lane, const ExpertBatch& own) override {
    int32_t* const counts = counts_.as<int32_t>() + lane.number * n_ranks_;
    parcels_.pack(
        lane, own, counts,
        {.peers = windows_.addresses(), .offset = window_.parcels_from(lane, p_.ranks.rank())});
    p_.stream.record(ready_);
    p_.network.wait_for(ready_);
    signal(lane, RowWindow::kRows, counts);
  }

  Here arrived(const CudaLane& lane) override {
    p_.stream.wait_for(there_[lane.number]);
    return parcels_.unpack(lane, n_ranks_ * lane.n_of_rank,
                           {.parcels = windows_.own() + window_.parcels_from(lane, 0),
                            .counts = counts_from_ranks(lane),
                            .n_each = static_cast<int>(lane.n_of_rank)});
  }

  void send_back(const CudaLane& lane) override {
    p_.stream.record(ready_);
    p_.network.wait_for(ready_);
    const TensorView sums = parcels_.sums(lane);
    gpu::send_sums(p_.network, {.sums = {sums.row<float>(0), sums.stride},
                                .format = p_.formats.back,
                                .counts = counts_from_ranks(lane),
                                .n_each = static_cast<int>(lane.n_of_rank),
                                .rows = static_cast<int>(sums.rows),
                                .dim = static_cast<int>(sums.cols),
                                .peers = windows_.addresses(),
                                .offset = window_.sums_from(lane, p_.ranks.rank())});
    signal(lane, RowWindow::kSums, nullptr);
  }

  void add_to(const CudaLane& lane, TensorView y) override {
    p_.stream.wait_for(there_[lane.number]);
    parcels_.add_to(lane, windows_.own() + window_.sums_from(lane, 0),
                    static_cast<int>(lane.n_of_rank), y);
  }

  uint64_t progress() const override {
    uint64_t sum = 0;
    for (int i = 0; i < 2 * kLanes; ++i)
      sum += *static_cast<const volatile uint32_t*>(passed_.as<uint32_t>() + i);
    return sum;
  }

 private:
  enum Signal { kRaised, kAwaited, kSignals };
  const int32_t* counts_from_ranks(const CudaLane& lane) const {
    return reinterpret_cast<const int32_t*>(windows_.own() +
                                            window_.word(RowWindow::kCount, lane.number, 0));
  }
  // Tells all ranks that what this one has written is there, and waits for theirs.
  void signal(const CudaLane& lane, RowWindow::Kind kind, const int32_t* counts) {
    const int rank = p_.ranks.rank();
    const int number = (kind == RowWindow::kRows ? 0 : kLanes) + lane.number;
    auto* const signals = signals_.as<uint32_t>() + number * kSignals;
    gpu::signal_peers(p_.network, {.peers = windows_.addresses(),
                                   .word = window_.word(kind, lane.number, rank),
                                   .counts = counts,
                                   .count = window_.word(RowWindow::kCount, lane.number, rank),
                                   .n_raised = signals + kRaised,
                                   .n_ranks = n_ranks_});
    gpu::await_peers(p_.network, {.words = reinterpret_cast<const uint32_t*>(
                                      windows_.own() + window_.word(kind, lane.number, 0)),
                                  .n_awaited = signals + kAwaited,
                                  .passed = passed_.as<uint32_t>() + number,
                                  .n_ranks = n_ranks_});
    p_.network.record(there_[lane.number]);
  }

  const Parts p_;
  const int n_ranks_;
  CudaParcels parcels_;
  const RowWindow window_;
  const gpu::Buffer counts_;   // [micro-batches, ranks] rows for each rank
  const gpu::Buffer signals_;  // [rows or sums, micro-batches, Signal]
  const gpu::Buffer passed_;   // [rows or sums, micro-batches] signals that were awaited
  gpu::PeerWindows windows_;
  const gpu::PeerWindows::Handle handle_;  // of this rank's window
  gpu::Event ready_;                       // what is sent next
  std::array<gpu::Event, kLanes> there_;   // what was sent last has come
};

}  // namespace

int64_t cuda_low_latency_bytes(const ModelConfig& config, int n_ranks, int64_t max_rows,
                               RowFormats formats) {
  const auto dim = static_cast<int>(config.dim);
  const int64_t parcel = gpu::ParcelShape{dim, config.router.n_active, formats.there}.bytes();
  return CudaParcels::bytes_for(config, n_ranks, max_rows) +
         RowWindow{n_ranks, max_rows, parcel, encoded_bytes(formats.back, dim)}.bytes() + (2 << 20);
}

std::unique_ptr<CudaExchange> make_cuda_low_latency(const CudaExchange::Parts& parts,
                                                    int64_t max_rows) {
  return std::make_unique<CudaLowLatency>(parts, max_rows);
}

}  // namespace tandem
