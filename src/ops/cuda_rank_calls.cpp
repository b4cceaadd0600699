#include "ops/cuda_rank_calls.h"

#include "core/check.h"

namespace tandem {

CudaRankCalls::CudaRankCalls(const RankGroups& groups, int64_t max_bytes, gpu::Stream& stream)
    : calls_(groups), staged_(max_bytes, gpu::Site::kMapped), stream_(stream) {}

void CudaRankCalls::all_reduce(TensorView x) {
  if (!calls_.divide()) return;
  const TensorView on_host = to_host(x);
  stream_.wait();
  calls_.all_reduce(on_host);
  from_host(x);
}

void CudaRankCalls::all_gather_cols(TensorView x, std::span<const Slice> slices) {
  if (!calls_.divide()) return;
  const TensorView on_host = to_host(x);
  stream_.wait();
  calls_.all_gather_cols(on_host, slices);
  from_host(x);
}

void CudaRankCalls::send(TensorView x) {
  const TensorView on_host = to_host(x);
  stream_.wait();
  calls_.send(on_host);
}

void CudaRankCalls::receive(TensorView x) {
  stream_.wait();  // for the copy that reads the memory
  calls_.receive(staged(x));
  from_host(x);
}

void CudaRankCalls::route(const Routing& routing) {
  if (!calls_.first_routes()) return;
  const int64_t weights_begin = routing.ids.rows * routing.ids.row_bytes();
  const auto place = [&](TensorView x, int64_t first_byte) {
    return calls_.is_first() ? to_host(x, first_byte) : staged(x, first_byte);
  };
  const Routing on_host = {place(routing.ids, 0), place(routing.weights, weights_begin)};
  stream_.wait();
  calls_.take_routing_of_first(on_host);
  if (calls_.is_first()) return;
  from_host(routing.ids);
  from_host(routing.weights, weights_begin);
}

// Its place in host memory.
TensorView CudaRankCalls::staged(TensorView x, int64_t first_byte) const {
  check(x.stride == x.cols, "matrices that travel are dense");
  check(first_byte + x.rows * x.row_bytes() <= staged_.bytes(), "a matrix fits its place");
  x.data = staged_.as<std::byte>() + first_byte;
  return x;
}

TensorView CudaRankCalls::to_host(TensorView x, int64_t first_byte) {
  const TensorView on_host = staged(x, first_byte);
  stream_.copy(x.data, x.rows * x.row_bytes(), on_host.data);
  return on_host;
}

void CudaRankCalls::from_host(TensorView x, int64_t first_byte) {
  stream_.copy(staged(x, first_byte).data, x.rows * x.row_bytes(), x.data);
}

}  // namespace tandem
