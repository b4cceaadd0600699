// What backbones and expert workers say to each other: the bodies of the messages, and functions
// that read them from bytes of a peer. All numbers are little-endian.
#pragma once
#include <string>
#include <vector>

#include "transport/message.h"
#include "transport/secret.h"

namespace tandem {

constexpr uint32_t kProtocolVersion = 5;

// Which experts of which layers: [layers][n_experts]. What it says of a dense layer means nothing.
using ExpertsOfLayers = std::vector<std::vector<bool>>;

// From both sides, first.
struct WorkerHello {
  uint32_t version = kProtocolVersion;
  Protection protection = Protection::kNone;
  Nonce nonce{};
};
// Throws ProtocolError for another version or protection. `peer` is what the message calls the
// other side, `option` gives this side's secret.
void require_same_protocol(const WorkerHello& mine, const WorkerHello& theirs,
                           const std::string& peer, const std::string& option);

struct WorkerVerdict {
  uint32_t accepted = 0;
  Mac proof{};
};

// What a worker has.
struct WorkerWelcome {
  uint64_t model = 0;  // model_identity()
  // Those of which it has experts are the first ones: the model's, or also those for multi-token
  // prediction, which follow.
  int32_t n_layers = 0;
  int32_t n_active = 0, dim = 0;
  int32_t max_rows = 0;        // of a request
  bool takes_bf16 = false;     // its kernels round rows to BF16 anyway
  bool is_standby = false;     // it loads experts that it is asked to load, and keeps them
  bool moves_experts = false;  // it does so within spare memory, and gives others away
  ExpertsOfLayers experts;     // [n_layers][n_experts] those that it computes
  // [n_experts] those that are on its GPU, of every layer; empty: none is.
  std::vector<bool> on_gpu = {};
  // What decides the bits of a sum of experts in its memory, and of experts on its GPU: kernels,
  // format of the experts, slices. arithmetic_of() compares them.
  std::string arithmetic;
  std::string gpu_arithmetic = {};  // empty: no expert is on a GPU
  bool operator==(const WorkerWelcome&) const = default;
};
constexpr uint64_t kMostWelcomeBytes = 1 << 18;
std::vector<std::byte> bytes_of(const WorkerWelcome& welcome);
// Throws ProtocolError.
WorkerWelcome welcome_from(MessageBytes body);

struct WorkerSetup {
  uint32_t beat_ms = 0;   // the worker is never silent for longer
  uint32_t max_rows = 0;  // of a request
};
constexpr uint32_t kMostBeatMs = 60'000;
// Throws ProtocolError.
WorkerSetup worker_setup_from(MessageBytes body, int32_t max_rows);

// What a worker answers to the address of a backbone's path (transport.h): its own one, or why it
// does not go on by a path. path_answer_from() throws ProtocolError. The text is cut where it is
// too long.
struct PathAnswer {
  std::vector<std::byte> address;
  std::string why_not;  // empty: both go on by the path
  bool operator==(const PathAnswer&) const = default;
};
constexpr uint64_t kMostPathBytes = 1 << 14;
std::vector<std::byte> bytes_of(const PathAnswer& answer);
PathAnswer path_answer_from(MessageBytes body);

// Asks a worker to load experts, or says which ones the backbone uses: the body has a byte for each
// of its layers and experts, which is 1 for those that are meant. experts_from() throws
// ProtocolError for another length and another byte, and load_from() also for a body that wants
// none.
std::vector<std::byte> bytes_of(const ExpertsOfLayers& experts);
ExpertsOfLayers experts_from(MessageBytes body, size_t n_layers, size_t n_experts);
ExpertsOfLayers load_from(MessageBytes body, size_t n_layers, size_t n_experts);

// What the worker answers, as often as it would send beats, until it has loaded or refuses.
struct LoadAnswer {
  enum class State : uint32_t { kLoading, kLoaded, kRefused };
  State state = State::kLoading;
  // While it loads: those of the load under way, which may be for another backbone. Once it has
  // loaded: those of all loads for this one.
  int64_t bytes_done = 0, bytes_total = 0;
  std::string why;  // it refuses
  bool operator==(const LoadAnswer&) const = default;
};
constexpr uint64_t kMostLoadAnswerBytes = 1 << 11;
// The text is cut where it is too long.
std::vector<std::byte> bytes_of(const LoadAnswer& answer);
// Throws ProtocolError.
LoadAnswer load_answer_from(MessageBytes body);

enum class RowType : int32_t { kF32, kBf16 };
constexpr int64_t bytes_of(RowType type) { return type == RowType::kF32 ? 4 : 2; }

// A request begins with this; ids kI32 [n_rows, n_active] and weights kF32 of the same shape
// follow, zeros up to a multiple of 64 bytes, and the rows [n_rows, dim]. The answer is kF32
// [n_rows, dim]: the sum of weight * expert(row) over the experts of each row, in ascending order;
// where some are on the worker's GPU, the sum of these, to which the sum of the others is added.
struct RequestHead {
  int32_t layer = 0, n_rows = 0;
  RowType type = RowType::kF32;
  int32_t zero = 0;
};
struct RequestShape {
  int32_t n_active, dim, max_rows;
  int64_t rows_at(int64_t n_rows) const;  // the byte at which the rows begin
  int64_t bytes(int64_t n_rows, RowType type) const {
    return rows_at(n_rows) + n_rows * dim * bytes_of(type);
  }
};
struct ExpertRequest {
  RequestHead head;
  const int32_t* ids;
  const float* weights;
  const std::byte* rows;
};
// Views of `body`, which is aligned to 64 bytes. Throws ProtocolError for another length than the
// head states, a layer that `has_experts` [n_layers] denies, and an id that is neither -1 nor one
// of the layer's `experts`.
ExpertRequest request_from(MessageBytes body, const RequestShape& shape,
                           const std::vector<bool>& has_experts, const ExpertsOfLayers& experts);

}  // namespace tandem
