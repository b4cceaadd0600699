#include "bench/comm/gpu_calls.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/run_error.h"
#include "gpu_kernels/exchange/collectives.h"
#include "gpu_kernels/exchange/exchange.h"
#include "gpu_kernels/runtime.h"
#include "offload/gpu/exchange/cuda_exchange.h"
#include "offload/gpu/exchange/random_rows.h"
#include "offload/ranks/rank_experts.h"
#include "with_gpu/connected_gpus.h"

namespace tandem {
namespace {

std::vector<float> values(int rank, int64_t n) {
  std::vector<float> x(n);
  for (int64_t i = 0; i < n; ++i) x[i] = exact_number(rank, i);
  return x;
}

class Connected final : public GpuCalls {
 public:
  explicit Connected(Group& group)
      : group_(group),
        gpu_(gpu::open_gpu().name),
        ranks_(connected(group)),
        rank_(ranks_->rank()),
        size_(ranks_->n_ranks()) {}

  std::string gpu() const override { return gpu_; }

  Prepared prepare(GpuCall call, int64_t bytes) override {
    if (call == GpuCall::kAllToAll) return uneven_pieces(bytes);
    const int64_t piece = std::max<int64_t>(bytes / (4 * size_), 1), n = piece * size_;
    const std::vector<float> before = values(rank_, n);
    std::vector<float> after(n);
    int64_t first = 0, n_after = n;  // that is compared
    std::function<void(float*)> make;
    const auto sum = [&] {
      for (int r = 0; r < size_; ++r)
        for (int64_t i = 0; i < n; ++i) after[i] += exact_number(r, i);
    };
    if (call == GpuCall::kBroadcast) {
      after = values(0, n);
      make = [this, n](float* x) { ranks_->broadcast(stream_, x, n, 0); };
    } else if (call == GpuCall::kAllGather) {
      for (int64_t i = 0; i < n; ++i) after[i] = exact_number(static_cast<int>(i / piece), i);
      make = [this, piece](float* x) { ranks_->all_gather(stream_, x, piece); };
    } else if (call == GpuCall::kReduceScatter) {
      sum();
      first = rank_ * piece;
      n_after = piece;
      make = [this, piece](float* x) { ranks_->reduce_scatter(stream_, x, piece); };
    } else {
      sum();
      make = [this, n](float* x) { ranks_->all_reduce(stream_, x, n); };
    }
    const auto x = std::make_shared<gpu::Buffer>(n * 4, gpu::Site::kDevice);
    const auto one = [make, x] { make(x->as<float>()); };
    for (const bool recorded : {false, true}) {
      write(before, *x);
      run_once(one, recorded);
      require_equal(name_of(call), *x, std::span(after).subspan(first, n_after), first);
    }
    write(std::vector<float>(n), *x);  // sums of zeros stay zeros
    return {both(one), n * 4};
  }

  Prepared all_to_all(std::span<const int64_t> sizes) override {
    std::vector<int64_t> n;
    for (const int64_t bytes : sizes) n.push_back(bytes / 4);
    return pieces(n, n);
  }

  Prepared exchange(const ModelConfig& config, const RowsTravel& travel) override {
    if (travel.hosts && !levels_) levels_ = std::make_unique<Levels>(group_, *travel.hosts);
    const auto e = std::make_shared<Exchange>(*this, config, travel);
    const auto one = [e] { e->rows.exchange(*e->exchange); };
    ComparedCalls calls = both(one, can_record(travel.mode));
    return {std::move(calls), e->bytes(config), e->formats, [this, e] {
              e->exchange->close();
              group_.barrier();
            }};
  }

 private:
  // The GPUs of this rank's host, and one of each host.
  struct Levels {
    Levels(Group& all, const HostLayout& hosts)
        : groups(all, hosts),
          within(connected(groups.within())),
          plane(connected(groups.plane())) {}
    const HostGroups groups;
    const std::unique_ptr<gpu::Collectives> within, plane;
  };
  struct Exchange {
    Exchange(Connected& gpus, const ModelConfig& config, const RowsTravel& of)
        : travel(of),
          owners(even_owners(config, gpus.size_)),
          on_gpu(owners, gpus.rank_, gpus.size_, gpus.stream_),
          rows(config, gpus.rank_, of.n_tokens),
          formats(formats_by(of.mode, of.hosts, row_formats(of.rows, true))) {
      if (of.hosts)
        hosts = std::make_unique<CudaHosts>(owners, gpus.levels_->groups, *gpus.levels_->within,
                                            *gpus.levels_->plane, gpus.stream_);
      exchange = make_cuda_exchange(
          of.mode,
          {config, *gpus.ranks_, on_gpu, gpus.stream_, gpus.network_, formats, hosts.get()},
          gpus.group_, of.n_tokens);
    }
    int64_t bytes(const ModelConfig& config) const {
      const int n_ranks = on_gpu.n_ranks(), n_active = config.router.n_active;
      const int64_t n = travel.n_tokens,
                    parcel = gpu::ParcelShape{config.dim, n_active, formats.there}.bytes(),
                    sum = encoded_bytes(formats.back, config.dim);
      if (travel.mode == ExchangeMode::kGather) return n * (parcel + n_ranks * sum);
      int64_t to_ranks = 0, to_hosts = 0;
      for (int64_t t = 0; t < n; ++t) {
        std::set<int> ranks, of_ranks;
        for (int k = 0; k < n_active; ++k) {
          const int rank = owners.ranks(config.n_layers - 1, rows.experts()[t * n_active + k])[0];
          ranks.insert(rank);
          if (travel.hosts) of_ranks.insert(travel.hosts->host_of(rank));
        }
        to_ranks += std::ssize(ranks);
        to_hosts += std::ssize(of_ranks);
      }
      if (!travel.hosts) return to_ranks * (parcel + sum);
      // Between hosts low latency gathers. Sums are floats within a host.
      const int64_t between = travel.mode == ExchangeMode::kAllToAll
                                  ? to_hosts * (parcel + sum)
                                  : n * (parcel + travel.hosts->n_hosts() * sum);
      return between + to_ranks * (parcel + encoded_bytes(RowFormat::kF32, config.dim));
    }
    const RowsTravel travel;
    const ExpertOwners owners;
    const CudaOwners on_gpu;
    const CudaRandomRows rows;
    const RowFormats formats;
    std::unique_ptr<CudaHosts> hosts;  // null: once to each rank
    std::unique_ptr<CudaExchange> exchange;
  };

  // Pieces have one or two units, as in the calls of CPU ranks.
  Prepared uneven_pieces(int64_t bytes) {
    const int64_t unit = std::max<int64_t>(2 * bytes / (3 * 4 * size_), 1);
    std::vector<int64_t> n_out, n_in;
    for (int r = 0; r < size_; ++r) {
      n_out.push_back(unit * (1 + (rank_ + r) % 2));
      n_in.push_back(n_out.back());
    }
    return pieces(n_out, n_in);
  }

  // n_out, n_in: [ranks] numbers of 4 bytes
  Prepared pieces(std::vector<int64_t> n_out, std::vector<int64_t> n_in) {
    const auto sum = [](const std::vector<int64_t>& n) {
      return std::accumulate(n.begin(), n.end(), int64_t{0});
    };
    struct Memory {
      gpu::Buffer out, in;
      std::vector<int64_t> n_out, n_in;
    };
    // Memory is never empty.
    const auto m = std::make_shared<Memory>(
        Memory{gpu::Buffer(4 * sum(n_out) + 4, gpu::Site::kDevice),
               gpu::Buffer(4 * sum(n_in) + 4, gpu::Site::kDevice), n_out, n_in});
    std::vector<float> sent, after;
    for (int r = 0; r < size_; ++r) {
      for (int64_t i = 0; i < n_out[r]; ++i) sent.push_back(exact_number(rank_ + 5 * r, i));
      for (int64_t i = 0; i < n_in[r]; ++i) after.push_back(exact_number(r + 5 * rank_, i));
    }
    const auto one = [this, m] {
      ranks_->all_to_all(stream_, {m->out.as<void>(), m->n_out, m->in.as<void>(), m->n_in});
    };
    for (const bool recorded : {false, true}) {
      write(sent, m->out);
      write(std::vector<float>(after.size(), -1), m->in);
      run_once(one, recorded);
      require_equal("all_to_all", m->in, after, 0);
    }
    return {both(one), 4 * sum(n_out)};
  }

  void run_once(const std::function<void()>& one, bool recorded) {
    if (!recorded) {
      one();
      return stream_.wait();
    }
    const gpu::Graph graph = stream_.capture(one);
    stream_.replay(graph);
    stream_.wait();
  }

  ComparedCalls both(const std::function<void()>& one, bool records = true) {
    const auto all = [one] {
      for (int i = 0; i < kCalls; ++i) one();
    };
    const auto enqueue = [this, all] {
      all();
      stream_.wait();
    };
    if (!records) return {enqueue, enqueue, kCalls};
    const auto graph = std::make_shared<gpu::Graph>(stream_.capture(all));
    return {[this, graph] {
              stream_.replay(*graph);
              stream_.wait();
            },
            enqueue, kCalls};
  }

  void write(const std::vector<float>& from, const gpu::Buffer& to) {
    stream_.copy(from.data(), std::ssize(from) * 4, to.as<void>());
    stream_.wait();
  }

  // That `want` is in x from element `first` on.
  void require_equal(const char* call, const gpu::Buffer& x, std::span<const float> want,
                     int64_t first) {
    std::vector<float> got(want.size());
    stream_.copy(x.as<float>() + first, std::ssize(got) * 4, got.data());
    stream_.wait();
    require_run(std::equal(got.begin(), got.end(), want.begin()),
                "{}: the GPU of rank {} gets a wrong result", call, rank_);
  }

  Group& group_;
  const std::string gpu_;
  gpu::Stream stream_, network_;
  const std::unique_ptr<gpu::Collectives> ranks_;
  std::unique_ptr<Levels> levels_;  // null: no row went once to each host yet
  const int rank_, size_;
};

}  // namespace

std::unique_ptr<GpuCalls> connect_gpus(Group& group) { return std::make_unique<Connected>(group); }

}  // namespace tandem
