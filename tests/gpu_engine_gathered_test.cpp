// Experts of GPUs whose rows are gathered from all ranks, in one and in several micro-batches:
// their sums, with batches of unequal sizes and none, recorded or not, and that rows travel while
// others are computed. Ranks are threads here, with emulated GPUs.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "comm/local_ranks.h"
#include "core/clock.h"
#include "gpu_kernels/collectives.h"
#include "model/micro_batches.h"
#include "offload/gpu/cuda_gathered_experts.h"
#include "tests/check_close.h"
#include "tests/gpu_memory.h"
#include "tests/replica_tokens.h"
#include "tests/small_config.h"

namespace tandem::test {
namespace {

// Computes the experts of which the remainder by n_ranks is `rank`, in the order of the stream.
class EnqueuedExperts final : public ExpertPool {
 public:
  EnqueuedExperts(gpu::Stream& stream, int rank, int n_ranks)
      : stream_(stream), rank_(rank), n_ranks_(n_ranks) {}
  void add_to(Ticket ticket, TensorView y) override {
    EXPECT_EQ(ticket, batch_.micro_batch);
    stream_.run_on_host([this, batch = batch_, y] {
      for (int64_t t = 0; t < y.rows; ++t)
        for (int64_t k = 0; k < batch.routing.ids.cols; ++k)
          if (int32_t& e = batch.routing.ids.row<int32_t>(t)[k]; e % n_ranks_ != rank_) e = -1;
      add_multiplied(batch, y);
    });
  }

 private:
  Ticket start(const ExpertBatch& batch) override {
    batch_ = batch;
    return batch.micro_batch;
  }
  gpu::Stream& stream_;
  const int rank_, n_ranks_;
  ExpertBatch batch_ = {};
};

// A replica's tokens on a GPU.
class TokensOnGpu {
 public:
  TokensOnGpu(gpu::Stream& stream, const ReplicaTokens& tokens)
      : stream_(stream),
        n_(std::ssize(tokens.numbers)),
        dim_(tokens.dim),
        n_active_(tokens.n_active),
        x_(gpu::on_gpu(stream, tokens.x)),
        ids_(gpu::on_gpu(stream, tokens.ids)),
        weights_(gpu::on_gpu(stream, tokens.weights)),
        y_(gpu::on_gpu(stream, std::vector<float>(tokens.x.size(), 1))) {}
  ExpertBatch experts(int micro_batch, int first, int n) const {
    const TensorView ids{ids_.as<int32_t>(), n_, n_active_, n_active_, DType::kI32};
    const TensorView weights{weights_.as<float>(), n_, n_active_, n_active_};
    return {.layer = 1,
            .x = matrix(x_).rows_from(first, n),
            .routing = {ids.rows_from(first, n), weights.rows_from(first, n)},
            .first_row = first,
            .micro_batch = micro_batch};
  }
  TensorView y(int first, int n) const { return matrix(y_).rows_from(first, n); }
  std::vector<float> y() const { return gpu::from_gpu<float>(stream_, y_); }

 private:
  TensorView matrix(const gpu::Buffer& of) const { return {of.as<float>(), n_, dim_, dim_}; }
  gpu::Stream& stream_;
  const int64_t n_, dim_, n_active_;
  const gpu::Buffer x_, ids_, weights_, y_;
};

// A rank's GPU with its pool. `host` connects the ranks.
struct RankOfGpus {
  RankOfGpus(Group& host, BackboneGrid grid, const ModelConfig& c, int micro_batches)
      : ranks(connect(host)),
        mine(stream, host.rank(), host.size()),
        pool(c, {ranks, grid, mine, true, micro_batches, stream, network}, kMaxLaneTokens) {}
  static gpu::Collectives connect(Group& host) {
    gpu::Collectives::Id id = {};
    if (host.rank() == 0) id = gpu::Collectives::make_id();
    host.broadcast(std::as_writable_bytes(std::span(id)), 0);
    return {id, host.rank(), host.size()};
  }
  gpu::Stream stream, network;
  gpu::Collectives ranks;
  EnqueuedExperts mine;
  CudaGatheredExperts pool;
};

// Whether a step of these replicas has the sums of its tokens, in so many micro-batches.
void expect_sums(RankOfGpus& gpu, const ModelConfig& c, BackboneGrid grid, Group& group,
                 const std::vector<std::vector<int>>& step, int n, bool records) {
  std::vector<ReplicaTokens> tokens;
  std::vector<Batch> batches;
  for (int r = 0; r < grid.n_replicas; ++r)
    tokens.emplace_back(c, step[r], static_cast<unsigned>(n * 10 + r));
  for (const ReplicaTokens& of : tokens) batches.push_back(of.batch());
  const int rank = group.rank();
  const ReplicaTokens& own = tokens[grid.replica_of(rank)];
  const MicroBatchCuts cuts = micro_batch_cuts(own.batch(), n);
  const TokensOnGpu there(gpu.stream, own);
  const auto size = [&](int i) { return cuts[i + 1] - cuts[i]; };
  gpu.pool.begin_step(batches, n);
  const auto enqueue = [&] {
    for (int i = 0; i < n; ++i) {
      EXPECT_EQ(gpu.pool.submit(there.experts(i, cuts[i], size(i))), i);
      EXPECT_EQ(gpu.pool.waits(i), n > 1);
    }
    for (int i = 0; i < n; ++i) gpu.pool.serve(i);
    for (int i = 0; i < n; ++i) gpu.pool.add_to(i, there.y(cuts[i], size(i)));
  };
  if (records) {
    const gpu::Graph graph = gpu.stream.capture(enqueue);
    gpu.stream.replay(graph);
    gpu.stream.wait();
  } else {
    enqueue();
    gpu.stream.wait();
  }
  std::vector<float> want = own.sums();
  if (grid.tp > 1) {  // the ranks of a replica have a part of its sums each
    const std::vector<float> all = want;
    want.assign(all.size(), 1);
    for (int i = 0; i < n; ++i) {
      const auto [first, count] = grid.tokens_of(rank, size(i));
      const int64_t begin = (cuts[i] + first) * own.dim;
      std::copy_n(all.begin() + begin, count * own.dim, want.begin() + begin);
    }
  }
  if (!want.empty()) expect_close(there.y(), want, 1e-5 * largest(want));
  group.barrier();  // freeing memory waits for the streams of all ranks of this process
}

TEST(GatheredExperts, AddTheSameSumsInMicroBatches) {
  const ModelConfig c = small_config();
  for (const BackboneGrid grid : {BackboneGrid{2, 1}, BackboneGrid{3, 1}, BackboneGrid{2, 2}})
    for (const int most : {1, 2, 3, int{ExpertPool::kMeasured}}) {
      SCOPED_TRACE(
          fmt::format("{} replicas, tp {}, {} micro-batches", grid.n_replicas, grid.tp, most));
      run_local_ranks({grid.n_ranks()}, [&](Group& group) {
        RankOfGpus gpu(group, grid, c, most);
        EXPECT_EQ(gpu.pool.micro_batches({}, false), most);
        for (const auto& step : kLaneSteps)
          for (const int n : {1, 2, 3, 4})
            for (const bool records : {false, true})
              if (n == most || most == ExpertPool::kMeasured) {
                expect_sums(gpu, c, grid, group, step, n, records);
                group.barrier();
              }
      });
    }
}

bool becomes_true(const std::atomic<bool>& flag) {
  const auto start = Clock::now();
  while (!flag && seconds_since(start) < 60) std::this_thread::yield();
  return flag;
}

// Rank 1 sends nothing before the GPU of rank 0 has done what another micro-batch needs.
TEST(GatheredExperts, RowsAndSumsTravelWhileOthersAreComputed) {
  const ModelConfig c = small_config();
  const BackboneGrid grid{2, 1};
  const std::vector<int> tokens(8, 1);
  std::atomic<bool> computed_beside_rows = false, computed_beside_sums = false;
  run_local_ranks({2}, [&](Group& group) {
    RankOfGpus gpu(group, grid, c, 2);
    const ReplicaTokens own(c, tokens, static_cast<unsigned>(group.rank()));
    const TokensOnGpu there(gpu.stream, own);
    gpu.pool.begin_step(std::vector<Batch>(2, own.batch()), 2);
    const bool leads = group.rank() == 0;
    const auto compute = [&](std::atomic<bool>& flag) {
      if (leads)
        gpu.stream.run_on_host([&flag] { flag = true; });
      else
        EXPECT_TRUE(becomes_true(flag));
    };
    if (leads) gpu.pool.submit(there.experts(0, 0, 4));
    compute(computed_beside_rows);
    if (!leads) gpu.pool.submit(there.experts(0, 0, 4));
    gpu.pool.submit(there.experts(1, 4, 4));
    if (leads) gpu.pool.serve(0);
    compute(computed_beside_sums);
    if (!leads) gpu.pool.serve(0);
    gpu.pool.serve(1);
    for (const int i : {0, 1}) gpu.pool.add_to(i, there.y(4 * i, 4));
    gpu.stream.wait();
    const std::vector<float> want = own.sums();
    expect_close(there.y(), want, 1e-5 * largest(want));
    group.barrier();
  });
}

}  // namespace
}  // namespace tandem::test
