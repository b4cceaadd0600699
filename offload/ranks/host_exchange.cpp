// The exchange of hosts with several ranks. A row crosses once to each host that has one of its
// experts, to the gateway there, which sends it on to the ranks that compute it. The gateway adds
// up their sums in ascending order of ranks, and one sum crosses back; those of the hosts are added
// in ascending order of hosts. A host's sum is rounded once, also where it does not cross, so a
// result depends neither on the rank that has the token nor on other tokens.
#include <algorithm>
#include <cstring>

#include "core/rounding.h"
#include "offload/ranks/exchanges.h"
#include "offload/ranks/rank_rows.h"

namespace tandem {
namespace {

// What crosses for a row: the row, then of those of its experts that are on the host the ids, the
// weights, and the numbers of their ranks in the host.
int64_t bytes_of_crossing(const ExchangeShape& shape) {
  return round_up(encoded_bytes(shape.there, shape.dim) + 12 * shape.n_active, 64);
}

// What the rank's couriers between hosts carry at most.
ItemSizes sizes_of_parcels(const HostLayout& layout, int rank, const ExchangeShape& shape) {
  const int64_t max = shape.max_tokens;
  return {.bytes = bytes_of_crossing(shape),
          .max = max,
          .max_out = max * (layout.n_hosts() - 1),
          .max_in = max * layout.n_sources(rank)};
}
ItemSizes sizes_of_sums(const HostLayout& layout, int rank, const ExchangeShape& shape) {
  const ItemSizes rows = sizes_of_parcels(layout, rank, shape);
  return {.bytes = encoded_bytes(shape.back, shape.dim),
          .max = rows.max,
          .max_out = rows.max_in,
          .max_in = rows.max_out};
}

// Within a host sums travel as floats.
ExchangeShape shape_within(ExchangeShape shape) {
  shape.back = RowFormat::kF32;
  return shape;
}

RankRows::Limits limits_within(const HostLayout& layout, int host, const ExchangeShape& shape) {
  const int64_t max = shape.max_tokens;
  return {max * (1 + layout.most_sources_on(host)), max * layout.n_ranks()};
}

// Through windows, which need no message about numbers, where the ranks of the host share memory.
std::unique_ptr<RankRows> rows_within(const HostGroups& groups, const ExchangeParts& parts) {
  const int host = groups.layout().host_of(parts.group.rank());
  const auto make = [&](ExchangeMode mode) {
    return std::make_unique<RankRows>(mode, groups.within(), parts.kernels,
                                      shape_within(parts.shape),
                                      limits_within(groups.layout(), host, parts.shape));
  };
  try {
    return make(ExchangeMode::kLowLatency);
  } catch (const RunError&) {
    throw;
  } catch (const Error&) {  // on all ranks of the host
    return make(ExchangeMode::kAllToAll);
  }
}

class HostExchange final : public ExpertExchange {
 public:
  HostExchange(const HostGroups& groups, const ExchangeParts& parts);
  int64_t max_rows() const override { return within_->max_rows(); }
  void begin(std::span<const int64_t>) override {}
  ExpertBatch dispatch(const ExpertBatch& mine) override;
  void combine(TensorView sums, TensorView y) override;

 private:
  // A host that has experts of a token. The row and the sum are number `index` of those that this
  // rank sends to the gateway, a rank of the plane, and gets from it; on this host, of those that
  // it sends within the host.
  struct Target {
    int host, gateway;
    int64_t index;
  };
  // Experts of a row as they cross, [n_active] each.
  struct Lists {
    int32_t* ids;
    float* weights;
    int32_t* ranks;
  };
  Lists lists_at(std::byte* begin) const {
    auto* const ids = reinterpret_cast<int32_t*>(begin);
    auto* const weights = reinterpret_cast<float*>(ids + p_.shape.n_active);
    return {ids, weights, reinterpret_cast<int32_t*>(weights + p_.shape.n_active)};
  }
  std::span<Target> targets_of(int64_t token) {
    return std::span(targets_).subspan(token * p_.shape.n_active, n_targets_[token]);
  }
  void choose(const ExpertBatch& mine);
  void cross(const ExpertBatch& mine);
  // Once cross() has encoded it.
  const std::byte* encoded_row(const ExpertBatch& mine, int64_t token) const {
    return encoded_.bytes() > 0 ? encoded_.data() + token * there_.bytes()
                                : reinterpret_cast<const std::byte*>(mine.x.row<float>(token));
  }
  void write_lists(const ExpertBatch& mine, int64_t token, int host, const Lists& out) const;
  void add_own(const ExpertBatch& mine);
  void add_arrived(const Courier::Arrived& arrived);
  void write_sum(int64_t row, std::byte* out);

  const HostLayout& layout_;
  const ExchangeParts p_;
  const int host_;
  ReplicaChooser chooser_;
  const RowCodec there_, back_;
  std::vector<int> gateways_;  // [hosts] ranks of the plane; -1: this host
  const std::unique_ptr<Courier> parcels_, sums_;
  const std::unique_ptr<RankRows> within_;

  // The tokens of this rank.
  std::vector<int32_t> ranks_;           // [max_tokens, n_active] that compute their experts
  std::vector<Target> targets_;          // [max_tokens, n_active] in ascending order of hosts
  std::vector<int64_t> n_targets_;       // [max_tokens]
  std::vector<int64_t> n_crossing_;      // [ranks of the plane] rows that go there
  Buffer encoded_;                       // [max_tokens] rows, if they are not floats
  std::vector<std::byte> own_lists_;     // of one token
  std::vector<cpu::WeightedRow> terms_;  // of one token

  std::vector<int64_t> n_arrived_;  // [ranks of the plane] rows that came from there
  int64_t n_own_ = 0;               // rows within the host that are this rank's; the others follow
  std::vector<float> sum_;          // [dim] of a row
  std::vector<std::byte> own_sum_;  // of a row, as it would cross
};

HostExchange::HostExchange(const HostGroups& groups, const ExchangeParts& parts)
    : layout_(groups.layout()),
      p_(parts),
      host_(layout_.host_of(parts.group.rank())),
      chooser_(parts.owners),
      there_(parts.kernels, parts.shape.there, parts.shape.dim),
      back_(parts.kernels, parts.shape.back, parts.shape.dim),
      parcels_(make_counting_courier(groups.plane(),
                                     sizes_of_parcels(layout_, parts.group.rank(), parts.shape))),
      sums_(make_counting_courier(groups.plane(),
                                  sizes_of_sums(layout_, parts.group.rank(), parts.shape))),
      within_(rows_within(groups, parts)),
      ranks_(int64_t{parts.shape.max_tokens} * parts.shape.n_active),
      targets_(ranks_.size()),
      n_targets_(parts.shape.max_tokens),
      n_crossing_(groups.plane().size()),
      encoded_(parts.shape.there == RowFormat::kF32 ? 0 : parts.shape.max_tokens * there_.bytes()),
      own_lists_(12 * parts.shape.n_active),
      n_arrived_(groups.plane().size()),
      sum_(parts.shape.dim),
      own_sum_(back_.bytes()) {
  for (int host = 0; host < layout_.n_hosts(); ++host)
    gateways_.push_back(
        host == host_ ? -1 : groups.rank_in_plane(layout_.gateway(parts.group.rank(), host)));
  terms_.reserve(parts.shape.n_active);
}

ExpertBatch HostExchange::dispatch(const ExpertBatch& mine) {
  choose(mine);
  cross(mine);
  within_->begin();
  add_own(mine);
  add_arrived(parcels_->end({}));
  return within_->dispatch(mine);
}

void HostExchange::choose(const ExpertBatch& mine) {
  check(mine.x.rows <= p_.shape.max_tokens, "tokens of a rank");
  const int n_active = p_.shape.n_active;
  std::fill(n_crossing_.begin(), n_crossing_.end(), 0);
  n_own_ = 0;
  chooser_.begin(mine.layer, mine.routing.ids);
  for (int64_t t = 0; t < mine.x.rows; ++t) {
    int32_t* const ranks = &ranks_[t * n_active];
    chooser_.choose(mine.routing.ids.row<int32_t>(t), n_active, p_.group.rank(), ranks);
    Target* const first = &targets_[t * n_active];
    Target* end = first;
    for (int k = 0; k < n_active; ++k) {
      if (ranks[k] < 0) continue;
      const int host = layout_.host_of(ranks[k]);
      if (std::none_of(first, end, [&](const Target& other) { return other.host == host; }))
        *end++ = {host, gateways_[host], 0};
    }
    std::sort(first, end, [](const Target& a, const Target& b) { return a.host < b.host; });
    for (Target* target = first; target != end; ++target)
      target->index = target->host == host_ ? n_own_++ : n_crossing_[target->gateway]++;
    n_targets_[t] = end - first;
  }
}

// A row is encoded once.
void HostExchange::cross(const ExpertBatch& mine) {
  parcels_->begin(n_crossing_);
  for (int64_t t = 0; t < mine.x.rows; ++t) {
    if (encoded_.bytes() > 0 && n_targets_[t] > 0)
      there_.encode(mine.x.row<float>(t), encoded_.data() + t * there_.bytes());
    for (const Target& target : targets_of(t)) {
      if (target.host == host_) continue;
      std::byte* const parcel = parcels_->place(target.gateway, target.index);
      std::memcpy(parcel, encoded_row(mine, t), there_.bytes());
      write_lists(mine, t, target.host, lists_at(parcel + there_.bytes()));
    }
  }
}

void HostExchange::write_lists(const ExpertBatch& mine, int64_t token, int host,
                               const Lists& out) const {
  const int n_active = p_.shape.n_active;
  const int32_t* const ranks = &ranks_[token * n_active];
  for (int k = 0; k < n_active; ++k) {
    const bool there = ranks[k] >= 0 && layout_.host_of(ranks[k]) == host;
    out.ids[k] = there ? mine.routing.ids.row<int32_t>(token)[k] : -1;
    out.weights[k] = there ? mine.routing.weights.row<float>(token)[k] : 0;
    out.ranks[k] = there ? layout_.number_in_host(ranks[k]) : -1;
  }
}

void HostExchange::add_own(const ExpertBatch& mine) {
  const Lists lists = lists_at(own_lists_.data());
  for (int64_t t = 0; t < mine.x.rows; ++t) {
    const std::span<const Target> targets = targets_of(t);
    if (std::none_of(targets.begin(), targets.end(),
                     [&](const Target& target) { return target.host == host_; }))
      continue;
    write_lists(mine, t, host_, lists);
    within_->add({nullptr, encoded_row(mine, t), lists.ids, lists.weights, lists.ranks});
  }
}

void HostExchange::add_arrived(const Courier::Arrived& arrived) {
  n_arrived_ = arrived.n;
  for (const int r : parcels_->ranks_in_order())
    for (int64_t i = 0; i < arrived.n[r]; ++i) {
      const std::byte* const parcel = arrived.items[r] + i * bytes_of_crossing(p_.shape);
      const Lists lists = lists_at(const_cast<std::byte*>(parcel) + there_.bytes());
      within_->add({nullptr, parcel, lists.ids, lists.weights, lists.ranks});
    }
}

void HostExchange::combine(TensorView sums, TensorView y) {
  within_->send_back(sums);
  sums_->begin(n_arrived_);
  int64_t row = n_own_;
  for (const int r : sums_->ranks_in_order())
    for (int64_t i = 0; i < n_arrived_[r]; ++i) write_sum(row++, sums_->place(r, i));
  const Courier::Arrived& arrived = sums_->end(n_crossing_);
  for (int64_t t = 0; t < y.rows; ++t) {
    terms_.clear();
    for (const Target& target : targets_of(t)) {
      const bool is_own = target.host == host_;
      if (is_own) write_sum(target.index, own_sum_.data());
      terms_.push_back(
          {is_own ? own_sum_.data() : arrived.items[target.gateway] + target.index * back_.bytes(),
           1});
    }
    p_.kernels.add_rows({terms_.data(), static_cast<int>(terms_.size()), type_of(p_.shape.back),
                         y.row<float>(t), p_.shape.dim});
  }
}

// The sum of this host for a row within it, rounded once.
void HostExchange::write_sum(int64_t row, std::byte* out) {
  const std::span<const cpu::WeightedRow> terms = within_->terms_of(row);
  if (terms.size() == 1) return back_.encode(static_cast<const float*>(terms[0].row), out);
  const bool floats = p_.shape.back == RowFormat::kF32;
  float* const sum = floats ? reinterpret_cast<float*>(out) : sum_.data();
  std::fill_n(sum, p_.shape.dim, 0.f);
  p_.kernels.add_rows(
      {terms.data(), static_cast<int>(terms.size()), cpu::ActivationType::kF32, sum, p_.shape.dim});
  if (!floats) back_.encode(sum, out);
}

}  // namespace

int64_t host_exchange_bytes(const HostLayout& layout, const ExchangeShape& shape) {
  int64_t most = 0;
  for (int rank = 0; rank < layout.n_ranks(); ++rank) {
    const int host = layout.host_of(rank);
    const auto n_within = static_cast<int>(layout.ranks_of(host).size());
    int64_t within = 0;  // of either way that rows_within() may find
    for (const ExchangeMode mode : {ExchangeMode::kLowLatency, ExchangeMode::kAllToAll})
      within = std::max(within, RankRows::bytes_for(mode, n_within, shape_within(shape),
                                                    limits_within(layout, host, shape)));
    most = std::max(most, within + counting_courier_bytes(sizes_of_parcels(layout, rank, shape)) +
                              counting_courier_bytes(sizes_of_sums(layout, rank, shape)));
  }
  return most + shape.max_tokens * encoded_bytes(shape.there, shape.dim);
}

std::unique_ptr<ExpertExchange> make_host_exchange(const HostGroups& groups,
                                                   const ExchangeParts& parts) {
  return std::make_unique<HostExchange>(groups, parts);
}

}  // namespace tandem
