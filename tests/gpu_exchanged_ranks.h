// Ranks that are threads, with emulated GPUs whose experts get rows from all of them.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>

#include "comm/local_ranks.h"
#include "gpu_kernels/exchange/collectives.h"
#include "model/micro_batches.h"
#include "offload/gpu/exchange/cuda_exchanged_experts.h"
#include "tests/check_close.h"
#include "tests/gpu_memory.h"
#include "tests/replica_tokens.h"
#include "tests/small_config.h"

namespace tandem::test {

// Every expert on one rank or, in the second layer, on several, where rank 0 has none.
inline ExpertOwners owners_of_ranks(const ModelConfig& c, int n_ranks) {
  ExpertOwners owners(2, c.router.n_experts);
  for (int e = 0; e < c.router.n_experts; ++e) {
    owners.add(0, e, e % n_ranks);
    for (int rank = 1; rank < n_ranks; ++rank)
      if (e % 3 == 0 || e % (n_ranks - 1) == rank - 1) owners.add(1, e, rank);
  }
  return owners;
}

// Computes the experts that the rank has, in the order of the stream. Only by gather do rows come
// with ids of experts that it does not have.
class EnqueuedExperts final : public ExpertPool {
 public:
  EnqueuedExperts(gpu::Stream& stream, const ExpertOwners& owners, int rank)
      : stream_(stream), owners_(owners), rank_(rank) {}
  void add_to(Ticket ticket, TensorView y) override {
    EXPECT_EQ(ticket, batch_.micro_batch);
    stream_.run_on_host([this, batch = batch_, y] {
      const int64_t rows_of_source = std::max<int64_t>(1, y.rows / owners_.n_ranks());
      for (int64_t t = 0; t < y.rows; ++t)
        for (int64_t k = 0; k < batch.routing.ids.cols; ++k) {
          if (int32_t& e = batch.routing.ids.row<int32_t>(t)[k]; e >= 0 && !has(batch.layer, e)) {
            EXPECT_TRUE(gathers) << "expert " << e;
            e = -1;
          } else if (const auto source = static_cast<int>(t / rows_of_source);
                     gathers && e >= 0 && has(batch.layer, e, source)) {
            EXPECT_EQ(source, rank_) << "the rank that has the row is the nearest";
          }
        }
      add_multiplied(batch, y);
    });
  }

  bool gathers = false;

 private:
  Ticket start(const ExpertBatch& batch) override {
    EXPECT_GT(batch.x.rows, 0);
    batch_ = batch;
    return batch.micro_batch;
  }
  bool has(int layer, int expert) const { return has(layer, expert, rank_); }
  bool has(int layer, int expert, int rank) const {
    return std::ranges::count(owners_.ranks(layer, expert), rank) > 0;
  }
  gpu::Stream& stream_;
  const ExpertOwners& owners_;
  const int rank_;
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
  ExpertBatch experts(int layer, int micro_batch, int first, int n) const {
    const TensorView ids{ids_.as<int32_t>(), n_, n_active_, n_active_, DType::kI32};
    const TensorView weights{weights_.as<float>(), n_, n_active_, n_active_};
    return {.layer = layer,
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
  RankOfGpus(Group& host, const ModelConfig& c, const CudaWaysAsked& asked,
             RowFormats row_formats = {RowFormat::kBf16, RowFormat::kF32})
      : ranks(connect(host)),
        owners(owners_of_ranks(c, host.size())),
        owners_there(owners, host.rank(), host.size(), stream),
        hosts(asked.hosts.has_equal_hosts()
                  ? std::make_unique<Hosts>(host, asked.hosts, owners, stream)
                  : nullptr),
        mine(stream, owners, host.rank()),
        formats(row_formats),
        pool({ranks, asked.grid, mine, true, asked.micro_batches},
             choose_cuda_ways(
                 {c, ranks, owners_there, stream, network, formats, hosts ? &hosts->gpus : nullptr},
                 host, asked)) {
    mine.gathers = pool.ways().of_prompts.mode == ExchangeMode::kGather;
  }
  struct Hosts {
    Hosts(Group& all, const HostLayout& layout, const ExpertOwners& owners, gpu::Stream& stream)
        : groups(all, layout),
          within(connect(groups.within())),
          plane(connect(groups.plane())),
          gpus(owners, groups, within, plane, stream) {}
    const HostGroups groups;
    gpu::Collectives within, plane;
    CudaHosts gpus;
  };
  static gpu::Collectives connect(Group& host) {
    gpu::Collectives::Id id = {};
    if (host.rank() == 0) id = gpu::Collectives::make_id();
    host.broadcast(std::as_writable_bytes(std::span(id)), 0);
    return {id, host.rank(), host.size()};
  }
  gpu::Stream stream, network;
  gpu::Collectives ranks;
  const ExpertOwners owners;
  const CudaOwners owners_there;
  const std::unique_ptr<Hosts> hosts;  // null: rows go once to each GPU
  EnqueuedExperts mine;
  const RowFormats formats;
  CudaExchangedExperts pool;
};

// How the rows of a step of these replicas travel.
inline ExchangeMode mode_of_step(const CudaWays& ways, const std::vector<std::vector<int>>& step,
                                 int n_replicas) {
  const bool is_small =
      std::all_of(step.begin(), step.begin() + n_replicas, [](const std::vector<int>& tokens) {
        return std::accumulate(tokens.begin(), tokens.end(), 0) <= CudaWays::kDecodeTokens;
      });
  return is_small && ways.decode ? ways.of_decode.mode : ways.of_prompts.mode;
}

// Whether a step of these replicas has the sums of its tokens, in so many micro-batches.
inline void expect_sums(RankOfGpus& gpu, const ModelConfig& c, BackboneGrid grid, Group& group,
                        const std::vector<std::vector<int>>& step, int n, bool records, int layer) {
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
  gpu.mine.gathers = mode_of_step(gpu.pool.ways(), step, grid.n_replicas) == ExchangeMode::kGather;
  gpu.pool.begin_step(batches, n);
  const auto enqueue = [&] {
    for (int i = 0; i < n; ++i) {
      EXPECT_EQ(gpu.pool.submit(there.experts(layer, i, cuts[i], size(i))), i);
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
  const bool fp8 = gpu.formats.there == RowFormat::kFp8;
  std::vector<float> want = (fp8 ? as_sent(own, RowFormat::kFp8) : own).sums();
  if (grid.tp > 1) {  // the ranks of a replica have a part of its sums each
    const std::vector<float> all = want;
    want.assign(all.size(), 1);
    for (int i = 0; i < n; ++i) {
      const auto [first, count] = grid.tokens_of(rank, size(i));
      const int64_t begin = (cuts[i] + first) * own.dim;
      std::copy_n(all.begin() + begin, count * own.dim, want.begin() + begin);
    }
  }
  const double share = share_of_sums(gpu.mine.gathers ? RowFormat::kF32 : gpu.formats.back);
  if (!want.empty()) expect_close(there.y(), want, share * largest(want));
  group.barrier();  // freeing memory waits for the streams of all ranks of this process
}

}  // namespace tandem::test
