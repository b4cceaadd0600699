// Arbitrary bytes in pieces of any length, as from a backbone or a worker, are refused, or are
// messages whose content is what it says. Input: a byte for the lengths of the pieces, the bytes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/memory.h"
#include "tests/kept_messages.h"
#include "transport/expert_messages.h"

namespace {

using namespace tandem;

constexpr RequestShape kShape = {.n_active = 2, .dim = 32, .max_rows = 4};
const std::vector<bool> kLayers = {false, true}, kExperts = {true, false, true, true};
const ExpertsOfLayers kHere = {std::vector<bool>(4, true), kExperts};

bool is_printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// Takes the messages of both sides.
class Sink final : public MessageSink {
 public:
  std::span<std::byte> place(const MessageHeader& header) override {
    const auto most = [&](uint64_t n_bytes) {
      if (header.n_bytes > n_bytes) throw ProtocolError("too long");
    };
    switch (header.kind) {
      case MessageKind::kHello:
        most(sizeof(WorkerHello));
        break;
      case MessageKind::kWelcome:
        most(kMostWelcomeBytes);
        break;
      case MessageKind::kPath:
        most(kMostPathBytes);
        break;
      default:
        most(static_cast<uint64_t>(kShape.bytes(kShape.max_rows, RowType::kF32)));
    }
    check(header.n_bytes <= static_cast<uint64_t>(memory_.bytes()), "bounded");
    return memory_.span().first(header.n_bytes);
  }

  void arrived(const MessageHeader& header) override {
    const MessageBytes body = memory_.span().first(header.n_bytes);
    if (header.kind == MessageKind::kHello && body.size() == sizeof(WorkerHello)) {
      WorkerHello hello;
      std::memcpy(&hello, body.data(), sizeof hello);
      require_same_protocol({}, hello, "a peer", "--secret");
      check(hello.version == kProtocolVersion && hello.protection == Protection::kNone,
            "the same protocol");
    }
    if (header.kind == MessageKind::kWelcome) {
      const WorkerWelcome welcome = welcome_from(body);
      check(welcome_from(bytes_of(welcome)) == welcome, "the same again");
      check(is_printable(welcome.arithmetic) && is_printable(welcome.gpu_arithmetic), "printable");
    }
    if (header.kind == MessageKind::kPath) {
      const PathAnswer answer = path_answer_from(body);
      check(path_answer_from(bytes_of(answer)) == answer || answer.why_not.size() > 1000,
            "the same again");
      check(is_printable(answer.why_not), "printable");
    }
    if (header.kind == MessageKind::kSetup) {
      const WorkerSetup setup = worker_setup_from(body, kShape.max_rows);
      check(setup.max_rows >= 1 && setup.max_rows <= 4 && setup.beat_ms >= 1, "in its bounds");
    }
    if (header.kind == MessageKind::kLoad) {
      const ExpertsOfLayers experts = load_from(body, kHere.size(), kExperts.size());
      check(std::any_of(
                experts.begin(), experts.end(),
                [](const auto& layer) { return std::count(layer.begin(), layer.end(), true) > 0; }),
            "some are wanted");
      const std::vector<std::byte> again = bytes_of(experts);
      check(std::equal(again.begin(), again.end(), body.begin(), body.end()), "the same again");
    }
    if (header.kind == MessageKind::kUses) {
      const ExpertsOfLayers experts = experts_from(body, kHere.size(), kExperts.size());
      const std::vector<std::byte> again = bytes_of(experts);
      check(std::equal(again.begin(), again.end(), body.begin(), body.end()), "the same again");
    }
    if (header.kind == MessageKind::kLoading) {
      const LoadAnswer answer = load_answer_from(body);
      check(load_answer_from(bytes_of(answer)) == answer, "the same again");
      check(bytes_of(answer).size() <= kMostLoadAnswerBytes, "bounded");
      check(answer.bytes_done >= 0 && answer.bytes_done <= answer.bytes_total, "in its bounds");
      check(is_printable(answer.why), "printable");
    }
    if (header.kind == MessageKind::kRequest) {
      const ExpertRequest r = request_from(body, kShape, kLayers, kHere);
      check(r.head.layer == 1 && r.head.n_rows >= 1 && r.head.n_rows <= 4, "in its bounds");
      for (int i = 0; i < r.head.n_rows * 2; ++i)
        check(r.ids[i] == -1 || kExperts.at(r.ids[i]), "an expert that is here");
      const std::byte* const end = r.rows + r.head.n_rows * 32 * bytes_of(r.head.type);
      check(r.rows > body.data() && end == body.data() + body.size(), "rows within the body");
    }
  }

 private:
  Buffer memory_{int64_t{kMostWelcomeBytes}};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t most = std::max<size_t>(1, data[0]);
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  static Sink sink;
  MessageReader reader;
  try {
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = give(reader, bytes.subspan(at, std::min(most, bytes.size() - at)));
      check(n > 0, "room for a byte");
      at += n;
      reader.received(n, sink);
      if (reader.has_header()) reader.begin(sink);
    }
  } catch (const ProtocolError& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
  }
  return 0;
}
