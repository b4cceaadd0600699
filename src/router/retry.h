// What happens after an attempt to get an answer from a backend. A pure function.
#pragma once

namespace tandem {

// How an attempt ended.
enum class AttemptEnd {
  kAnswered,    // the answer has ended
  kRefused,     // status 429 or 503, nothing of which is sent to the client
  kFailed,      // no connection, or one that ended or sent something that is not a response
  kClientGone,  // the client has disconnected
};

enum class NextStep {
  kDone,           // the client has its answer, or is gone
  kTryAnother,     // the same request to another backend
  kPassRefusalOn,  // the client gets the backend's 429 or 503
  kUnavailable,    // the client gets 503 of the router
  kErrorEvent,     // the stream ends with an error event
  kBreakOff,       // the connection to the client is closed in the middle of the answer
};

struct AttemptState {
  AttemptEnd end = AttemptEnd::kAnswered;
  bool has_sent = false;     // the client has got bytes of this answer
  bool is_stream = false;    // of events
  bool others_left = false;  // there is a backend that was not tried
  bool has_refusal = false;  // this or an earlier attempt was refused by a backend
  int n_attempts = 1;
};

// More backends are not tried: a request that ends them must not end all of them.
constexpr int kMaxAttempts = 4;

// An answer that the client has seen nothing of can come from another backend; of one that has
// begun the client has to be told that it ends.
constexpr NextStep next_step(const AttemptState& s) {
  if (s.end == AttemptEnd::kAnswered || s.end == AttemptEnd::kClientGone) return NextStep::kDone;
  if (s.has_sent) return s.is_stream ? NextStep::kErrorEvent : NextStep::kBreakOff;
  if (s.others_left && s.n_attempts < kMaxAttempts) return NextStep::kTryAnother;
  return s.has_refusal ? NextStep::kPassRefusalOn : NextStep::kUnavailable;
}

}  // namespace tandem
