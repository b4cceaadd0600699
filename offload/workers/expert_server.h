// The worker's side of expert workers: takes requests of any number of backbones and computes them
// one after another. It knows nothing of sequences. The thread that computes also has the
// connections, so that no request is handed to another thread; while it computes, another thread
// keeps them alive.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/memory.h"
#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "model/config.h"
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
  WorkerWelcome welcome;
};

class ExpertServer {
 public:
  struct Options {
    std::string address = "127.0.0.1:0";
    Secret secret = {};
    // Called at least every 100 ms; once it has returned true, the server ends as by end().
    std::function<bool()> is_asked_to_end = [] { return false; };
    // Called with one line when a backbone connects or leaves.
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
  // Answers requests until end(). Called once, on the thread of the team.
  void run(const ServedExperts& served);
  // Thread-safe. Backbones are told; run() returns once they have their answers and have left.
  void end();

 private:
  class Peer;
  static constexpr size_t kMostPeers = 64;

  void keep_alive();
  bool serve_connections();
  void accept();
  void progress_peers();
  void say_goodbye();
  std::chrono::nanoseconds longest_sleep() const;
  void compute(Peer& peer);

  const Options options_;
  std::unique_ptr<MessageListener> listener_;
  const int listener_port_;
  const std::unique_ptr<MessageWaiter> waiter_;
  std::atomic<bool> ends_{false};

  std::mutex connections_;  // guards what follows
  const ServedExperts* served_ = nullptr;
  std::vector<std::byte> welcome_;
  RequestShape shape_{};
  std::vector<bool> has_experts_;  // [layers]
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> queue_;  // with a request, the first one first; each is in it once at most
  std::vector<MessageConnection*> waited_;
  Clock::time_point leave_by_{};  // not 0: backbones were told of the end

  Buffer decoded_;  // kF32 [rows of a request, dim]
  std::atomic<std::chrono::milliseconds> pause_{std::chrono::milliseconds(50)};  // of keep_alive()
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool is_done_ = false;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
