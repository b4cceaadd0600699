#include "offload/ranks/courier.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/mapped_window.h"
#include "core/memory.h"
#include "core/rounding.h"

namespace tandem {
namespace {

// Own items do not travel: they are written where they would arrive, before those of other ranks.
class CountingCourier final : public Courier {
 public:
  CountingCourier(Group& group, const ItemSizes& sizes)
      : Courier(group),
        group_(group),
        bytes_(sizes.bytes),
        out_(sizes.max_out * sizes.bytes),
        in_(sizes.max_in * sizes.bytes),
        first_(group.size()),
        out_sizes_(group.size()),
        in_sizes_(group.size()),
        number_sizes_(group.size(), sizeof(int64_t)) {
    arrived_.items.resize(group.size());
    arrived_.n.resize(group.size());
  }
  void begin(std::span<const int64_t> n_to) override {
    n_to_.assign(n_to.begin(), n_to.end());
    int64_t n = 0;
    for (int r = 0; r < group_.size(); ++r) {
      first_[r] = n;
      n += r == group_.rank() ? 0 : n_to[r];
    }
    check((n_to_[group_.rank()] * bytes_) <= in_.bytes() && n * bytes_ <= out_.bytes(),
          "items of a step");
  }
  std::byte* place(int rank, int64_t index) override {
    return rank == group_.rank() ? in_.data() + index * bytes_
                                 : out_.data() + (first_[rank] + index) * bytes_;
  }
  const Arrived& end(std::span<const int64_t> n_from) override {
    return travel(in_.data(), out_.data(), n_from);
  }
  const Arrived& exchange(const std::byte* items, std::span<const int64_t> n_to,
                          std::span<const int64_t> n_from) override {
    n_to_.assign(n_to.begin(), n_to.end());
    return travel(items, items + n_to[group_.rank()] * bytes_, n_from);
  }

 private:
  // own, others: items for this rank and for the others.
  const Arrived& travel(const std::byte* own, const std::byte* others,
                        std::span<const int64_t> n_from) {
    const int rank = group_.rank();
    if (n_from.empty())
      group_.all_to_all({std::as_bytes(std::span(n_to_)), number_sizes_},
                        {std::as_writable_bytes(std::span(arrived_.n)), number_sizes_});
    else
      arrived_.n.assign(n_from.begin(), n_from.end());
    arrived_.items[rank] = own;
    const int64_t n_own = own == in_.data() ? arrived_.n[rank] : 0;
    int64_t n_out = 0, n_in = 0;
    for (int r = 0; r < group_.size(); ++r) {
      const bool is_own = r == rank;
      if (!is_own) arrived_.items[r] = in_.data() + (n_own + n_in) * bytes_;
      out_sizes_[r] = is_own ? 0 : n_to_[r] * bytes_;
      in_sizes_[r] = is_own ? 0 : arrived_.n[r] * bytes_;
      n_out += is_own ? 0 : n_to_[r];
      n_in += is_own ? 0 : arrived_.n[r];
    }
    check((n_own + n_in) * bytes_ <= in_.bytes(), "items of a step");
    group_.all_to_all({{others, static_cast<size_t>(n_out * bytes_)}, out_sizes_},
                      {in_.span().subspan(n_own * bytes_, n_in * bytes_), in_sizes_});
    return arrived_;
  }

  Group& group_;
  const int64_t bytes_;
  Buffer out_, in_;  // in_: own items, then those of the others
  std::vector<int64_t> n_to_, first_, out_sizes_, in_sizes_, number_sizes_;  // [ranks]
  Arrived arrived_;
};

// A number, then items: the place of a rank in every window.
constexpr int64_t kHead = 64;
int64_t place_bytes(const ItemSizes& sizes) {
  return round_up(kHead + sizes.max * sizes.bytes, kHead);
}

class WindowCourier final : public Courier {
 public:
  WindowCourier(Group& group, const ItemSizes& sizes)
      : Courier(group),
        group_(group),
        bytes_(sizes.bytes),
        max_(sizes.max),
        place_bytes_(place_bytes(sizes)),
        window_(group.allocate_window(place_of(group.size()))) {
    arrived_.items.resize(group.size());
    arrived_.n.resize(group.size());
  }
  void begin(std::span<const int64_t> n_to) override {
    for (int r = 0; r < group_.size(); ++r) {
      check(n_to[r] <= max_, "items of a step");
      std::memcpy(place(r, 0) - kHead, &n_to[r], sizeof(int64_t));
    }
  }
  std::byte* place(int rank, int64_t index) override {
    return window_->of(rank).data() + place_of(group_.rank()) + kHead + index * bytes_;
  }
  const Arrived& end(std::span<const int64_t>) override {
    ++round_;
    for (int r = 0; r < group_.size(); ++r) window_->signal(r, round_);
    for (int r = 0; r < group_.size(); ++r) {
      window_->wait(r, round_);
      const std::byte* const from = window_->of(group_.rank()).data() + place_of(r);
      std::memcpy(&arrived_.n[r], from, sizeof(int64_t));
      check(arrived_.n[r] <= max_, "items of a step");
      arrived_.items[r] = from + kHead;
    }
    return arrived_;
  }
  const Arrived& exchange(const std::byte* items, std::span<const int64_t> n_to,
                          std::span<const int64_t> n_from) override {
    begin(n_to);
    const std::byte* next = items;
    for (const int r : ranks_in_order()) {
      const int64_t n = n_to[r] * bytes_;
      if (r != group_.rank() && n > 0) std::memcpy(place(r, 0), next, n);
      next += n;
    }
    end(n_from);
    arrived_.items[group_.rank()] = items;
    return arrived_;
  }

 private:
  // Where the place of `rank` begins in every window.
  int64_t place_of(int rank) const { return rank * place_bytes_; }

  Group& group_;
  const int64_t bytes_, max_, place_bytes_;
  const std::unique_ptr<Window> window_;
  uint64_t round_ = 0;
  Arrived arrived_;
};

}  // namespace

Courier::Courier(const Group& group) : order_(group.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::rotate(order_.begin(), order_.begin() + group.rank(), order_.begin() + group.rank() + 1);
}

int64_t Courier::Arrived::total() const { return std::accumulate(n.begin(), n.end(), int64_t{0}); }

int64_t counting_courier_bytes(const ItemSizes& sizes) {
  return (sizes.max_out + sizes.max_in) * sizes.bytes;
}

int64_t window_courier_bytes(const ItemSizes& sizes, int n_ranks) {
  return MappedWindow::memory_bytes(n_ranks * place_bytes(sizes), n_ranks);
}

std::unique_ptr<Courier> make_counting_courier(Group& group, const ItemSizes& sizes) {
  return std::make_unique<CountingCourier>(group, sizes);
}

std::unique_ptr<Courier> make_window_courier(Group& group, const ItemSizes& sizes) {
  return std::make_unique<WindowCourier>(group, sizes);
}

}  // namespace tandem
