// The prefill side: computes the prompts that decode servers send, in the engine with all other
// requests, and sends the keys of each page as soon as it is full.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "prefill/kv_messages.h"
#include "transport/handshake.h"
#include "transport/transport.h"

namespace tandem {

class KvServer {
 public:
  struct Options {
    std::string address = "127.0.0.1:0";
    Secret secret = {};
    // Called with one line when a decode server connects, is refused or leaves.
    std::function<void(const std::string&)> note = [](const std::string&) {};
  };
  // Listens from now on. The transport outlives the object. Throws Error for an address that cannot
  // be listened on, and for one that other machines can reach if there is no secret.
  KvServer(Transport& transport, Options options);
  ~KvServer();
  KvServer(const KvServer&) = delete;
  KvServer& operator=(const KvServer&) = delete;

  int port() const { return listener_->port(); }
  // Answers from now on. The engine outlives end(). Called once, from any thread.
  void begin(Engine& engine, const KvWelcome& welcome);
  // Tells the decode servers, and gives up what they have asked for. From any thread.
  void end();

 private:
  class Peer;
  class Keys;
  static constexpr size_t kMostPeers = 64;

  void run();
  void serve();

  const Options options_;
  const std::unique_ptr<MessageListener> listener_;
  const std::shared_ptr<MessageWaiter> waiter_;
  Engine* engine_ = nullptr;
  KvWelcome welcome_;
  std::vector<std::byte> welcome_bytes_;
  std::vector<std::unique_ptr<Peer>> peers_;  // of the thread
  bool has_refused_ = false;  // of the thread: the last decode server, which tries again soon

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
