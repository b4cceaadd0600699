// All backends of a router: which there are, and which one gets a request. Used by the I/O thread
// only; no sockets, no clock.
#pragma once
#include "router/backend.h"
#include "router/request_summary.h"
#include "text/prefix_table.h"

namespace tandem {

class BackendPool {
 public:
  using Pointer = std::shared_ptr<Backend>;
  struct Choice {
    Pointer backend;          // null: there is none
    int64_t known_bytes = 0;  // of the prompt, that its prefix cache is thought to have
  };

  // The backend of this address, which is added if it is new.
  Pointer add(const HttpAddress& address, bool registered, RouterClock::time_point now);
  // Its running requests go on. False: there is no backend of this address.
  bool remove(const std::string& authority);
  // Makes the backends that did not register themselves those of the list.
  void set_listed(const std::vector<HttpAddress>& addresses, RouterClock::time_point now);
  // Removes registered backends that have not answered for so long.
  void forget_lost(RouterClock::time_point now, std::chrono::seconds after);
  // Null: there is none.
  Pointer find(const std::string& authority) const;
  const std::vector<Pointer>& all() const { return all_; }
  // Called with each backend that is added.
  std::function<void(const Pointer&)> on_added = [](const Pointer&) {};

  // Chooses by best_candidate() among the backends that answer, have the model, are not draining
  // and are not in `tried`, and among prefill servers only where there is no other; the choice
  // counts as the one that has the prompt's beginning now.
  Choice choose(const RequestSummary& request, const std::vector<Pointer>& tried,
                RouterClock::time_point now);
  // Whether choose() would find a backend.
  bool has_choice(const RequestSummary& request, const std::vector<Pointer>& tried) const;
  // Whether a backend has the model, even one that does not answer now; true for all models until
  // every backend has been up once.
  bool may_have_model(const std::string& model) const;
  // The backend does not answer: its prefix cache counts as lost.
  void on_down(const Backend& backend) { prefixes_.forget(backend.id); }

  // Measurements: seconds to the first token of a prompt of which no backend had the beginning, and
  // tokens of an answer.
  void add_prompt(double seconds, int64_t prompt_bytes);
  void add_answer(int64_t n_tokens) { answer_tokens_.add(static_cast<double>(n_tokens)); }
  double answer_tokens() const { return answer_tokens_.value().value_or(kUsualTokens); }
  double seconds_per_byte() const { return seconds_per_byte_.value().value_or(kUsualSeconds); }
  size_t prefix_blocks() const { return prefixes_.size(); }

 private:
  static constexpr double kUsualTokens = 100;       // until an answer has been measured
  static constexpr double kUsualSeconds = 20e-6;    // per byte of a prompt, until one was measured
  static constexpr int64_t kMinPromptBytes = 1024;  // of shorter ones other work takes longer

  static bool can_get(const Backend& backend, const RequestSummary& request,
                      const std::vector<Pointer>& tried);

  std::vector<Pointer> all_;
  PrefixTable prefixes_;
  Average answer_tokens_, seconds_per_byte_;
  int next_id_ = 0;
  int64_t n_choices_ = 0;
};

}  // namespace tandem
