// `tandem bench comm` without ranks: a request for experts' rows to a worker of this host and its
// answer, without the time that experts take, beside the same bytes over TCP or UCX alone.
#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "bench/comm/comm.h"
#include "comm/alone.h"
#include "core/memory.h"
#include "offload/workers/expert_server.h"
#include "offload/workers/worker_link.h"
#include "transport/tcp.h"
#include "transport/ucx.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

// Sums of nothing.
class NoExperts final : public ExpertPool {
 public:
  void add_to(Ticket, TensorView) override {}

 private:
  Ticket start(const ExpertBatch&) override { return 0; }
};

class Answers final : public AnswerSink {
 public:
  explicit Answers(int64_t n_bytes) : memory_(n_bytes) {}
  std::span<std::byte> place_of_answer(uint64_t, uint64_t n_bytes) override {
    return memory_.span().first(n_bytes);
  }
  void answered(uint64_t) override { is_answered = true; }
  bool is_answered = false;

 private:
  Buffer memory_;
};

// A worker of one layer, on a thread.
class Worker {
 public:
  Worker(const BenchInput& bench, Transport& transport, int max_rows, const Secret& secret)
      : config_(one_layer(bench.config)),
        kernels_(cpu::kernels_for(*bench.options.isa)),
        server_(transport, {.secret = secret}) {
    const int n_experts = config_.router.n_experts;
    welcome.model = 1;
    welcome.n_layers = 1;
    welcome.n_active = config_.router.n_active;
    welcome.dim = config_.dim;
    welcome.max_rows = max_rows;
    welcome.takes_bf16 = true;
    welcome.experts.assign(1, std::vector<bool>(n_experts, true));
    thread_ = std::thread([this] {
      Team team(1);
      server_.run({config_, kernels_, experts_, team, welcome});
    });
  }
  ~Worker() {
    server_.end();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  std::string address() const { return "127.0.0.1:" + std::to_string(server_.port()); }

  WorkerWelcome welcome = {};

 private:
  static ModelConfig one_layer(ModelConfig config) {
    config.n_layers = 1;
    config.n_dense_layers = 0;
    config.n_mtp_layers = 0;
    return config;
  }
  const ModelConfig config_;
  const cpu::KernelTable kernels_;
  NoExperts experts_;
  ExpertServer server_;
  std::thread thread_;
};

// A connection over which a thread answers messages of one size with messages of another.
class PlainTcp final : public PlainRoundTrips {
 public:
  PlainTcp(int64_t there, int64_t back) : out_(there), in_(back) {
    tcp::acceptor acceptor(io_, {asio::ip::make_address("127.0.0.1"), 0});
    near_.connect(acceptor.local_endpoint());
    far_ = acceptor.accept();
    near_.set_option(tcp::no_delay(true));
    far_.set_option(tcp::no_delay(true));
    thread_ = std::thread([this, there, back] {
      Buffer question(there), answer(back);
      boost::system::error_code error;
      while (!error) {
        asio::read(far_, asio::buffer(question.data(), question.span().size()), error);
        if (!error) asio::write(far_, asio::buffer(answer.data(), answer.span().size()), error);
      }
    });
  }
  ~PlainTcp() override {
    boost::system::error_code ignored;
    near_.shutdown(tcp::socket::shutdown_both, ignored);
    near_.close(ignored);
    thread_.join();
  }
  PlainTcp(const PlainTcp&) = delete;
  PlainTcp& operator=(const PlainTcp&) = delete;
  void round_trip() override {
    asio::write(near_, asio::buffer(out_.data(), out_.span().size()));
    asio::read(near_, asio::buffer(in_.data(), in_.span().size()));
  }

 private:
  asio::io_context io_;
  tcp::socket near_{io_}, far_{io_};
  Buffer out_, in_;
  std::thread thread_;
};

// Requests of the same rows over a link that is up.
class Requests {
 public:
  Requests(Transport& transport, const Worker& worker, int n_rows, const Secret& secret,
           PathUse path)
      : waiter_(transport.waiter()),
        link_(transport, {.address = worker.address(), .secret = secret, .path = path}),
        shape_{.n_active = worker.welcome.n_active,
               .dim = worker.welcome.dim,
               .max_rows = worker.welcome.max_rows},
        rows_at_(shape_.rows_at(n_rows)),
        body_(shape_.bytes(n_rows, RowType::kBf16)),
        answers_(int64_t{n_rows} * shape_.dim * static_cast<int64_t>(sizeof(float))) {
    link_.keep(worker.welcome, worker.welcome.max_rows, *waiter_);
    while (!link_.is_up()) waiter_->wait({}, nullptr, std::chrono::milliseconds(10));
    const RequestHead head = {.layer = 0, .n_rows = n_rows, .type = RowType::kBf16};
    std::memcpy(body_.data(), &head, sizeof head);
    check(link_.take(), "the link is up");
  }
  ~Requests() { link_.release(); }
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  int64_t bytes() const { return static_cast<int64_t>(body_.span().size()); }
  void round_trip() {
    answers_.is_answered = false;
    const MessageBytes body = body_.span();
    const MessageBytes parts[] = {body.first(rows_at_), body.subspan(rows_at_)};
    bool is_up = link_.request(++number_, parts);
    while (is_up && (is_up = link_.progress(answers_)) && !answers_.is_answered) {
      MessageConnection* const connection = link_.connection();
      waiter_->wait(std::span(&connection, 1), nullptr, std::chrono::milliseconds(100));
    }
    if (!is_up) throw RunError("the worker of this host was lost: " + link_.why_down());
  }

 private:
  const std::unique_ptr<MessageWaiter> waiter_;
  WorkerLink link_;
  const RequestShape shape_;
  const int64_t rows_at_;  // in the body, which a backbone sends in parts too
  Buffer body_;
  Answers answers_;
  uint64_t number_ = 0;
};

// What requests travel by, and the same bytes without this program's messages.
struct RequestWay {
  std::string operation, raw;
  std::unique_ptr<Transport> transport;
  std::function<std::unique_ptr<PlainRoundTrips>(int64_t there, int64_t back)> plain;
  bool is_encrypted = false;
  PathUse path = PathUse::kNever;
};

// UCX is left out where it is not installed.
std::vector<RequestWay> request_ways() {
  const auto plain_tcp = [](int64_t there, int64_t back) {
    return std::make_unique<PlainTcp>(there, back);
  };
  std::vector<RequestWay> ways;
  ways.push_back({"request to a worker", "TCP over loopback", tcp_transport(), plain_tcp});
  ways.push_back({"encrypted request", "TCP over loopback", tcp_transport(), plain_tcp, true});
  try {
    ways.push_back({"request by UCX", "UCX in memory", ucx_transport(UcxReach::kThisHost),
                    plain_ucx, false, PathUse::kAlways});
  } catch (const PathError&) {
  }
  return ways;
}

}  // namespace

double bench_requests(const BenchInput& bench, const OnRow& on_row) {
  const BenchOptions& o = bench.options;
  const std::unique_ptr<Group> alone = make_alone();
  const int most = *std::max_element(o.tokens.begin(), o.tokens.end());
  double fewest = 0;
  const auto measure = [&](int n, const RequestWay& way) {
    const Secret secret = way.is_encrypted ? Secret("a secret of this measurement") : Secret();
    const Worker worker(bench, *way.transport, most, secret);
    Requests requests(*way.transport, worker, n, secret, way.path);
    const int64_t back = int64_t{n} * bench.config.dim * static_cast<int64_t>(sizeof(float));
    const std::unique_ptr<PlainRoundTrips> plain = way.plain(requests.bytes(), back);
    const ComparedSeconds seconds =
        compare(*alone, {[&] { requests.round_trip(); }, [&] { plain->round_trip(); }}, o.seconds);
    if (!way.is_encrypted && way.path == PathUse::kNever && (fewest == 0 || seconds.own < fewest))
      fewest = seconds.own;
    nlohmann::ordered_json row =
        comm_row(1, way.raw, way.operation, requests.bytes() + back, seconds);
    row["config"] = o.config;
    row["tokens"] = n;
    row["there"] = "bf16";
    row["back"] = "f32";
    on_row(row);
  };
  for (const RequestWay& way : request_ways())
    for (const int n : o.tokens) measure(n, way);
  return fewest;
}

std::string with_request_seconds(const std::string& machine, const std::string& source,
                                 double seconds) {
  return edited_machine(machine, source, [&](nlohmann::ordered_json& fields) {
    fields["request_seconds"] = seconds;
  });
}

}  // namespace tandem
