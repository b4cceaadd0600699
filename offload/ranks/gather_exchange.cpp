// The exchange in which all rows go to all ranks: a rank computes its experts for all tokens, and
// the sums are added by reduce_scatter.
#include <cstring>
#include <numeric>

#include "core/memory.h"
#include "offload/ranks/exchanges.h"

namespace tandem {
namespace {

std::span<float> floats_of(const TensorView& sums) {
  check(sums.stride == sums.cols, "sums are dense");
  return {static_cast<float*>(sums.data), static_cast<size_t>(sums.rows * sums.cols)};
}

// A token's row, ids and weights.
int64_t bytes_of_parcel(const ExchangeShape& shape) {
  return encoded_bytes(shape.there, shape.dim) + 8 * shape.n_active;
}

class GatherExchange final : public ExpertExchange {
 public:
  explicit GatherExchange(const ExchangeParts& parts)
      : p_(parts),
        chooser_(parts.owners),
        there_(parts.kernels, parts.shape.there, parts.shape.dim),
        n_tokens_(parts.group.size()),
        sizes_(parts.group.size()),
        parcels_(max_rows() * parcel_bytes()),
        x_(max_rows() * p_.shape.dim * 4),
        all_ids_(max_rows() * p_.shape.n_active),
        ids_(all_ids_.size()),
        weights_(all_ids_.size()) {}

  int64_t max_rows() const override { return int64_t{p_.shape.max_tokens} * p_.group.size(); }
  void begin(std::span<const int64_t> n_tokens) override {
    n_tokens_.assign(n_tokens.begin(), n_tokens.end());
    for (const int64_t n : n_tokens) check(n <= p_.shape.max_tokens, "tokens of a rank");
  }
  ExpertBatch dispatch(const ExpertBatch& mine) override;
  void combine(TensorView sums, TensorView y) override;

 private:
  int64_t parcel_bytes() const { return bytes_of_parcel(p_.shape); }
  // Tokens of the ranks before `rank`.
  int64_t first_row(int rank) const {
    return std::accumulate(n_tokens_.begin(), n_tokens_.begin() + rank, int64_t{0});
  }
  std::span<const int64_t> sizes(int64_t of_token) {
    for (int r = 0; r < p_.group.size(); ++r) sizes_[r] = n_tokens_[r] * of_token;
    return sizes_;
  }

  TensorView own_ids(int layer, const TensorView& all);

  const ExchangeParts p_;
  ReplicaChooser chooser_;
  const RowCodec there_;
  std::vector<int64_t> n_tokens_, sizes_;  // [ranks]
  Buffer parcels_;                         // [max_rows()]
  Buffer x_;                               // [max_rows(), dim]
  std::vector<int32_t> all_ids_, ids_;     // [max_rows(), n_active]
  std::vector<float> weights_;             // [max_rows(), n_active]
};

ExpertBatch GatherExchange::dispatch(const ExpertBatch& mine) {
  const int rank = p_.group.rank(), dim = p_.shape.dim, n_active = p_.shape.n_active;
  const int64_t row_bytes = there_.bytes(), list = 4 * n_active;
  check(mine.x.rows == n_tokens_[rank], "begin() and dispatch() have the same tokens");
  std::byte* const own = parcels_.data() + first_row(rank) * parcel_bytes();
  for (int64_t t = 0; t < mine.x.rows; ++t) {
    std::byte* const parcel = own + t * parcel_bytes();
    there_.encode(mine.x.row<float>(t), parcel);
    std::memcpy(parcel + row_bytes, mine.routing.ids.row<int32_t>(t), list);
    std::memcpy(parcel + row_bytes + list, mine.routing.weights.row<float>(t), list);
  }
  const int64_t n = first_row(p_.group.size());
  p_.group.all_gather({own, static_cast<size_t>(mine.x.rows * parcel_bytes())},
                      {parcels_.span().first(n * parcel_bytes()), sizes(parcel_bytes())});

  auto* const x = reinterpret_cast<float*>(x_.data());
  for (int64_t t = 0; t < n; ++t) {
    const std::byte* const parcel = parcels_.data() + t * parcel_bytes();
    there_.decode(parcel, x + t * dim);
    std::memcpy(&all_ids_[t * n_active], parcel + row_bytes, list);
    std::memcpy(&weights_[t * n_active], parcel + row_bytes + list, list);
  }
  ExpertBatch batch = mine;
  batch.x = {x, n, dim, dim};
  batch.routing.ids = own_ids(mine.layer, {all_ids_.data(), n, n_active, n_active, DType::kI32});
  batch.routing.weights = {weights_.data(), n, n_active, n_active};
  return batch;
}

// The ids of all rows; -1 for those that other ranks compute.
TensorView GatherExchange::own_ids(int layer, const TensorView& all) {
  const int n_active = p_.shape.n_active;
  chooser_.begin(layer, all);
  int64_t first = 0;
  for (int source = 0; source < p_.group.size(); ++source) {
    const int64_t n = n_tokens_[source];
    chooser_.own_ids(all.rows_from(first, n), source, p_.group.rank(),
                     ids_.data() + first * n_active);
    first += n;
  }
  return {ids_.data(), all.rows, n_active, n_active, DType::kI32};
}

void GatherExchange::combine(TensorView sums, TensorView y) {
  const std::span<float> all = floats_of(sums);
  const int rank = p_.group.rank(), dim = p_.shape.dim;
  const std::span<float> own = all.subspan(first_row(rank) * dim, n_tokens_[rank] * dim);
  p_.group.reduce_scatter({all, sizes(dim)}, own);
  for (int64_t t = 0; t < y.rows; ++t) {
    const cpu::WeightedRow sum = {own.data() + t * dim, 1};
    p_.kernels.add_rows({&sum, 1, cpu::ActivationType::kF32, y.row<float>(t), dim});
  }
}

}  // namespace

// The last term: parts of sums, which Group::reduce_scatter() keeps.
int64_t gather_exchange_bytes(int n_ranks, const ExchangeShape& shape) {
  const int64_t rows = int64_t{n_ranks} * shape.max_tokens, of_row = 4 * int64_t{shape.dim};
  return rows * (bytes_of_parcel(shape) + of_row + 12 * shape.n_active) + rows * of_row;
}

std::unique_ptr<ExpertExchange> make_gather_exchange(const ExchangeParts& parts) {
  return std::make_unique<GatherExchange>(parts);
}

}  // namespace tandem
