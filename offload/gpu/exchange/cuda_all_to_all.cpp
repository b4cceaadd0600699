// A row goes once to each rank that has one of its experts, and a sum comes back from each. The
// host waits for the numbers of rows, because NCCL takes them from it.
#include <algorithm>

#include "offload/gpu/exchange/cuda_parcels.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

// The most ranks that a row goes to.
int64_t most_copies(const ModelConfig& config, int n_ranks) {
  return std::min(n_ranks, config.router.n_active);
}

class CudaAllToAll final : public CudaExchange {
 public:
  CudaAllToAll(const Parts& parts, int64_t max_rows)
      : CudaExchange(max_rows),
        p_(parts),
        n_ranks_(parts.ranks.n_ranks()),
        n_copies_(most_copies(parts.config, n_ranks_)),
        parcels_(parts, max_rows),
        sent_(n_copies_ * max_rows * parcels_.shape().bytes(), gpu::Site::kDevice),
        received_(n_ranks_ * max_rows * parcels_.shape().bytes(), gpu::Site::kDevice),
        answers_(n_copies_ * max_rows * parcels_.answer_bytes(), gpu::Site::kDevice),
        encoded_(encodes() ? n_ranks_ * max_rows * parcels_.answer_bytes() : 0, gpu::Site::kDevice),
        counts_(ExpertPool::kMaxTickets * bytes_of_counts(), gpu::Site::kDevice),
        counts_here_(ExpertPool::kMaxTickets * bytes_of_counts(), gpu::Site::kMapped) {
    for (Numbers& n : numbers_)
      n = {std::vector<int64_t>(n_ranks_), std::vector<int64_t>(n_ranks_)};
  }

  void send(const CudaLane& lane, const ExpertBatch& own) override {
    int32_t* const all = counts_.as<int32_t>() + lane.number * n_ranks_ * n_ranks_;
    parcels_.pack(lane, own, all + p_.ranks.rank() * n_ranks_, {.out = sent_of(lane)});
    p_.stream.record(ready_);
    p_.network.wait_for(ready_);
    p_.ranks.all_gather(p_.network, all, n_ranks_);
    p_.network.copy(all, bytes_of_counts(), here_of(lane));
    p_.network.record(there_[lane.number]);
  }

  void send_counted(const CudaLane& lane) override {
    there_[lane.number].wait();
    const int32_t* const all = here_of(lane);
    Numbers& n = numbers_[lane.number];
    for (int r = 0; r < n_ranks_; ++r) {
      n.sent[r] = all[p_.ranks.rank() * n_ranks_ + r];
      n.received[r] = all[r * n_ranks_ + p_.ranks.rank()];
    }
    const int64_t words = parcels_.shape().bytes() / 4;
    exchange(lane, {sent_of(lane), times(n.sent, words, words_sent_), received_of(lane),
                    times(n.received, words, words_received_)});
  }

  Here arrived(const CudaLane& lane) override {
    p_.stream.wait_for(there_[lane.number]);
    int64_t n = 0;
    for (const int64_t of_rank : numbers_[lane.number].received) n += of_rank;
    return parcels_.unpack(lane, n, {.parcels = received_of(lane)});
  }

  void send_back(const CudaLane& lane) override {
    const TensorView sums = parcels_.sums(lane);
    void* answers = sums.data;
    if (encodes()) {
      std::byte* const out =
          encoded_.as<std::byte>() + lane.first * n_ranks_ * parcels_.answer_bytes();
      gpu::send_sums(p_.stream, {.sums = gpu_matrix(sums),
                                 .format = p_.formats.back,
                                 .out = out,
                                 .rows = static_cast<int>(sums.rows),
                                 .dim = static_cast<int>(sums.cols)});
      answers = out;
    }
    p_.stream.record(ready_);
    p_.network.wait_for(ready_);
    const Numbers& n = numbers_[lane.number];
    const int64_t words = parcels_.answer_bytes() / 4;
    exchange(lane, {answers, times(n.received, words, words_sent_), answers_of(lane),
                    times(n.sent, words, words_received_)});
  }

  void add_to(const CudaLane& lane, TensorView y) override {
    p_.stream.wait_for(there_[lane.number]);
    parcels_.add_to(lane, answers_of(lane), 0, y);
  }

 private:
  // Rows that this rank sends to each rank and gets from it, [ranks].
  struct Numbers {
    std::vector<int64_t> sent, received;
  };
  // Whether sums are not sent as the experts have computed them.
  bool encodes() const { return p_.formats.back != RowFormat::kF32; }
  int64_t bytes_of_counts() const { return int64_t{n_ranks_} * n_ranks_ * 4; }
  std::byte* sent_of(const CudaLane& lane) const {
    return sent_.as<std::byte>() + lane.first * n_copies_ * parcels_.shape().bytes();
  }
  std::byte* received_of(const CudaLane& lane) const {
    return received_.as<std::byte>() + lane.first * n_ranks_ * parcels_.shape().bytes();
  }
  std::byte* answers_of(const CudaLane& lane) const {
    return answers_.as<std::byte>() + lane.first * n_copies_ * parcels_.answer_bytes();
  }
  int32_t* here_of(const CudaLane& lane) const {
    return counts_here_.as<int32_t>() + lane.number * n_ranks_ * n_ranks_;
  }
  static const std::vector<int64_t>& times(const std::vector<int64_t>& rows, int64_t words,
                                           std::vector<int64_t>& out) {
    out.clear();
    for (const int64_t n : rows) out.push_back(n * words);
    return out;
  }
  void exchange(const CudaLane& lane, const gpu::Collectives::Parcels& parcels) {
    p_.ranks.all_to_all(p_.network, parcels);
    p_.network.record(there_[lane.number]);
  }

  const Parts p_;
  const int n_ranks_;
  const int64_t n_copies_;
  CudaParcels parcels_;
  const gpu::Buffer sent_;         // [n_copies_ * max_rows] parcels
  const gpu::Buffer received_;     // [ranks * max_rows] parcels
  const gpu::Buffer answers_;      // [n_copies_ * max_rows] sums
  const gpu::Buffer encoded_;      // [ranks * max_rows] sums that are sent, where encodes()
  const gpu::Buffer counts_;       // [micro-batches, from rank, to rank]
  const gpu::Buffer counts_here_;  // the same for the host
  std::array<Numbers, ExpertPool::kMaxTickets> numbers_;
  std::vector<int64_t> words_sent_, words_received_;
  gpu::Event ready_;                                       // what is sent next
  std::array<gpu::Event, ExpertPool::kMaxTickets> there_;  // what was sent last has come
};

}  // namespace

int64_t cuda_all_to_all_bytes(const ModelConfig& config, int n_ranks, int64_t max_rows,
                              RowFormats formats) {
  const auto dim = static_cast<int>(config.dim);
  const int64_t parcel = gpu::ParcelShape{dim, config.router.n_active, formats.there}.bytes();
  const int64_t n_copies = most_copies(config, n_ranks);
  const int64_t n_answers = n_copies + (formats.back == RowFormat::kF32 ? 0 : n_ranks);
  return CudaParcels::bytes_for(config, n_ranks, max_rows) +
         max_rows * (n_copies + n_ranks) * parcel +
         max_rows * n_answers * encoded_bytes(formats.back, dim) +
         int64_t{ExpertPool::kMaxTickets} * n_ranks * n_ranks * 4;
}

std::unique_ptr<CudaExchange> make_cuda_all_to_all(const CudaExchange::Parts& parts,
                                                   int64_t max_rows) {
  return std::make_unique<CudaAllToAll>(parts, max_rows);
}

}  // namespace tandem
