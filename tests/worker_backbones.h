// Backbones as threads of a test: pools of expert workers, and the sums that they must give.
#pragma once
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "offload/workers/worker_experts.h"
#include "tests/repository.h"
#include "tests/worker_threads.h"

namespace tandem::test {

inline const std::string kServedModel = kGolden + "v3_fp8";  // 8 experts, 3 of them for a token
constexpr int kMostTokens = 40, kServedExperts = 8, kServedActive = 3;

struct Inputs {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
  int n, dim;

  // Numbers that BF16 has exactly. A few choices are left out (-1).
  Inputs(int n_tokens, int columns, int seed) : n(n_tokens), dim(columns) {
    std::mt19937 random(seed);
    for (int i = 0; i < n * dim; ++i)
      x.push_back(static_cast<float>(static_cast<int>(random() % 255) - 127) / 64);
    for (int t = 0; t < n; ++t) {
      std::vector<int32_t> all(kServedExperts);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      for (int k = 0; k < kServedActive; ++k) {
        ids.push_back(random() % 10 == 0 ? -1 : all[k]);
        weights.push_back(0.1f + 0.01f * static_cast<float>(random() % 100));
      }
    }
  }
  ExpertBatch batch(int layer) {
    return {.layer = layer,
            .x = {x.data(), n, dim, dim, DType::kF32},
            .routing = {{ids.data(), n, kServedActive, kServedActive, DType::kI32},
                        {weights.data(), n, kServedActive, kServedActive, DType::kF32}}};
  }
};

// What computes the experts without workers, and the sums that it gives shard by shard.
struct Local {
  Local() : Local(served(kServedModel, "auto")) {}
  explicit Local(const LoadedExpertsOptions& options) : loaded(options) {}

  LoadedExperts loaded;
  ServedExperts all = loaded.served();
  CpuExperts& experts = loaded.experts();
  int dim = all.welcome.dim;

  std::vector<float> sums(Inputs& inputs, int layer, const std::vector<Shard>& shards) {
    std::vector<float> y(inputs.n * dim, 0.5f);
    for (const Shard& shard : shards) add_shard(inputs, layer, shard, y);
    return y;
  }
  void add_shard(Inputs& inputs, int layer, const Shard& shard, std::vector<float>& y) {
    const std::vector<int32_t> ids = inputs.ids;
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::vector<int>& here = shard.experts[layer];
      const bool has = std::count(here.begin(), here.end(), ids[i]) > 0;
      inputs.ids[i] = has ? ids[i] : -1;
    }
    all.experts.submit(inputs.batch(layer));
    all.experts.add_to(0, {y.data(), inputs.n, dim, dim});
    inputs.ids = ids;
  }
};

// What is said from any thread.
class Lines {
 public:
  std::function<void(const std::string&)> sink() {
    return [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      lines_.push_back(line);
    };
  }
  int count(const std::string& part) const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::count_if(lines_.begin(), lines_.end(), [&](const auto& line) {
      return line.find(part) != line.npos;
    }));
  }
  void await(const std::string& part) const {
    for (int i = 0; i < 2000 && count(part) == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_GT(count(part), 0) << part;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

// A pool of the workers at these addresses.
class Backbone {
 public:
  struct Options {
    std::chrono::duration<double> patience = std::chrono::seconds(20);
    std::chrono::duration<double> longest_wait = std::chrono::duration<double>::max();
    std::chrono::milliseconds deadline = std::chrono::milliseconds(400);
    int max_tokens = kMostTokens;
    int micro_batches = 1;
    Lines* notes = nullptr;
    Lines* warnings = nullptr;
  };
  Backbone(Local& local, const std::vector<std::string>& addresses, const Options& options)
      : dim_(local.dim) {
    std::vector<std::unique_ptr<WorkerLink>> links;
    for (const std::string& address : addresses) {
      links.push_back(std::make_unique<WorkerLink>(
          *transport_, WorkerLinkOptions{.address = address,
                                         .path = path_of_tests(),
                                         .deadline = options.deadline,
                                         .note = sink_of(options.notes)}));
      welcomes_.push_back(links.back()->ask());
    }
    pool_.emplace(WorkerExpertsParts{.welcomes = welcomes_,
                                     .transport = *transport_,
                                     .kernels = local.all.kernels,
                                     .config = local.all.config,
                                     .local = local.experts,
                                     .team = local.all.team,
                                     .max_tokens = options.max_tokens,
                                     .patience = options.patience,
                                     .longest_wait = options.longest_wait,
                                     .micro_batches = options.micro_batches,
                                     .warn = sink_of(options.warnings)},
                  std::move(links));
    EXPECT_TRUE(pool_->await_workers());
  }
  Backbone(Local& local, const std::vector<std::string>& addresses)
      : Backbone(local, addresses, Options()) {}

  // As the only layer of a step.
  std::vector<float> sums(Inputs& inputs, int layer) {
    std::vector<float> y(inputs.n * dim_, 0.5f);
    pool_->begin_step({}, 1);
    pool_->add_to(pool_->submit(inputs.batch(layer)), {y.data(), inputs.n, dim_, dim_});
    return y;
  }
  WorkerExperts& pool() { return *pool_; }
  const std::vector<Shard>& shards() const { return pool_->shards(); }
  WorkerStatus status(int worker) const { return pool_->workers()[worker]; }
  // Nothing: it is not one of the workers.
  std::optional<WorkerStatus> status_of(const std::string& address) const {
    for (const WorkerStatus& worker : pool_->workers())
      if (worker.address == address) return worker;
    return {};
  }
  // Waits until the worker is up, or down.
  void await(int worker, bool is_up) {
    for (int i = 0; i < 2000 && status(worker).is_up != is_up; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ASSERT_EQ(status(worker).is_up, is_up) << worker;
  }

 private:
  static std::function<void(const std::string&)> sink_of(Lines* lines) {
    return lines ? lines->sink() : [](const std::string&) {};
  }

  const int dim_;
  const std::unique_ptr<Transport> transport_ = transport_of_tests();
  std::vector<WorkerWelcome> welcomes_;
  std::optional<WorkerExperts> pool_;
};

inline void expect_right_sums(Local& local, Backbone& backbone, int seed) {
  for (const int layer : {1, 2})
    for (const int n : {1, 5, kMostTokens}) {
      Inputs inputs(n, local.dim, seed + n);
      ASSERT_EQ(backbone.sums(inputs, layer), local.sums(inputs, layer, backbone.shards()))
          << "layer " << layer << ", " << n << " tokens";
    }
}

// Computes as another pool does, and takes its time.
class SlowExperts final : public ExpertPool {
 public:
  SlowExperts(ExpertPool& pool, std::chrono::milliseconds pause) : pool_(pool), pause_(pause) {}
  void add_to(Ticket ticket, TensorView y) override { pool_.add_to(ticket, y); }

 private:
  Ticket start(const ExpertBatch& batch) override {
    std::this_thread::sleep_for(pause_);
    return pool_.submit(batch);
  }
  ExpertPool& pool_;
  const std::chrono::milliseconds pause_;
};

// A worker that takes a time for each batch, with all experts.
class SlowWorker {
 public:
  explicit SlowWorker(
      std::chrono::milliseconds pause, int max_rows = 512, ExpertServer::Options options = {},
      std::function<void(WorkerWelcome&)> change = [](WorkerWelcome&) {})
      : server_(*transport_, std::move(options)), thread_([this, pause, max_rows, change] {
          LoadedExpertsOptions all = served(kServedModel, "auto");
          all.max_rows = max_rows;
          LoadedExperts loaded(all);
          SlowExperts slow(loaded.experts(), pause);
          ServedExperts of = loaded.served();
          change(of.welcome);
          server_.run({of.config, of.kernels, slow, of.team, of.welcome});
        }) {}
  ~SlowWorker() {
    end();
    thread_.join();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(server_.port()); }
  ExpertServer::Counts counts() const { return server_.counts(); }
  void end() { server_.end(); }

 private:
  const std::unique_ptr<Transport> transport_ = transport_of_tests();
  ExpertServer server_;
  std::thread thread_;
};

}  // namespace tandem::test
