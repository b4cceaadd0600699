// What rank 0 tells the other ranks of a model to do next, and how that is written as numbers.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "engine/deepseek.h"
#include "offload/balance/rebalance.h"
#include "ops/device.h"
#include "scheduling/swapping.h"

namespace tandem {

// What is wanted of the logits that the last step of a replica has computed.
struct LogitsWanted {
  std::span<const int32_t> copied = {};  // these rows, ascending, are copied to the host
  std::span<const Draw> draws = {};  // then tokens of these rows are drawn, which overwrites them
};

// The tokens that are drawn: those with a set bit among the first n_tokens.
struct DrawnVocabulary {
  std::span<const uint32_t> allowed = {};
  int32_t n_tokens = 0;
};

struct StepOrder {
  enum class Kind : int32_t {
    kForward,
    kForwardInFlight,
    kDraft,
    kCopyPage,
    kReadPage,
    kWritePage,
    kVocabulary,
    kLogits,
    kExpertUses,
    kLoadExperts,
    kMoveStatus,
    kMoveExperts,
    kKeepExperts,
    kHeartbeat,
    kEnd
  };
  Kind kind;
  int32_t model = 0;
  int32_t module = 0;                            // of kDraft
  HiddenStates states = HiddenStates::kOfModel;  // of kDraft
  int32_t replica = 0;                           // of kCopyPage, kReadPage, kWritePage
  PageCopy copy = {};                            // of kCopyPage
  int32_t page = 0;                              // of kReadPage, kWritePage
  int32_t micro_batches = 1;                     // of kForward, kForwardInFlight
};

struct StepMessage {
  StepOrder order;
  std::span<const Batch> batches = {};         // [replicas] of both, and of kDraft
  std::span<const LogitsWanted> logits = {};   // [replicas] of kLogits
  DrawnVocabulary vocabulary = {};             // of kVocabulary
  std::span<const ExpertChange> changes = {};  // of kLoadExperts
};

// The first number is how many there are.
void write_message(const StepMessage& message, std::vector<int32_t>& numbers);

class StepMessageReader {
 public:
  // The message refers to `numbers`, and to the reader until the next call.
  StepMessage read(std::span<const int32_t> numbers);

 private:
  std::vector<Batch> batches_;
  std::vector<Sequence> sequences_;
  std::vector<LogitsWanted> logits_;
  std::vector<Draw> draws_;
  std::vector<ExpertChange> changes_;
};

}  // namespace tandem
