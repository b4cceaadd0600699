// Expert workers as threads of a test, and a peer that misbehaves as the test wants.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "loader/loaded_experts.h"
#include "offload/workers/worker_link.h"
#include "tests/free_address.h"
#include "tests/ucx_of_tests.h"
#include "transport/handshake.h"
#include "transport/tcp.h"

namespace tandem::test {

// Tests of workers run a second time with TANDEM_TEST_TRANSPORT=ucx (CMakeLists.txt).
inline PathUse path_of_tests() {
  const char* const chosen = std::getenv("TANDEM_TEST_TRANSPORT");
  return chosen && std::string(chosen) == "ucx" ? PathUse::kAlways : PathUse::kNever;
}
// Ends the program with the status of a skipped test where UCX is chosen and not to be had.
inline std::unique_ptr<Transport> transport_of_tests() {
  if (path_of_tests() == PathUse::kNever) return tcp_transport();
  const std::string why_not = why_no_ucx();
  if (why_not.empty()) return ucx_transport(UcxReach::kThisHost);
  std::fprintf(stderr, "skipped: %s\n", why_not.c_str());
  std::_Exit(77);
}

// A worker that serves until the object is destroyed, or it is asked to end. Its port stays the
// same where the options name one.
class WorkerThread {
 public:
  // `change` may change what the worker says that it has.
  explicit WorkerThread(
      LoadedExpertsOptions options, ExpertServer::Options server = {},
      std::function<void(WorkerWelcome&)> change = [](WorkerWelcome&) {})
      : server_(*transport_, at_a_free_address(std::move(server))),
        thread_([this, options, change] {
          LoadedExperts loaded(options);
          ServedExperts served = loaded.served();
          change(served.welcome);
          server_.run(served);
        }) {}
  ~WorkerThread() {
    server_.end();
    thread_.join();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(server_.port()); }
  void end() { server_.end(); }

 private:
  const std::unique_ptr<Transport> transport_ = transport_of_tests();
  ExpertServer server_;
  std::thread thread_;
};

inline LoadedExpertsOptions served(const std::string& directory, const std::string& experts) {
  return {.directory = directory, .experts = experts, .n_threads = 1, .max_rows = 512};
}

// Workers of a model that have these experts.
struct Workers {
  std::vector<std::unique_ptr<WorkerThread>> threads;
  std::vector<std::string> addresses;

  Workers(const LoadedExpertsOptions& options, const std::vector<std::string>& experts) {
    for (const std::string& of_worker : experts) {
      LoadedExpertsOptions mine = options;
      mine.experts = of_worker;
      threads.push_back(std::make_unique<WorkerThread>(mine));
      addresses.push_back(threads.back()->address());
    }
  }
};

// The requests of a step that fails end with its error, and later ones are answered.
// Stands before a worker and passes messages on, until the test tells it to misbehave.
class FaultyWorker {
 public:
  enum class Fault : uint8_t {
    kNone,
    kSilent,       // passes nothing on, and keeps the connection
    kCloses,       // closes at the next request
    kClosesLater,  // closes at the second request from then on
    kLosesAnswer,  // closes instead of passing an answer on
    kOtherNumber,  // answers under the number of another request
    kOtherLength,  // answers with a row less
    kGarbage,      // sends what is no message
  };
  explicit FaultyWorker(std::string worker)
      : worker_(std::move(worker)), thread_([this] { run(); }) {}
  ~FaultyWorker() {
    stops_ = true;
    waiter_->wake();
    thread_.join();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(listener_->port()); }
  void set(Fault fault) { fault_ = fault; }
  int n_requests() const { return n_requests_; }  // that came, of all connections
  int n_faults() const { return n_faults_; }
  int n_loads() const { return n_loads_; }  // orders to load experts

 private:
  // One direction of a connection that is passed on.
  class Direction final : public MessageSink {
   public:
    Direction(FaultyWorker& owner, MessageConnection*& from, MessageConnection*& to)
        : owner_(owner), from_(from), to_(to) {}
    std::span<std::byte> place(const MessageHeader& header) override {
      body_.resize(header.n_bytes);
      return body_;
    }
    void arrived(const MessageHeader& header) override {
      if (header.kind == MessageKind::kPath) return owner_.take_paths(*from_, *to_, body_);
      owner_.pass_on(header, body_, *to_);
      // The message is sent before the next one takes its memory.
      while (!to_->is_sent()) {
        owner_.waiter_->wait(std::span(&to_, 1), nullptr, std::chrono::milliseconds(10));
        Direction ignored(owner_, to_, from_);
        to_->set_reading(false);
        to_->progress(ignored);
        to_->set_reading(true);
      }
    }

   private:
    FaultyWorker& owner_;
    MessageConnection *&from_, *&to_;
    std::vector<std::byte> body_;
  };

  void run() {
    while (!stops_) {
      std::unique_ptr<MessageConnection> client = listener_->accept(), worker;
      if (!client) {
        waiter_->wait({}, listener_.get(), std::chrono::milliseconds(20));
        continue;
      }
      try {
        worker = transport_->connect(worker_, std::chrono::seconds(5));
        serve(client.get(), worker.get());
      } catch (const Error&) {
      }
    }
  }

  void serve(MessageConnection* client, MessageConnection* worker) {
    Direction there(*this, client, worker), back(*this, worker, client);
    MessageConnection* const both[] = {client, worker};
    while (!stops_) {
      if (fault_ == Fault::kSilent && n_requests_ > 0) {
        ++n_faults_;
        while (fault_ == Fault::kSilent && !stops_)
          waiter_->wait({}, nullptr, std::chrono::milliseconds(5));
        return;
      }
      client->progress(there);
      worker->progress(back);
      waiter_->wait(both, nullptr, std::chrono::milliseconds(5));
    }
  }

  // Each side has a path to this object, as each has a socket to it. What comes by the first one is
  // passed on by the second one.
  void take_paths(MessageConnection& client, MessageConnection& worker, MessageBytes address) {
    std::vector<std::byte> answer;
    answer_path(client, address, answer);
    const MessageBytes mine = worker.path_address();
    worker.send(MessageKind::kPath, 0, std::span(&mine, 1));
    class Taken final : public MessageSink {
     public:
      std::span<std::byte> place(const MessageHeader& header) override {
        body.resize(header.n_bytes);
        return body;
      }
      void arrived(const MessageHeader&) override { is_there = true; }
      std::vector<std::byte> body;
      bool is_there = false;
    } taken;
    MessageConnection* const one = &worker;
    while (!taken.is_there && !stops_) {
      worker.progress(taken);
      waiter_->wait(std::span(&one, 1), nullptr, std::chrono::milliseconds(5));
    }
    worker.find_path(path_answer_from(taken.body).address);
    worker.use_path();
  }

  void pass_on(MessageHeader header, std::vector<std::byte>& body, MessageConnection& to) {
    n_requests_ += header.kind == MessageKind::kRequest;
    n_loads_ += header.kind == MessageKind::kLoad;
    const bool is_answer = header.kind == MessageKind::kAnswer;
    const Fault fault = fault_;
    n_faults_ += is_answer && fault != Fault::kNone;
    const bool is_request = header.kind == MessageKind::kRequest;
    if (is_request && (fault == Fault::kCloses ||
                       (fault == Fault::kClosesLater && ++n_before_closing_ % 2 == 0))) {
      ++n_faults_;
      throw ConnectionError("as the test wants");
    }
    size_t n = body.size();
    if (is_answer && fault == Fault::kOtherNumber) header.number += 1000;
    if (is_answer && fault == Fault::kOtherLength) n -= 4 * 8;
    if (is_answer && fault == Fault::kLosesAnswer) throw ConnectionError("as the test wants");
    if (is_answer && fault == Fault::kGarbage) header.kind = MessageKind::kSetup;
    const MessageBytes part = std::span(body).first(n);
    to.send(header.kind, header.number, std::span(&part, 1));
  }

  const std::string worker_;
  const std::unique_ptr<Transport> transport_ = transport_of_tests();
  const std::unique_ptr<MessageListener> listener_ = transport_->listen("127.0.0.1:0");
  const std::unique_ptr<MessageWaiter> waiter_ = transport_->waiter();
  std::atomic<Fault> fault_{Fault::kNone};
  std::atomic<int> n_requests_{0}, n_faults_{0}, n_loads_{0};
  int n_before_closing_ = 0;
  std::atomic<bool> stops_{false};
  std::thread thread_;
};

}  // namespace tandem::test
