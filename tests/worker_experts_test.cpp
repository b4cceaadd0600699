// Experts that workers compute, which are threads here: sums in the order of the shards, workers
// that are lost in any way, several backbones, and peers that may not connect.
#include "offload/workers/worker_experts.h"

#include "core/run_error.h"
#include "tests/error_of.h"
#include "tests/worker_backbones.h"
#include "transport/transport_choice.h"

namespace tandem::test {
namespace {

using Fault = FaultyWorker::Fault;
using std::chrono::milliseconds;

TEST(WorkerExperts, AddTheSumsOfShardsInTheirOrder) {
  Local local;
  const std::vector<std::vector<std::string>> divisions = {{"auto"},
                                                           {"0-3", "4-7"},
                                                           {"4-7", "0-3"},
                                                           {"0-5", "2-7"},
                                                           {"auto", "auto"},
                                                           {"1,4"},
                                                           {"3-7"},
                                                           {"2-4", "5-7"},
                                                           {"0-1", "2", "3-5", "6-7"},
                                                           {"0-3,6", "0,4-7", "1,3,5,7"}};
  for (const auto& division : divisions) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    const Workers workers(served(kServedModel, ""), division);
    Backbone backbone(local, workers.addresses);
    for (int seed = 0; seed < 3; ++seed) expect_right_sums(local, backbone, 100 * seed);
    for (size_t w = 0; w < division.size(); ++w) {
      EXPECT_GT(backbone.status(static_cast<int>(w)).n_requests, 0);
      EXPECT_EQ(backbone.status(static_cast<int>(w)).n_failures, 0);
      EXPECT_GT(backbone.status(static_cast<int>(w)).seconds, 0);
    }
  }
}

// Without rows there is nothing to ask, nor where all experts are left out.
TEST(WorkerExperts, AskForNothingWithoutRows) {
  Local local;
  WorkerThread worker(served(kServedModel, "0-6"));
  Backbone backbone(local, {worker.address()});
  Inputs none(0, local.dim, 1), left_out(3, local.dim, 1), here(3, local.dim, 1);
  std::fill(left_out.ids.begin(), left_out.ids.end(), -1);
  std::fill(here.ids.begin(), here.ids.end(), 7);
  for (Inputs* inputs : {&none, &left_out, &here})
    EXPECT_EQ(backbone.sums(*inputs, 1), local.sums(*inputs, 1, backbone.shards()));
  EXPECT_EQ(backbone.status(0).n_requests, 0);
}

TEST(WorkerExperts, SendRowsAsBf16WhereWorkersRoundThem) {
  Local local;
  WorkerThread worker(served(kServedModel, "auto"), {},
                      [](WorkerWelcome& w) { w.takes_bf16 = true; });
  Backbone backbone(local, {worker.address()});
  expect_right_sums(local, backbone, 7);
  Inputs inputs(2, local.dim, 1);
  std::vector<float> rounded = inputs.x;
  inputs.x[0] = 1.0f + 0x1p-12f;  // rounds to 1
  rounded[0] = 1;
  const std::vector<float> got = backbone.sums(inputs, 1);
  inputs.x = rounded;
  EXPECT_EQ(got, local.sums(inputs, 1, backbone.shards()));
}

class LostWorkers : public testing::TestWithParam<Fault> {};

// Two workers have all experts. Whatever one of them does, the other one answers within the same
// step, and the first one is used again once it behaves.
TEST_P(LostWorkers, AreReplacedWithinTheStep) {
  Local local;
  WorkerThread first(served(kServedModel, "auto")), second(served(kServedModel, "auto"));
  FaultyWorker faulty(first.address());
  Backbone backbone(local, {faulty.address(), second.address()});
  expect_right_sums(local, backbone, 1);
  ASSERT_GT(faulty.n_requests(), 0);
  faulty.set(GetParam());
  for (int i = 0; i < 20 && faulty.n_faults() == 0; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(faulty.n_faults(), 0);
  for (int i = 0; i < 3; ++i) expect_right_sums(local, backbone, i);
  EXPECT_GT(backbone.status(0).n_failures, 0);
  EXPECT_EQ(backbone.status(1).n_failures, 0);
  faulty.set(Fault::kNone);
  backbone.await(0, true);
  const int n_before = faulty.n_requests();
  expect_right_sums(local, backbone, 2);
  EXPECT_GT(faulty.n_requests(), n_before);
}

INSTANTIATE_TEST_SUITE_P(Faults, LostWorkers,
                         testing::Values(Fault::kSilent, Fault::kCloses, Fault::kLosesAnswer,
                                         Fault::kOtherNumber, Fault::kOtherLength,
                                         Fault::kGarbage));

TEST(WorkerExperts, NoticeASilentWorkerBetweenSteps) {
  Local local;
  WorkerThread first(served(kServedModel, "auto")), second(served(kServedModel, "auto"));
  FaultyWorker faulty(first.address());
  Backbone backbone(local, {faulty.address(), second.address()});
  expect_right_sums(local, backbone, 1);
  const int64_t n_requests = backbone.status(0).n_requests;
  faulty.set(Fault::kSilent);
  backbone.await(0, false);
  expect_right_sums(local, backbone, 2);
  EXPECT_EQ(backbone.status(0).n_requests, n_requests);
  faulty.set(Fault::kNone);
}

// A worker whose computation takes longer than the deadline beats, so it is not lost.
TEST(WorkerExperts, WaitForAWorkerThatIsBusy) {
  Local local;
  SlowWorker worker(milliseconds(500));
  Backbone backbone(local, {worker.address()}, {.deadline = milliseconds(200)});
  std::this_thread::sleep_for(milliseconds(500));  // an idle worker beats too
  Inputs inputs(3, local.dim, 1);
  EXPECT_EQ(backbone.sums(inputs, 1), local.sums(inputs, 1, backbone.shards()));
  EXPECT_EQ(backbone.status(0).n_failures, 0);
  EXPECT_GT(backbone.status(0).seconds, 0.4);
}

// A worker on a port that is known before it begins.
ExpertServer::Options on_port(int port) {
  return {.address = "127.0.0.1:" + std::to_string(port), .drain = std::chrono::seconds(5)};
}

TEST(WorkerExperts, FailAStepWithoutOwnersAndGoOnWhenOneIsBack) {
  Local local;
  auto worker = std::make_unique<WorkerThread>(served(kServedModel, "4-7"));
  const std::string address = worker->address();
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  Backbone backbone(local, {address}, {.patience = milliseconds(300)});
  expect_right_sums(local, backbone, 1);
  worker.reset();
  backbone.await(0, false);
  Inputs inputs(kMostTokens, local.dim, 1), of_this_process(5, local.dim, 1);
  std::fill(of_this_process.ids.begin(), of_this_process.ids.end(), 2);
  for (int i = 0; i < 3; ++i) {
    const std::string error = error_of([&] { backbone.sums(inputs, 1); });
    EXPECT_TRUE(says(error, "experts 4-7 have had no worker for 0.3 s: " + address)) << i;
    EXPECT_TRUE(says(error, "start one of them again"));
    EXPECT_EQ(backbone.sums(of_this_process, 1), local.sums(of_this_process, 1, backbone.shards()))
        << "other experts can be computed";
  }
  EXPECT_THROW(backbone.sums(inputs, 1), StepFailed);
  worker = std::make_unique<WorkerThread>(served(kServedModel, "4-7"), on_port(port));
  backbone.await(0, true);
  expect_right_sums(local, backbone, 2);
}

// A request that ends its worker each time fails its step, however often the worker comes back.
TEST(WorkerExperts, FailAStepWhoseRequestEndsEveryWorker) {
  Local local;
  WorkerThread worker(served(kServedModel, "auto"));
  FaultyWorker faulty(worker.address());
  Backbone backbone(local, {faulty.address()}, {.patience = std::chrono::minutes(5)});
  expect_right_sums(local, backbone, 1);
  faulty.set(Fault::kCloses);
  Inputs inputs(kMostTokens, local.dim, 1);
  const std::string error = error_of([&] { backbone.sums(inputs, 1); });
  EXPECT_TRUE(says(error, "a request for experts 0-7 has ended 6 times: " + faulty.address()))
      << error;
  faulty.set(Fault::kNone);
  backbone.await(0, true);
  expect_right_sums(local, backbone, 2);
}

TEST(WorkerExperts, WaitForAnOwnerToComeBack) {
  Local local;
  auto worker = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  const std::string address = worker->address();
  Backbone backbone(local, {address});
  worker.reset();
  backbone.await(0, false);
  std::thread restart([&] {
    std::this_thread::sleep_for(milliseconds(200));
    worker = std::make_unique<WorkerThread>(
        served(kServedModel, "auto"), on_port(std::stoi(address.substr(address.rfind(':') + 1))));
  });
  expect_right_sums(local, backbone, 2);
  restart.join();
}

// One that comes back with other experts is not the worker that it was.
TEST(WorkerExperts, DoNotUseAWorkerThatHasChanged) {
  Local local;
  auto worker = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  const std::string address = worker->address();
  Backbone backbone(local, {address}, {.patience = milliseconds(1500)});
  worker.reset();
  worker = std::make_unique<WorkerThread>(
      served(kServedModel, "0-6"), on_port(std::stoi(address.substr(address.rfind(':') + 1))));
  Inputs inputs(kMostTokens, local.dim, 1);
  EXPECT_TRUE(says(error_of([&] { backbone.sums(inputs, 1); }), "start it as it was"));
}

TEST(WorkerExperts, LeaveAWorkerThatSaysGoodbye) {
  Local local;
  auto first = std::make_unique<WorkerThread>(served(kServedModel, "auto"));
  WorkerThread second(served(kServedModel, "auto"));
  Backbone backbone(local, {first->address(), second.address()});
  std::thread end([&] {
    std::this_thread::sleep_for(milliseconds(30));
    first.reset();  // returns once the backbone has left
  });
  for (int i = 0; i < 20; ++i) expect_right_sums(local, backbone, i);
  backbone.await(0, false);
  end.join();
  expect_right_sums(local, backbone, 3);
  EXPECT_EQ(backbone.status(0).n_failures, 0) << "it was not lost";
}

TEST(WorkerExperts, ServeSeveralBackbonesAtATime) {
  WorkerThread first(served(kServedModel, "0-4")), second(served(kServedModel, "3-7"));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      Local local;
      Backbone backbone(local, {first.address(), second.address()});
      for (int round = 0; round < 10; ++round) expect_right_sums(local, backbone, 10 * i + round);
    });
  for (std::thread& thread : threads) thread.join();
}

// Sends a message and returns the kind of what comes back, or nothing if the worker closes.
class Stranger final : public MessageSink {
 public:
  explicit Stranger(const std::string& address)
      : connection_(transport_->connect(address, std::chrono::seconds(5))) {}
  // The worker may close before it has all of a message; next() then returns nothing.
  void send(MessageKind kind, MessageBytes body) {
    try {
      connection_->send(kind, 0, std::span(&body, 1));
    } catch (const ConnectionError&) {
    }
  }
  std::optional<MessageKind> next() {
    came_.reset();
    try {
      for (int i = 0; i < 1000 && !came_; ++i) {
        MessageConnection* const connection = connection_.get();
        waiter_->wait(std::span(&connection, 1), nullptr, milliseconds(10));
        connection_->progress(*this);
      }
    } catch (const ConnectionError&) {
    }
    return came_;
  }
  const std::vector<std::byte>& body() const { return body_; }

 private:
  std::span<std::byte> place(const MessageHeader& header) override {
    body_.resize(header.n_bytes);
    return body_;
  }
  void arrived(const MessageHeader& header) override { came_ = header.kind; }

  const std::unique_ptr<Transport> transport_ = tcp_transport();
  const std::unique_ptr<MessageWaiter> waiter_ = transport_->waiter();
  std::unique_ptr<MessageConnection> connection_;
  std::optional<MessageKind> came_;
  std::vector<std::byte> body_;
};

TEST(ExpertServer, ClosesWhatDoesNotKeepToTheProtocol) {
  WorkerThread worker(served(kServedModel, "auto"));
  const WorkerHello hello;
  const auto bytes = std::as_bytes(std::span(&hello, 1));
  const std::vector<std::byte> longer(bytes.size() + 1), huge(1 << 20);
  const auto answer = [&](MessageKind kind, MessageBytes body) {
    Stranger stranger(worker.address());
    stranger.send(kind, body);
    return stranger.next();
  };
  EXPECT_EQ(answer(MessageKind::kHello, bytes), MessageKind::kHello);
  EXPECT_EQ(answer(MessageKind::kHello, bytes.first(bytes.size() - 1)), std::nullopt);
  EXPECT_EQ(answer(MessageKind::kHello, longer), std::nullopt);
  EXPECT_EQ(answer(MessageKind::kHello, huge), std::nullopt);
  for (const MessageKind kind : {MessageKind::kProof, MessageKind::kSetup, MessageKind::kRequest,
                                 MessageKind::kBeat, MessageKind::kPath})
    EXPECT_EQ(answer(kind, bytes), std::nullopt) << static_cast<int>(kind);
  Local local;
  Backbone backbone(local, {worker.address()});
  expect_right_sums(local, backbone, 1);
}

TEST(ExpertServer, TellsItsVersionToAnotherOne) {
  WorkerThread worker(served(kServedModel, "auto"));
  Stranger stranger(worker.address());
  WorkerHello other;
  other.version = 77;
  stranger.send(MessageKind::kHello, std::as_bytes(std::span(&other, 1)));
  EXPECT_EQ(stranger.next(), MessageKind::kHello);
  WorkerHello theirs;
  ASSERT_EQ(stranger.body().size(), sizeof theirs);
  std::memcpy(&theirs, stranger.body().data(), sizeof theirs);
  EXPECT_EQ(theirs.version, kProtocolVersion);
  EXPECT_EQ(stranger.next(), std::nullopt) << "and closes";
}

// After the proofs only, once, and with an address of a length that is bounded.
TEST(ExpertServer, TakesOneAddressOfAPath) {
  if (path_of_tests() != PathUse::kNever)
    GTEST_SKIP() << "UCX does not survive every address of a peer that is trusted";
  WorkerThread worker(served(kServedModel, "auto"));
  const WorkerHello hello;
  for (const size_t n_bytes : {size_t{100}, size_t{0}, size_t{kMostPathBytes} + 1}) {
    const std::vector<std::byte> address(n_bytes);
    Stranger stranger(worker.address());
    stranger.send(MessageKind::kHello, std::as_bytes(std::span(&hello, 1)));
    EXPECT_EQ(stranger.next(), MessageKind::kHello);
    stranger.send(MessageKind::kProof, Mac{});
    std::optional<MessageKind> came;
    do came = stranger.next();
    while (came && came != MessageKind::kWelcome);
    ASSERT_TRUE(came);
    stranger.send(MessageKind::kPath, address);
    if (n_bytes == 100) {
      ASSERT_EQ(stranger.next(), MessageKind::kPath);
      EXPECT_TRUE(
          says(path_answer_from(stranger.body()).why_not, "--worker-transport ucx or auto"));
      stranger.send(MessageKind::kPath, address);
    }
    EXPECT_EQ(stranger.next(), std::nullopt);
  }
}

TEST(WorkerPaths, AreUsedWhereBothSidesHaveThem) {
  const std::string why_not =
      TANDEM_SANITIZED ? "sanitizers do not know what UCX does" : why_no_ucx();
  if (!why_not.empty()) GTEST_SKIP() << why_not;
  const std::unique_ptr<Transport> ucx = ucx_transport(UcxReach::kThisHost);
  const std::unique_ptr<Transport> tcp = tcp_transport();
  WorkerThread worker(served(kServedModel, "auto"));
  const bool has_path = path_of_tests() != PathUse::kNever;
  const auto ask = [&](Transport& transport, PathUse path) {
    return error_of(
        [&] { WorkerLink(transport, {.address = worker.address(), .path = path}).ask(); });
  };
  EXPECT_EQ(ask(*ucx, PathUse::kNever), "no error");
  EXPECT_EQ(ask(*ucx, PathUse::kIfPossible), "no error");
  EXPECT_TRUE(says(ask(*ucx, PathUse::kAlways),
                   has_path ? "no error" : "it was not started with --worker-transport ucx"));
  EXPECT_TRUE(says(ask(*tcp, PathUse::kAlways), "this program has only sockets"));
  for (const PathUse path : {PathUse::kNever, PathUse::kIfPossible}) {
    Lines lines;
    const auto waiter = ucx->waiter();
    WorkerLink link(*ucx, {.address = worker.address(), .path = path, .note = lines.sink()});
    link.keep(link.ask(), 8, *waiter);
    lines.await("is up");
    const bool asks = path == PathUse::kIfPossible;
    EXPECT_EQ(lines.count("is up, by UCX"), asks && has_path ? 1 : 0);
    EXPECT_EQ(lines.count("TCP is used, because it was not started"), asks && !has_path ? 1 : 0);
  }
}

// With this variable UCX has no network, and reaches nothing but what it has in any case.
TEST(WorkerPaths, AreOfThisHostAloneWhereTheyWouldBeOpen) {
  const Secret encrypts("a secret of this test"), proves("a secret of this test", false);
  EXPECT_FALSE(chosen_transport(TransportChoice::kTcp, proves, "--x").has_paths);
  if (TANDEM_SANITIZED) GTEST_SKIP() << "sanitizers do not know what UCX does";
  setenv("UCX_TLS", "self", 1);
  for (const Secret& secret : {Secret(), encrypts, proves}) {
    const ChosenTransport chosen = chosen_transport(TransportChoice::kAuto, secret, "--x");
    const std::string error =
        error_of([&] { chosen_transport(TransportChoice::kUcx, secret, "--x"); });
    EXPECT_TRUE(says(error, chosen.has_paths ? "no error" : "--x ucx: ")) << error;
    if (!chosen.has_paths) continue;
    const auto listener = chosen.transport->listen("127.0.0.1:0");
    const auto client = chosen.transport->connect("127.0.0.1:" + std::to_string(listener->port()),
                                                  std::chrono::seconds(5));
    std::unique_ptr<MessageConnection> server;
    while (!server) server = listener->accept();
    const std::string found = error_of([&] { client->find_path(server->path_address()); });
    const bool is_open = secret.protection() == Protection::kProof;
    EXPECT_TRUE(says(found, is_open ? "UCX does not reach it" : "no error")) << found;
  }
  unsetenv("UCX_TLS");
}

TEST(ExpertServer, AsksForItsSecret) {
  const std::unique_ptr<Transport> transport = tcp_transport();
  WorkerThread worker(served(kServedModel, "auto"), {.secret = Secret("a secret of this test")});
  const auto ask = [&](const Secret& secret) {
    return error_of(
        [&] { WorkerLink(*transport, {.address = worker.address(), .secret = secret}).ask(); });
  };
  EXPECT_EQ(ask(Secret("a secret of this test")), "no error");
  EXPECT_TRUE(says(ask(Secret("another one, as long")), "has another secret: give both the same"));
  EXPECT_TRUE(says(ask({}), "has a secret, and this program none"));
  EXPECT_TRUE(says(ask(Secret("a secret of this test", false)),
                   "encrypts what it sends, and this program does not encrypt"));
  WorkerThread open(served(kServedModel, "auto"));
  EXPECT_TRUE(says(error_of([&] {
                     WorkerLink(*transport, {.address = open.address(),
                                             .secret = Secret("a secret of this test")})
                         .ask();
                   }),
                   "has no secret, and this program one"));

  // A peer that says to have one, and does not know it, learns nothing: no proof and no welcome.
  Stranger stranger(worker.address());
  WorkerHello hello;
  hello.protection = Protection::kEncryption;
  const Mac zeros{};
  stranger.send(MessageKind::kHello, std::as_bytes(std::span(&hello, 1)));
  EXPECT_EQ(stranger.next(), MessageKind::kHello);
  stranger.send(MessageKind::kProof, zeros);
  EXPECT_EQ(stranger.next(), MessageKind::kVerdict);
  EXPECT_EQ(stranger.body(), std::vector<std::byte>(sizeof(WorkerVerdict)));
  EXPECT_EQ(stranger.next(), std::nullopt);
}

TEST(ExpertServer, NeedsASecretWhereOthersCanConnect) {
  const std::unique_ptr<Transport> transport = tcp_transport();
  const auto listen = [&](const std::string& address, const Secret& secret) {
    return error_of([&] { ExpertServer(*transport, {.address = address, .secret = secret}); });
  };
  EXPECT_TRUE(says(listen("0.0.0.0:0", {}), "other machines can connect to it: give the worker"));
  EXPECT_EQ(listen("0.0.0.0:0", Secret("0123456789abcdef")), "no error");
  EXPECT_EQ(listen("127.0.0.1:0", {}), "no error");
}

}  // namespace
}  // namespace tandem::test
