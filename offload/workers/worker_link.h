// A backbone's connection to one expert worker. A thread of the link's own connects, listens to the
// worker while no step uses the link, and connects again when it was lost; a step uses the
// connection directly.
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
#include "offload/workers/shards.h"
#include "ops/expert_pool.h"
#include "transport/expert_messages.h"
#include "transport/transport.h"

namespace tandem {

// Whether a link goes on by its transport's path (transport.h) after the handshake.
enum class PathUse : uint8_t { kNever, kIfPossible, kAlways };

struct WorkerLinkOptions {
  std::string address;
  Secret secret = {};
  PathUse path = PathUse::kNever;
  std::chrono::milliseconds deadline{500};  // a worker that was silent for so long is down
  // Called with one line when the worker is lost or is back, from the thread that has noticed it.
  std::function<void(const std::string&)> note = [](const std::string&) {};
};

// Takes the answers of a worker.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;
  // The memory for the answer to this request. Throws ProtocolError if none of that number and
  // length is under way.
  virtual std::span<std::byte> place_of_answer(uint64_t number, uint64_t n_bytes) = 0;
  virtual void answered(uint64_t number) = 0;
};

class WorkerLink {
 public:
  // The transport outlives the object.
  WorkerLink(Transport& transport, WorkerLinkOptions options);
  ~WorkerLink();
  WorkerLink(const WorkerLink&) = delete;
  WorkerLink& operator=(const WorkerLink&) = delete;

  // Asks the worker what it has, on a connection of its own. Throws ConnectionError if it does not
  // answer, Error if it refuses the secret or the version, and PathError if there is to be a path
  // to it and is none.
  WorkerWelcome ask();

  // Connects from now on and keeps the connection. The worker must answer `expected`; requests have
  // at most max_rows rows. `changed` is woken when the worker comes back; it outlives the link.
  void keep(const WorkerWelcome& expected, int max_rows, MessageWaiter& changed);
  // The same for a worker that comes while this program computes and was not asked: `require_fits`,
  // called on the link's thread, throws Error for one that is not to be used. What the first one
  // that fits has answered is expected from then on.
  using RequireFits = std::function<void(const WorkerWelcome&)>;
  void keep_newcomer(RequireFits require_fits, int max_rows, MessageWaiter& changed);

  const WorkerLinkOptions& options() const { return options_; }
  const std::string& address() const { return options_.address; }
  std::chrono::milliseconds deadline() const { return options_.deadline; }
  // Thread-safe. Whether it is known what the worker has: false before a newcomer fits.
  bool is_known() const { return is_known_; }
  // Thread-safe; only for a known worker. Its experts are those that this backbone uses: those of a
  // standby increase and never decrease, and those of a worker whose experts move are what hold()
  // says. It is down while it lacks any of them.
  WorkerWelcome welcome() const;
  bool is_standby() const { return is_standby_; }
  bool moves_experts() const { return moves_experts_; }
  // Thread-safe. Whether the worker has more experts than at the last call.
  bool take_growth() { return has_grown_.exchange(false); }
  // Thread-safe. Asks a worker that is up to load experts beside what it has, unless it has not
  // answered yet; returns whether it was asked. It is told at once, by the link's thread or by the
  // step that uses the connection. Its answer is in load(). A standby is one of their owners once
  // it has loaded them, a worker whose experts move once hold() says so.
  // give_up_load(): they are not wanted, also if they were loaded.
  bool ask_to_load(const ExpertsOfLayers& experts);
  void give_up_load();
  // Thread-safe. This backbone uses these experts of a worker whose experts move from now on, of
  // which it has loaded those that were not there. It may give others away.
  void hold(const ExpertsOfLayers& experts);
  struct Load {
    bool is_under_way = false;      // it was asked and has not answered
    ExpertsOfLayers experts = {};   // that it was asked for last
    ExpertsOfLayers refused = {};   // that it has refused since it is connected
    std::string why = {};           // it has refused the last ones
    LoadAnswer answer = {};         // the last one
    Clock::time_point got_on = {};  // when it was asked, or the answer last changed
  };
  Load load() const;  // thread-safe
  // Thread-safe. The worker gets no request from now on, and the connection is closed once those
  // under way are answered.
  void leave() { leaves_ = true; }
  bool leaves() const { return leaves_; }
  // Thread-safe. Whether the worker takes requests, since when it does not, and why.
  bool is_up() const { return state_ == State::kUp && !leaves_; }
  Clock::time_point down_since() const { return down_since_.load(); }
  std::string why_down() const;
  WorkerStatus status() const;

  // The calls below are those of the thread that computes steps. Between a take() that returned
  // true and release() it alone uses the connection, until one of them has found it lost.
  bool take();  // false: the worker takes no requests
  void release() { in_use_.unlock(); }
  // Sends a request, whose parts must not change before the answer has come. Returns false if the
  // connection is lost.
  bool request(uint64_t number, std::span<const MessageBytes> body);
  // Sends and receives without waiting. Returns false if the connection is lost, also because the
  // worker was silent for longer than the deadline while it has requests.
  bool progress(AnswerSink& sink);
  bool is_sent() const { return connection_->is_sent(); }
  int n_requests() const { return n_requests_; }  // that are not answered
  MessageConnection* connection() const { return connection_.get(); }
  // Closes the connection, because the requests are not wanted any more.
  void drop();
  void add_round_trip(double seconds) { seconds_ = seconds_ + seconds; }

 private:
  // kLacking: the worker is connected and loads again what it had.
  enum class State : uint8_t { kDown, kLacking, kUp, kLeaving };
  class Receiver;

  void begin(int max_rows, MessageWaiter& changed);
  void run();
  void connect_again();
  void connect(bool uses_path);
  void require_expected(const WorkerWelcome& welcome) const;
  void connected(const WorkerWelcome& welcome, std::unique_ptr<MessageConnection> connection,
                 bool uses_path);
  void order(ExpertsOfLayers experts);
  void wake();
  std::chrono::milliseconds longest_pause() const;
  void send_order();
  void load_answered();
  void ask_again();
  void listen();
  void lose(const std::string& why, bool is_failure);

  Transport& transport_;
  const WorkerLinkOptions options_;
  RequireFits require_fits_;  // empty: it was there at the start
  std::atomic<bool> is_known_{false}, leaves_{false}, is_standby_{false}, moves_experts_{false},
      has_grown_{false};
  std::atomic<State> state_{State::kDown};
  int max_rows_ = 0;
  MessageWaiter* changed_ = nullptr;

  std::mutex in_use_;  // guards what follows
  std::unique_ptr<MessageConnection> connection_;
  int n_requests_ = 0;
  Clock::time_point heard_{};
  std::vector<std::byte> order_, uses_, load_answer_;  // bodies that are sent and received

  std::atomic<Clock::time_point> down_since_{Clock::time_point()};
  std::atomic<int64_t> n_all_requests_{0}, n_failures_{0};
  std::atomic<double> seconds_{0};

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable woken_;
  bool stops_ = false, begins_ = false;
  bool is_woken_ = false;    // there is an order that the thread has not seen
  bool is_ordered_ = false;  // load_ is to be sent
  bool gives_up_load_ = false;
  bool is_use_ordered_ = false;  // a worker whose experts move is to be told what is used of it
  WorkerWelcome expected_;       // once is_known_
  Load load_;
  ExpertsOfLayers here_;  // of a worker whose experts move: what it has
  std::string why_down_ = "it was never connected";
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
