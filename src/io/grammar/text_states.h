// The states that a text in a grammar goes through: every way in which what was read so far may go
// on. Found as they are met, and kept: a state met again costs a look-up.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "io/grammar/grammar.h"

namespace tandem {

// The stacks of open rules are one graph whose equal parts are shared (Tomita 1987), so that a
// state holds each node of the grammar once, however ambiguous the grammar is.
class TextStates {
 public:
  using State = int32_t;
  static constexpr State kDead = -1;  // the text is not in the grammar

  // The grammar, finished, outlives it.
  explicit TextStates(const Grammar& grammar) : grammar_(grammar) {}

  // Before the first byte of the whole text.
  State begin();
  // At `node`, which reads what comes next, in a rule whose callers are not known.
  State at_reader(Grammar::Node node);

  State after(State state, uint8_t byte);
  State after_token(State state, int32_t id);

  struct Frame {
    Grammar::Node node;
    int32_t callers;  // index of the set of frames where its rule returns
    bool operator==(const Frame&) const = default;
  };
  // Nodes that read what comes next, each once.
  const std::vector<Frame>& frames(State state) const { return states_[state]->frames; }
  bool may_end(State state) const { return states_[state]->may_end; }
  // Of states from at_reader(): the rule may have returned.
  bool returned(State state) const { return states_[state]->returned; }
  // What follows when the rule that `callers` called returns.
  State back(int32_t callers);

  int n_states() const { return static_cast<int>(states_.size()); }

 private:
  using FrameId = int32_t;
  static constexpr FrameId kTextEnd = -1, kUnknown = -2;  // callers that are no frames
  static constexpr State kNotYet = -2;

  struct StateData {
    std::vector<Frame> frames;
    bool may_end = false, returned = false;
    std::unique_ptr<std::array<State, 256>> after;
  };
  // Frames whose nodes may skip, call and end.
  using Open = std::map<Grammar::Node, std::vector<FrameId>>;

  State state_of(Open open);
  void follow_returns(Open& open, StateData& state);
  void follow_calls(const Open& open, StateData& state);
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
  std::unordered_map<int32_t, State> back_;
};

}  // namespace tandem
