#include "comm/group.h"

#include <algorithm>

namespace tandem {
namespace {

constexpr int64_t kFloat = sizeof(float);
// all_reduce takes this many floats at a time, which bounds its scratch memory.
constexpr size_t kMaxFloats = size_t{1} << 24;

}  // namespace

void Group::all_gather_equal(ConstBytes mine, Bytes out) {
  sizes_.assign(size(), static_cast<int64_t>(mine.size()));
  all_gather(mine, {out, sizes_});
}

// Every rank gets the parts of its piece from all ranks and adds them.
void Group::reduce_scatter(Pieces<const float> in, std::span<float> out) {
  const int64_t n = in.sizes[rank()];
  check(n == static_cast<int64_t>(out.size()), "reduce_scatter: out is this rank's piece");
  in_sizes_.clear();
  for (const int64_t size : in.sizes) in_sizes_.push_back(size * kFloat);
  out_sizes_.assign(size(), n * kFloat);
  parts_.resize(n * size());
  all_to_all({std::as_bytes(in.all), in_sizes_},
             {std::as_writable_bytes(std::span(parts_)), out_sizes_});

  std::copy_n(parts_.begin(), n, out.begin());
  for (int r = 1; r < size(); ++r)
    for (int64_t i = 0; i < n; ++i) out[i] += parts_[r * n + i];
}

// Every rank adds up its share of x, then all shares go to all ranks.
void Group::all_reduce(std::span<float> x) {
  if (size() == 1) return;
  for (; x.size() > kMaxFloats; x = x.subspan(kMaxFloats)) all_reduce(x.first(kMaxFloats));
  const auto n = static_cast<int64_t>(x.size());
  const auto begin = [&](int r) { return n * r / size(); };
  sizes_.clear();
  for (int r = 0; r < size(); ++r) sizes_.push_back(begin(r + 1) - begin(r));
  const std::span<float> mine = x.subspan(begin(rank()), sizes_[rank()]);
  reduce_scatter({x, sizes_}, mine);
  for (int64_t& size : sizes_) size *= kFloat;
  all_gather(std::as_bytes(mine), {std::as_writable_bytes(x), sizes_});
}

}  // namespace tandem
