// The worker's side of expert workers: takes requests of any number of backbones and computes them,
// those of the same layer together (request_batcher.h). It knows nothing of sequences. The thread
// that computes also has the connections, so that no request is handed to another thread; while it
// computes, another thread keeps them alive.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/memory.h"
#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "model/config.h"
#include "offload/workers/expert_loader.h"
#include "offload/workers/request_batcher.h"
#include "offload/workers/standby_loads.h"
#include "ops/expert_pool.h"
#include "transport/expert_messages.h"
#include "transport/transport.h"

namespace tandem {

// What a worker serves. References outlive the server.
struct ServedExperts {
  const ModelConfig& config;
  const cpu::KernelTable& kernels;
  ExpertPool& experts;
  Team& team;
  WorkerWelcome welcome;           // with the experts that are there from the start
  ExpertLoader* loader = nullptr;  // not null: a standby, or a worker whose experts move
};

class ExpertServer {
 public:
  struct Options {
    std::string address = "127.0.0.1:0";
    Secret secret = {};
    // Called at least every 100 ms; once it has returned true, the server ends as by end().
    std::function<bool()> is_asked_to_end = [] { return false; };
    // Called with one line when a backbone connects or leaves, and when experts were loaded.
    std::function<void(const std::string&)> note = [](const std::string&) {};
    std::chrono::duration<double> drain{30};  // for backbones to take their answers and leave
  };

  // Listens from now on. Throws Error for an address that cannot be listened on, and for one that
  // other machines can reach if there is no secret.
  ExpertServer(Transport& transport, Options options);
  ~ExpertServer();
  ExpertServer(const ExpertServer&) = delete;
  ExpertServer& operator=(const ExpertServer&) = delete;

  int port() const { return listener_port_; }
  // Answers requests until end(). Called once, on the thread of the team. Throws what computing
  // throws, as where a GPU was lost; connections are closed then.
  void run(const ServedExperts& served);
  // Thread-safe. Backbones are told; run() returns once they have their answers and have left.
  void end();

  struct Counts {
    int64_t n_requests = 0, n_batches = 0;
    int64_t n_shared = 0;  // batches with requests of several backbones
  };
  Counts counts() const { return {n_requests_, n_batches_, n_shared_}; }  // thread-safe

 private:
  class Peer;
  static constexpr size_t kMostPeers = RequestBatcher::kMostPeers;
  // A row of the batch that is computed.
  struct Row {
    const std::byte* from;
    RowType type;
    float* answer;
  };

  void keep_alive();
  void serve(std::unique_lock<std::mutex>& lock);
  bool serve_connections(bool may_connect);
  void accept();
  void progress_peers();
  void say_goodbye();
  std::chrono::nanoseconds longest_sleep() const;
  bool wait(Clock::time_point until);
  void compute_batch(const std::vector<int>& slots, std::unique_lock<std::mutex>& lock);
  void compute_one(const Peer& peer);
  void compute_together();
  void append_rows(const Peer& peer);
  void decode(int64_t n_rows);
  void add_experts(int layer, int64_t n_rows, const void* x, const ExpertRequest& routing,
                   float* sums);
  void release(Peer& peer);
  void finish_load();
  void describe();

  const Options options_;
  std::unique_ptr<MessageListener> listener_;
  const int listener_port_;
  const std::unique_ptr<MessageWaiter> waiter_;
  std::atomic<bool> ends_{false};

  std::mutex connections_;  // guards what follows
  const ServedExperts* served_ = nullptr;
  WorkerWelcome welcome_;
  std::vector<std::byte> welcome_bytes_;
  std::optional<StandbyLoads> loads_;
  RequestShape shape_{};
  int n_experts_ = 0;              // of a layer
  std::vector<bool> has_experts_;  // [layers]
  std::vector<std::unique_ptr<Peer>> peers_;
  std::array<Peer*, kMostPeers> slots_{};  // the served ones, by their number in batcher_
  std::optional<RequestBatcher> batcher_;
  std::vector<Peer*> batch_;  // that is computed
  bool has_refused_ = false;  // the last backbone; it tries again twice a second
  bool was_busy_ = false;     // requests that arrive now may have come during the last batch
  std::vector<MessageConnection*> waited_;
  Clock::time_point leave_by_{};  // not 0: backbones were told of the end

  // What follows is used by the thread that computes, also without the mutex. Only requests that
  // are not computed where they lie use it.
  std::vector<Row> rows_;       // [rows of a batch]
  std::vector<int32_t> ids_;    // [rows of a batch, n_active]
  std::vector<float> weights_;  // the same shape
  Buffer decoded_, sums_;       // kF32 [rows of a batch, dim]
  std::atomic<int64_t> n_requests_{0}, n_batches_{0}, n_shared_{0};
  std::atomic<std::chrono::milliseconds> pause_{std::chrono::milliseconds(50)};  // of keep_alive()
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool is_done_ = false;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
