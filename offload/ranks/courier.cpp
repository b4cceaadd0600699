#include "offload/ranks/courier.h"

#include <cstring>
#include <numeric>

#include "core/memory.h"

namespace tandem {
namespace {

class CountingCourier final : public Courier {
 public:
  CountingCourier(Group& group, const ItemSizes& sizes)
      : group_(group),
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
    std::exclusive_scan(n_to.begin(), n_to.end(), first_.begin(), int64_t{0});
  }
  void put(int rank, int64_t index, ConstBytes item) override {
    std::memcpy(out_.data() + (first_[rank] + index) * bytes_, item.data(), item.size());
  }
  const Arrived& end(std::span<const int64_t> n_from) override {
    if (n_from.empty())
      group_.all_to_all({std::as_bytes(std::span(n_to_)), number_sizes_},
                        {std::as_writable_bytes(std::span(arrived_.n)), number_sizes_});
    else
      arrived_.n.assign(n_from.begin(), n_from.end());
    int64_t n_out = 0, n_in = 0;
    for (int r = 0; r < group_.size(); ++r) {
      arrived_.items[r] = in_.data() + n_in * bytes_;
      out_sizes_[r] = n_to_[r] * bytes_;
      in_sizes_[r] = arrived_.n[r] * bytes_;
      n_out += n_to_[r];
      n_in += arrived_.n[r];
    }
    check(n_in * bytes_ <= in_.bytes() && n_out * bytes_ <= out_.bytes(), "items of a step");
    group_.all_to_all({out_.span().first(n_out * bytes_), out_sizes_},
                      {in_.span().first(n_in * bytes_), in_sizes_});
    return arrived_;
  }

 private:
  Group& group_;
  const int64_t bytes_;
  Buffer out_, in_;
  std::vector<int64_t> n_to_, first_, out_sizes_, in_sizes_, number_sizes_;  // [ranks]
  Arrived arrived_;
};

class WindowCourier final : public Courier {
 public:
  WindowCourier(Group& group, const ItemSizes& sizes)
      : group_(group),
        bytes_(sizes.bytes),
        max_(sizes.max),
        window_(group.allocate_window(place_of(group.size()))) {
    arrived_.items.resize(group.size());
    arrived_.n.resize(group.size());
  }
  void begin(std::span<const int64_t> n_to) override {
    for (int r = 0; r < group_.size(); ++r)
      window_->put(r, place_of(group_.rank()), std::as_bytes(n_to.subspan(r, 1)));
  }
  void put(int rank, int64_t index, ConstBytes item) override {
    window_->put(rank, place_of(group_.rank()) + kHead + index * bytes_, item);
  }
  const Arrived& end(std::span<const int64_t>) override {
    ++round_;
    for (int r = 0; r < group_.size(); ++r) window_->signal(r, round_);
    for (int r = 0; r < group_.size(); ++r) {
      window_->wait(r, round_);
      const std::byte* const place = window_->mine().data() + place_of(r);
      std::memcpy(&arrived_.n[r], place, sizeof(int64_t));
      check(arrived_.n[r] <= max_, "items of a step");
      arrived_.items[r] = place + kHead;
    }
    return arrived_;
  }

 private:
  static constexpr int64_t kHead = 64;
  // The place of `rank` in every window.
  int64_t place_of(int rank) const { return rank * round_up(kHead + max_ * bytes_, kHead); }

  Group& group_;
  const int64_t bytes_, max_;
  const std::unique_ptr<Window> window_;
  uint64_t round_ = 0;
  Arrived arrived_;
};

}  // namespace

int64_t Courier::Arrived::total() const { return std::accumulate(n.begin(), n.end(), int64_t{0}); }

std::unique_ptr<Courier> make_counting_courier(Group& group, const ItemSizes& sizes) {
  return std::make_unique<CountingCourier>(group, sizes);
}

std::unique_ptr<Courier> make_window_courier(Group& group, const ItemSizes& sizes) {
  return std::make_unique<WindowCourier>(group, sizes);
}

}  // namespace tandem
