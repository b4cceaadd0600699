// Parser states of a text in a grammar: a state represents every way in which the text so far may
// continue. States are created when first reached and cached, so that reaching one again costs a
// look-up.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "text/grammar/grammar.h"

namespace tandem {

// The stacks of open rules form one graph in which equal parts are shared (Tomita 1987), so that a
// state contains each node of the grammar at most once, however ambiguous the grammar is.
class TextStates {
 public:
  using State = int32_t;
  static constexpr State kDead = -1;  // the text is not in the grammar

  // The grammar must be finished and outlive this object.
  explicit TextStates(const Grammar& grammar) : grammar_(grammar) {}

  // The state before the first byte of a text.
  State begin();
  // The state at `node`, which reads next, in a rule whose callers are unknown.
  State at_node(Grammar::Node node);

  State after(State state, uint8_t byte);
  State after_token(State state, int32_t id);

  struct Frame {
    Grammar::Node node;
    int32_t callers;  // index of the set of frames where its rule returns
    bool operator==(const Frame&) const = default;
  };
  // The nodes that read next, each once.
  const std::vector<Frame>& frames(State state) const { return states_[state]->frames; }
  bool may_end(State state) const { return states_[state]->may_end; }
  // For states derived from at_node(): whether the rule may have returned.
  bool returned(State state) const { return states_[state]->returned; }
  // The state after the rule that was called from `callers` returns.
  State after_return(int32_t callers);

  int n_states() const { return static_cast<int>(states_.size()); }

 private:
  using FrameId = int32_t;
  static constexpr FrameId kTextEnd = -1, kUnknown = -2;  // callers that are not frames
  static constexpr State kNotComputed = -2;

  struct StateData {
    std::vector<Frame> frames;
    bool may_end = false, returned = false;
    std::unique_ptr<std::array<State, 256>> after;
  };
  // Frames before epsilon edges, calls and returns are followed: node -> frames of its callers.
  using Pending = std::map<Grammar::Node, std::vector<FrameId>>;

  State state_of(Pending open);
  void follow_returns(Pending& open, StateData& state);
  void follow_calls(const Pending& open, StateData& state);
  int32_t callers_id(std::vector<FrameId> frames);
  FrameId frame_id(const Frame& frame);
  State state_id(StateData state);

  struct Hash {
    size_t operator()(const Frame& frame) const;
    size_t operator()(const std::vector<FrameId>& frames) const;
    size_t operator()(const std::vector<Frame>& frames) const;
  };

  const Grammar& grammar_;
  std::vector<Frame> all_frames_;
  std::unordered_map<Frame, FrameId, Hash> frame_ids_;
  std::vector<std::vector<FrameId>> callers_;
  std::unordered_map<std::vector<FrameId>, int32_t, Hash> callers_ids_;
  std::vector<std::unique_ptr<StateData>> states_;
  std::unordered_multimap<std::vector<Frame>, State, Hash> state_ids_;
  std::unordered_map<int32_t, State> after_return_;
};

}  // namespace tandem
