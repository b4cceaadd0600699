#include "transport/expert_messages.h"

#include <algorithm>
#include <cstring>

#include "core/rounding.h"

namespace tandem {
namespace {

struct WelcomeHead {
  uint64_t model;
  int32_t n_layers, n_active, dim, max_rows;
  uint32_t takes_bf16, n_experts, n_text, is_standby;
  uint32_t n_gpu_text, moves_experts;
};

struct LoadAnswerHead {
  LoadAnswer::State state;
  uint32_t n_text;
  int64_t bytes_done, bytes_total;
};

constexpr uint32_t kMostText = 1000;
constexpr int32_t kMostLayers = 10'000;

const char* encrypts(const WorkerHello& hello) {
  return hello.protection == Protection::kEncryption ? "encrypts" : "does not encrypt";
}

template <class T>
T value_from(MessageBytes body) {
  require_protocol(body.size() >= sizeof(T), "a message of {} bytes is too short", body.size());
  T value;
  std::memcpy(&value, body.data(), sizeof value);
  return value;
}

// A byte for each expert of each layer.
void append_flags(const std::vector<bool>& flags, std::vector<std::byte>& body) {
  for (const bool flag : flags) body.push_back(std::byte{static_cast<uint8_t>(flag)});
}

std::vector<bool> flags_from(MessageBytes body) {
  std::vector<bool> flags(body.size());
  for (size_t e = 0; e < flags.size(); ++e) {
    require_protocol(body[e] <= std::byte{1}, "expert {} is neither there nor not", e);
    flags[e] = body[e] == std::byte{1};
  }
  return flags;
}

ExpertsOfLayers layer_flags_from(MessageBytes body, size_t n_layers, size_t n_experts) {
  ExpertsOfLayers experts;
  for (size_t l = 0; l < n_layers; ++l)
    experts.push_back(flags_from(body.subspan(l * n_experts, n_experts)));
  return experts;
}

bool any(const ExpertsOfLayers& experts) {
  return std::any_of(experts.begin(), experts.end(), [](const std::vector<bool>& of_layer) {
    return std::find(of_layer.begin(), of_layer.end(), true) != of_layer.end();
  });
}

// Text of a peer, which is printed.
std::string text_from(MessageBytes body) {
  std::string text(body.size(), ' ');
  std::transform(body.begin(), body.end(), text.begin(), [](std::byte b) {
    const char c = static_cast<char>(b);
    return c >= ' ' && c <= '~' ? c : '?';
  });
  return text;
}

}  // namespace

void require_same_protocol(const WorkerHello& mine, const WorkerHello& theirs,
                           const std::string& peer, const std::string& option) {
  require_protocol(theirs.version == mine.version,
                   "{} speaks version {} of the protocol, and this program version {}: use the "
                   "same version of tandem for both",
                   peer, theirs.version, mine.version);
  const bool has_secret = mine.protection != Protection::kNone;
  require_protocol(
      (theirs.protection != Protection::kNone) == has_secret,
      "{} has {}: give both the same {}, or neither", peer,
      has_secret ? "no secret, and this program one" : "a secret, and this program none", option);
  // The options of a secret and of its encryption have the same beginning.
  const std::string encryption = option.substr(0, option.rfind("-secret")) + "-encryption";
  require_protocol(theirs.protection == mine.protection,
                   "{} {} what it sends, and this program {}: give both the same {}", peer,
                   encrypts(theirs), encrypts(mine), encryption);
}

std::vector<std::byte> bytes_of(const WorkerWelcome& w) {
  check(w.arithmetic.size() <= kMostText && w.gpu_arithmetic.size() <= kMostText, "short texts");
  check(std::ssize(w.experts) == w.n_layers, "experts of every layer");
  check(w.on_gpu.empty() == w.gpu_arithmetic.empty(), "the arithmetic of experts on a GPU");
  const size_t n_experts = w.experts.empty() ? 0 : w.experts[0].size();
  const WelcomeHead head = {.model = w.model,
                            .n_layers = w.n_layers,
                            .n_active = w.n_active,
                            .dim = w.dim,
                            .max_rows = w.max_rows,
                            .takes_bf16 = w.takes_bf16,
                            .n_experts = static_cast<uint32_t>(n_experts),
                            .n_text = static_cast<uint32_t>(w.arithmetic.size()),
                            .is_standby = w.is_standby,
                            .n_gpu_text = static_cast<uint32_t>(w.gpu_arithmetic.size()),
                            .moves_experts = w.moves_experts};
  std::vector<std::byte> body(sizeof head);
  std::memcpy(body.data(), &head, sizeof head);
  for (const std::vector<bool>& of_layer : w.experts) {
    check(of_layer.size() == n_experts, "as many experts of every layer");
    append_flags(of_layer, body);
  }
  append_flags(w.on_gpu, body);
  const std::string texts = w.arithmetic + w.gpu_arithmetic;
  const MessageBytes bytes = std::as_bytes(std::span(texts));
  body.insert(body.end(), bytes.begin(), bytes.end());
  check(body.size() <= kMostWelcomeBytes, "a welcome that its receiver takes");
  return body;
}

WorkerWelcome welcome_from(MessageBytes body) {
  const auto head = value_from<WelcomeHead>(body);
  require_protocol(head.n_layers >= 0 && head.n_layers <= kMostLayers, "experts of {} layers",
                   head.n_layers);
  const uint64_t n_layers = head.n_layers, n_flags = n_layers * head.n_experts,
                 n_on_gpu = head.n_gpu_text > 0 ? head.n_experts : 0;
  require_protocol(
      head.n_text <= kMostText && head.n_gpu_text <= kMostText &&
          sizeof head + n_flags + n_on_gpu + head.n_text + head.n_gpu_text == body.size(),
      "a welcome of {} bytes, with {} experts of {} layers and texts of {} and {} bytes",
      body.size(), head.n_experts, head.n_layers, head.n_text, head.n_gpu_text);
  require_protocol(n_layers > 0 || head.n_experts == 0, "experts of no layer");
  require_protocol(head.max_rows > 0, "a worker that takes {} rows", head.max_rows);
  const MessageBytes flags = body.subspan(sizeof head, n_flags),
                     on_gpu = body.subspan(sizeof head + n_flags, n_on_gpu),
                     texts = body.subspan(sizeof head + n_flags + n_on_gpu);
  WorkerWelcome w = {.model = head.model,
                     .n_layers = head.n_layers,
                     .n_active = head.n_active,
                     .dim = head.dim,
                     .max_rows = head.max_rows,
                     .takes_bf16 = head.takes_bf16 != 0,
                     .is_standby = head.is_standby != 0,
                     .moves_experts = head.moves_experts != 0,
                     .experts = layer_flags_from(flags, n_layers, head.n_experts),
                     .on_gpu = flags_from(on_gpu),
                     .arithmetic = text_from(texts.first(head.n_text)),
                     .gpu_arithmetic = text_from(texts.subspan(head.n_text))};
  for (size_t e = 0; e < w.on_gpu.size(); ++e)
    for (const std::vector<bool>& of_layer : w.experts)
      require_protocol(!w.on_gpu[e] || of_layer[e], "expert {} is on a GPU and not there", e);
  require_protocol(
      w.on_gpu.empty() == w.gpu_arithmetic.empty() && (w.on_gpu.empty() || any({w.on_gpu})),
      "a worker that does not say how its GPU computes, or has no experts there");
  return w;
}

WorkerSetup worker_setup_from(MessageBytes body, int32_t max_rows) {
  const auto setup = value_from<WorkerSetup>(body);
  require_protocol(body.size() == sizeof setup, "a setup of {} bytes", body.size());
  require_protocol(setup.beat_ms > 0 && setup.beat_ms <= kMostBeatMs, "beats of {} ms",
                   setup.beat_ms);
  require_protocol(setup.max_rows > 0 && setup.max_rows <= static_cast<uint32_t>(max_rows),
                   "requests of {} rows, where {} are taken", setup.max_rows, max_rows);
  return setup;
}

std::vector<std::byte> bytes_of(const PathAnswer& answer) {
  const uint32_t is_refused = answer.why_not.empty() ? 0 : 1;
  const std::string why = answer.why_not.substr(0, kMostText);
  const MessageBytes rest = is_refused != 0 ? std::as_bytes(std::span(why)) : answer.address;
  std::vector<std::byte> body(sizeof is_refused + rest.size());
  std::memcpy(body.data(), &is_refused, sizeof is_refused);
  std::copy(rest.begin(), rest.end(), body.begin() + sizeof is_refused);
  check(body.size() <= kMostPathBytes, "an answer that its receiver takes");
  return body;
}

PathAnswer path_answer_from(MessageBytes body) {
  const auto is_refused = value_from<uint32_t>(body);
  const MessageBytes rest = body.subspan(sizeof is_refused);
  require_protocol(is_refused <= 1 && !rest.empty(), "an answer about a path of {} bytes",
                   body.size());
  if (is_refused != 0) return {.address = {}, .why_not = text_from(rest)};
  return {.address = {rest.begin(), rest.end()}, .why_not = {}};
}

std::vector<std::byte> bytes_of(const ExpertsOfLayers& experts) {
  std::vector<std::byte> body;
  for (const std::vector<bool>& of_layer : experts) append_flags(of_layer, body);
  return body;
}

ExpertsOfLayers experts_from(MessageBytes body, size_t n_layers, size_t n_experts) {
  require_protocol(body.size() == n_layers * n_experts, "{} bytes for {} experts of {} layers",
                   body.size(), n_experts, n_layers);
  return layer_flags_from(body, n_layers, n_experts);
}

ExpertsOfLayers load_from(MessageBytes body, size_t n_layers, size_t n_experts) {
  ExpertsOfLayers experts = experts_from(body, n_layers, n_experts);
  require_protocol(any(experts), "no expert is to be loaded");
  return experts;
}

std::vector<std::byte> bytes_of(const LoadAnswer& answer) {
  const std::string text = answer.why.substr(0, kMostText);
  const LoadAnswerHead head = {.state = answer.state,
                               .n_text = static_cast<uint32_t>(text.size()),
                               .bytes_done = answer.bytes_done,
                               .bytes_total = answer.bytes_total};
  std::vector<std::byte> body(sizeof head + text.size());
  std::memcpy(body.data(), &head, sizeof head);
  if (!text.empty()) std::memcpy(body.data() + sizeof head, text.data(), text.size());
  return body;
}

LoadAnswer load_answer_from(MessageBytes body) {
  const auto head = value_from<LoadAnswerHead>(body);
  require_protocol(head.n_text <= kMostText && sizeof head + head.n_text == body.size(),
                   "an answer of {} bytes to a load, with a text of {}", body.size(), head.n_text);
  require_protocol(head.state <= LoadAnswer::State::kRefused, "a load in the unknown state {}",
                   static_cast<uint32_t>(head.state));
  require_protocol(head.bytes_done >= 0 && head.bytes_done <= head.bytes_total,
                   "{} of {} bytes are loaded", head.bytes_done, head.bytes_total);
  return {head.state, head.bytes_done, head.bytes_total, text_from(body.subspan(sizeof head))};
}

int64_t RequestShape::rows_at(int64_t n_rows) const {
  constexpr int64_t kAlignment = 64;
  return round_up(static_cast<int64_t>(sizeof(RequestHead)) + n_rows * n_active * 8, kAlignment);
}

ExpertRequest request_from(MessageBytes body, const RequestShape& shape,
                           const std::vector<bool>& has_experts, const ExpertsOfLayers& experts) {
  const auto head = value_from<RequestHead>(body);
  require_protocol(head.n_rows > 0 && head.n_rows <= shape.max_rows,
                   "a request of {} rows, where {} are taken", head.n_rows, shape.max_rows);
  require_protocol(head.type == RowType::kF32 || head.type == RowType::kBf16,
                   "rows of the unknown type {}", static_cast<int32_t>(head.type));
  require_protocol(std::ssize(body) == shape.bytes(head.n_rows, head.type),
                   "a request of {} bytes for {} rows", body.size(), head.n_rows);
  require_protocol(
      head.layer >= 0 && head.layer < std::ssize(has_experts) && has_experts[head.layer],
      "layer {} has no routed experts", head.layer);
  const std::vector<bool>& here = experts[head.layer];
  const int64_t n_pairs = int64_t{head.n_rows} * shape.n_active;
  const auto* const ids = reinterpret_cast<const int32_t*>(body.data() + sizeof head);
  for (int64_t i = 0; i < n_pairs; ++i)
    require_protocol(ids[i] == -1 || (ids[i] >= 0 && ids[i] < std::ssize(here) && here[ids[i]]),
                     "expert {} is not here", ids[i]);
  return {head, ids, reinterpret_cast<const float*>(ids + n_pairs),
          body.data() + shape.rows_at(head.n_rows)};
}

}  // namespace tandem
