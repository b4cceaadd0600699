// The exchanges in which a row goes once to each rank that has one of its experts.
#include "offload/ranks/exchanges.h"
#include "offload/ranks/rank_rows.h"

namespace tandem {
namespace {

RankRows::Limits limits_of(int n_ranks, const ExchangeShape& shape) {
  return {shape.max_tokens, int64_t{n_ranks} * shape.max_tokens};
}

class RowExchange final : public ExpertExchange {
 public:
  RowExchange(ExchangeMode mode, const ExchangeParts& parts)
      : p_(parts),
        chooser_(parts.owners),
        rows_(mode, parts.group, parts.kernels, parts.shape,
              limits_of(parts.group.size(), parts.shape)),
        ranks_(parts.shape.n_active) {}
  int64_t max_rows() const override { return rows_.max_rows(); }
  void begin(std::span<const int64_t>) override {}

  ExpertBatch dispatch(const ExpertBatch& mine) override {
    chooser_.begin(mine.layer, mine.routing.ids);
    rows_.begin();
    for (int64_t t = 0; t < mine.x.rows; ++t) {
      const int32_t* const ids = mine.routing.ids.row<int32_t>(t);
      chooser_.choose(ids, p_.shape.n_active, p_.group.rank(), ranks_.data());
      rows_.add(
          {mine.x.row<float>(t), nullptr, ids, mine.routing.weights.row<float>(t), ranks_.data()});
    }
    return rows_.dispatch(mine);
  }

  void combine(TensorView sums, TensorView y) override {
    rows_.send_back(sums);
    for (int64_t t = 0; t < y.rows; ++t) {
      const std::span<const cpu::WeightedRow> terms = rows_.terms_of(t);
      p_.kernels.add_rows({terms.data(), static_cast<int>(terms.size()), type_of(p_.shape.back),
                           y.row<float>(t), p_.shape.dim});
    }
  }

 private:
  const ExchangeParts p_;
  ReplicaChooser chooser_;
  RankRows rows_;
  std::vector<int32_t> ranks_;  // [n_active] of a token
};

}  // namespace

int64_t row_exchange_bytes(ExchangeMode mode, int n_ranks, const ExchangeShape& shape) {
  return RankRows::bytes_for(mode, n_ranks, shape, limits_of(n_ranks, shape));
}

std::unique_ptr<ExpertExchange> make_row_exchange(ExchangeMode mode, const ExchangeParts& parts) {
  return std::make_unique<RowExchange>(mode, parts);
}

}  // namespace tandem
