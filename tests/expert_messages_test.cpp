// What backbones and workers say to each other, whole, cut short and wrong.
#include "transport/expert_messages.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/memory.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

WorkerWelcome welcome() {
  return {.model = 0x123456789abcdef0,
          .n_layers = 2,
          .n_active = 8,
          .dim = 7168,
          .max_rows = 512,
          .takes_bf16 = true,
          .is_standby = true,
          .experts = {{true, false, true}, {false, true, true}},
          .on_gpu = {},
          .arithmetic = "kernels avx2"};
}

TEST(ExpertMessages, AWelcomeArrives) {
  EXPECT_EQ(welcome_from(bytes_of(welcome())), welcome());
  WorkerWelcome empty = welcome();
  empty.experts.clear();
  empty.n_layers = 0;
  empty.arithmetic.clear();
  EXPECT_EQ(welcome_from(bytes_of(empty)), empty);
  WorkerWelcome moving = welcome();
  moving.is_standby = false;
  moving.moves_experts = true;
  EXPECT_EQ(welcome_from(bytes_of(moving)), moving);
}

WorkerWelcome with_gpu() {
  WorkerWelcome of = welcome();
  of.on_gpu = {false, false, true};
  of.gpu_arithmetic = "GPU";
  return of;
}

TEST(ExpertMessages, ExpertsOnAGpuArrive) {
  EXPECT_EQ(welcome_from(bytes_of(with_gpu())), with_gpu());
  constexpr size_t kFlags = 48, kOnGpu = kFlags + 6;
  for (const size_t at : {kFlags + 1, kOnGpu + 1}) {
    std::vector<std::byte> body = bytes_of(with_gpu());
    body[at] = std::byte{2};
    EXPECT_THROW(welcome_from(body), ProtocolError) << "neither there nor not";
  }
  for (const size_t expert : {0u, 1u}) {
    std::vector<std::byte> body = bytes_of(with_gpu());
    body[kOnGpu + expert] = std::byte{1};
    EXPECT_THROW(welcome_from(body), ProtocolError) << "on a GPU in layers without it";
  }
  std::vector<std::byte> body = bytes_of(with_gpu());
  body[kOnGpu + 2] = std::byte{0};
  EXPECT_THROW(welcome_from(body), ProtocolError) << "no expert for the GPU's arithmetic";
}

TEST(ExpertMessages, AWelcomeOfAnyOtherLengthIsRefused) {
  std::vector<std::byte> body = bytes_of(welcome());
  for (size_t n = 0; n < body.size(); ++n)
    EXPECT_THROW(welcome_from(std::span(body).first(n)), ProtocolError) << n;
  body.push_back(std::byte{0});
  EXPECT_THROW(welcome_from(body), ProtocolError);
}

// Numbers of experts and of bytes of text that would overflow, or claim more than there is.
TEST(ExpertMessages, AWelcomeWithHugeNumbersIsRefused) {
  constexpr size_t kExperts = 28, kText = 32, kGpuText = 40;
  for (const size_t at : {kExperts, kText, kGpuText})
    for (const uint32_t n : {4u, 1001u, 0x7fffffffu, 0xffffffffu}) {
      std::vector<std::byte> body = bytes_of(welcome());
      std::memcpy(body.data() + at, &n, sizeof n);
      EXPECT_THROW(welcome_from(body), ProtocolError) << at << " " << n;
    }
}

TEST(ExpertMessages, ATextFromAPeerIsPrintable) {
  WorkerWelcome rude = welcome();
  rude.arithmetic = "a\n\x1b[31m\x7f";
  EXPECT_EQ(welcome_from(bytes_of(rude)).arithmetic, "a??[31m?");
  rude = with_gpu();
  rude.gpu_arithmetic = "\n";
  EXPECT_EQ(welcome_from(bytes_of(rude)).gpu_arithmetic, "?");
}

TEST(ExpertMessages, ALoadArrives) {
  const ExpertsOfLayers experts = {{false, true, true, false}, {true, false, false, false}};
  std::vector<std::byte> body = bytes_of(experts);
  EXPECT_EQ(load_from(body, 2, 4), experts);
  EXPECT_THROW(load_from(body, 2, 3), ProtocolError);
  EXPECT_THROW(load_from(body, 1, 4), ProtocolError);
  EXPECT_THROW(load_from(body, 2, 5), ProtocolError);
  EXPECT_THROW(load_from(bytes_of(ExpertsOfLayers{{false, false}, {false, false}}), 2, 2),
               ProtocolError)
      << "none is wanted";
  EXPECT_EQ(experts_from(bytes_of(ExpertsOfLayers{{false}, {false}}), 2, 1),
            (ExpertsOfLayers{{false}, {false}}))
      << "a backbone may use none";
  EXPECT_THROW(experts_from(body, 2, 3), ProtocolError);
  EXPECT_THROW(load_from({}, 0, 0), ProtocolError);
  body[7] = std::byte{2};
  EXPECT_THROW(load_from(body, 2, 4), ProtocolError);
}

TEST(ExpertMessages, AnAnswerToALoadArrives) {
  using State = LoadAnswer::State;
  for (const LoadAnswer& answer : {LoadAnswer{State::kLoading, 5, 7, ""},
                                   {State::kLoaded, 7, 7, ""},
                                   {State::kRefused, 0, 0, "too little memory"}}) {
    std::vector<std::byte> body = bytes_of(answer);
    EXPECT_EQ(load_answer_from(body), answer);
    for (size_t n = 0; n < body.size(); ++n)
      EXPECT_THROW(load_answer_from(std::span(body).first(n)), ProtocolError) << n;
    body.push_back(std::byte{0});
    EXPECT_THROW(load_answer_from(body), ProtocolError);
  }
  const LoadAnswer rude = {State::kRefused, 0, 0, "a\n" + std::string(3000, 'b')};
  EXPECT_EQ(load_answer_from(bytes_of(rude)).why, "a?" + std::string(998, 'b'));
  EXPECT_LE(bytes_of(rude).size(), kMostLoadAnswerBytes);
}

TEST(ExpertMessages, AWrongAnswerToALoadIsRefused) {
  using State = LoadAnswer::State;
  for (const LoadAnswer& wrong :
       {LoadAnswer{State{3}, 0, 0, ""}, {State::kLoading, 8, 7, ""}, {State::kLoading, -1, 7, ""}})
    EXPECT_THROW(load_answer_from(bytes_of(wrong)), ProtocolError) << wrong.bytes_done;
  std::vector<std::byte> body = bytes_of(LoadAnswer{State::kRefused, 0, 0, "no"});
  for (const uint32_t n : {0u, 1u, 3u, 0x7fffffffu, 0xffffffffu}) {
    std::memcpy(body.data() + sizeof(State), &n, sizeof n);
    EXPECT_THROW(load_answer_from(body), ProtocolError) << n;
  }
}

TEST(ExpertMessages, AnAnswerAboutAPathArrives) {
  const PathAnswer address = {.address = {std::byte{7}, std::byte{0}}, .why_not = {}},
                   refusal = {.address = {}, .why_not = "it has only sockets"};
  EXPECT_EQ(path_answer_from(bytes_of(address)), address);
  EXPECT_EQ(path_answer_from(bytes_of(refusal)), refusal);
  EXPECT_EQ(path_answer_from(bytes_of(PathAnswer{{}, "a\nb"})).why_not, "a?b");
  EXPECT_EQ(path_answer_from(bytes_of(PathAnswer{{}, std::string(9000, 'x')})).why_not.size(),
            1000u);
  std::vector<std::byte> body = bytes_of(address);
  EXPECT_THROW(path_answer_from(std::span(body).first(4)), ProtocolError) << "without an address";
  EXPECT_THROW(path_answer_from(std::span(body).first(3)), ProtocolError);
  body[0] = std::byte{2};
  EXPECT_THROW(path_answer_from(body), ProtocolError);
}

TEST(ExpertMessages, ASetupIsChecked) {
  const auto with = [](WorkerSetup setup) {
    return worker_setup_from(std::as_bytes(std::span(&setup, 1)), 512);
  };
  EXPECT_EQ(with({.beat_ms = 1, .max_rows = 512}).max_rows, 512u);
  for (const WorkerSetup& setup :
       {WorkerSetup{0, 1}, {kMostBeatMs + 1, 1}, {1, 0}, {1, 513}, {1, 0xffffffff}})
    EXPECT_THROW(with(setup), ProtocolError) << setup.beat_ms << " " << setup.max_rows;
  const WorkerSetup setup{1, 1};
  EXPECT_THROW(worker_setup_from(std::as_bytes(std::span(&setup, 1)).first(7), 512), ProtocolError);
}

TEST(ExpertMessages, VersionsAndSecretsMustAgree) {
  const auto refusal = [](WorkerHello mine, WorkerHello theirs) {
    return error_of(
        [&] { require_same_protocol(mine, theirs, "the worker a:1", "--worker-secret"); });
  };
  EXPECT_EQ(refusal({}, {}), "no error");
  EXPECT_TRUE(says(refusal({}, {.version = kProtocolVersion + 1}),
                   fmt::format("the worker a:1 speaks version {} of the protocol, and this program "
                               "version {}",
                               kProtocolVersion + 1, kProtocolVersion)));
  constexpr auto kProof = Protection::kProof, kEncryption = Protection::kEncryption;
  for (const Protection with : {kProof, kEncryption}) {
    EXPECT_TRUE(
        says(refusal({}, {.protection = with}), "the worker a:1 has a secret, and this program"));
    EXPECT_TRUE(says(refusal({.protection = with}, {}), "the worker a:1 has no secret, and this"));
    EXPECT_EQ(refusal({.protection = with}, {.protection = with}), "no error");
  }
  EXPECT_TRUE(says(refusal({.protection = kProof}, {.protection = kEncryption}),
                   "the worker a:1 encrypts what it sends, and this program does not encrypt"));
  EXPECT_TRUE(says(refusal({.protection = kEncryption}, {.protection = kProof}),
                   "the worker a:1 does not encrypt what it sends, and this program encrypts"));
}

constexpr RequestShape kShape = {.n_active = 3, .dim = 32, .max_rows = 4};
const std::vector<bool> kLayers = {false, true, true};
const ExpertsOfLayers kExperts = {{}, {true, false, true, true}, {true, true, true, false}};

// A request of n rows, with a 2 in every id.
struct RequestBytes {
  Buffer memory{4096};
  RequestHead head;
  size_t n_bytes;

  RequestBytes(int n, RowType type, int layer = 1)
      : head{.layer = layer, .n_rows = n, .type = type},
        n_bytes(static_cast<size_t>(kShape.bytes(n, type))) {
    std::fill_n(ids(), n * 3, 2);
  }
  int32_t* ids() { return reinterpret_cast<int32_t*>(memory.data() + sizeof head); }
  ExpertRequest read(int64_t more_bytes = 0) {
    std::memcpy(memory.data(), &head, sizeof head);
    return request_from(memory.span().first(n_bytes + more_bytes), kShape, kLayers, kExperts);
  }
};

TEST(ExpertMessages, ARequestIsDividedIntoItsParts) {
  for (const RowType type : {RowType::kF32, RowType::kBf16})
    for (int n = 1; n <= 4; ++n) {
      RequestBytes request(n, type, 2);
      request.ids()[0] = -1;
      const ExpertRequest read = request.read();
      EXPECT_EQ(read.head.layer, 2);
      EXPECT_EQ(read.ids, request.ids());
      EXPECT_EQ(read.weights, reinterpret_cast<float*>(request.ids() + 3 * n));
      const int64_t at = read.rows - request.memory.data();
      EXPECT_EQ(at % 64, 0);
      EXPECT_GE(at, 16 + n * 3 * 8);
      EXPECT_LT(at, 16 + n * 3 * 8 + 64);
      EXPECT_EQ(at + n * 32 * bytes_of(type), static_cast<int64_t>(request.n_bytes));
    }
}

TEST(ExpertMessages, AWrongRequestIsRefused) {
  for (const int64_t more : {-1, 1, 64, -64})
    EXPECT_THROW(RequestBytes(2, RowType::kF32).read(more), ProtocolError) << more;
  const auto with = [](auto change) {
    RequestBytes request(2, RowType::kBf16);
    change(request);
    request.read();
  };
  EXPECT_NO_THROW(with([](RequestBytes&) {}));
  for (const int n : {0, -1, 5, 3, 1, INT32_MIN, INT32_MAX})
    EXPECT_THROW(with([&](RequestBytes& r) { r.head.n_rows = n; }), ProtocolError) << n;
  for (const int type : {-1, 2, 0})
    EXPECT_THROW(with([&](RequestBytes& r) { r.head.type = RowType{type}; }), ProtocolError)
        << type;
  for (const int layer : {-1, 0, 3, INT32_MAX})
    EXPECT_THROW(with([&](RequestBytes& r) { r.head.layer = layer; }), ProtocolError) << layer;
  for (const int id : {-2, 1, 4, INT32_MAX, INT32_MIN})
    EXPECT_THROW(with([&](RequestBytes& r) { r.ids()[5] = id; }), ProtocolError) << id;
}

}  // namespace
}  // namespace tandem
