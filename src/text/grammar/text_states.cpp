#include "text/grammar/text_states.h"

#include <algorithm>

namespace tandem {
namespace {

size_t mix_hash(size_t hash, size_t value) {
  return (hash ^ value) * 0x9e3779b97f4a7c15 + (hash >> 29);
}

// Merges `from` into an ascending list without duplicates.
void add(std::vector<int32_t>& to, const std::vector<int32_t>& from) {
  to.insert(to.end(), from.begin(), from.end());
  std::sort(to.begin(), to.end());
  to.erase(std::unique(to.begin(), to.end()), to.end());
}

}  // namespace

TextStates::State TextStates::begin() {
  return state_of({{grammar_.start(grammar_.root()), {kTextEnd}}});
}

TextStates::State TextStates::at_node(Grammar::Node node) {
  StateData state;
  state.frames.push_back({node, callers_id({kUnknown})});
  return state_id(std::move(state));
}

TextStates::State TextStates::after(State from, uint8_t byte) {
  auto& known = states_[from]->after;
  if (!known) {
    known = std::make_unique<std::array<State, 256>>();
    known->fill(kNotComputed);
  }
  if ((*known)[byte] != kNotComputed) return (*known)[byte];
  Pending open;
  for (const Frame& frame : states_[from]->frames)
    for (const Grammar::ByteEdge& edge : grammar_.byte_edges(frame.node))
      if (edge.first <= byte && byte <= edge.last) add(open[edge.to], callers_[frame.callers]);
  const State to = state_of(std::move(open));
  (*states_[from]->after)[byte] = to;
  return to;
}

TextStates::State TextStates::after_token(State from, int32_t id) {
  Pending open;
  for (const Frame& frame : states_[from]->frames)
    for (const Grammar::TokenEdge& edge : grammar_.token_edges(frame.node))
      if (edge.id == id) add(open[edge.to], callers_[frame.callers]);
  return state_of(std::move(open));
}

TextStates::State TextStates::after_return(int32_t callers) {
  const auto known = after_return_.find(callers);
  if (known != after_return_.end()) return known->second;
  Pending open;
  bool may_end = false;
  for (const FrameId id : callers_[callers]) {
    if (id < 0) {
      may_end = may_end || id == kTextEnd;
    } else {
      add(open[all_frames_[id].node], callers_[all_frames_[id].callers]);
    }
  }
  StateData state;
  state.may_end = may_end;
  follow_returns(open, state);
  follow_calls(open, state);
  const State to = state_id(std::move(state));
  after_return_.emplace(callers, to);
  return to;
}

TextStates::State TextStates::state_of(Pending open) {
  if (open.empty()) return kDead;
  StateData state;
  follow_returns(open, state);
  follow_calls(open, state);
  return state_id(std::move(state));
}

// Rules that may end continue at the nodes after their calls.
void TextStates::follow_returns(Pending& open, StateData& state) {
  std::vector<Grammar::Node> changed;
  for (const auto& [node, callers] : open) changed.push_back(node);
  while (!changed.empty()) {
    const Grammar::Node node = changed.back();
    changed.pop_back();
    if (!grammar_.closure(node).ends) continue;
    for (const FrameId id : std::vector<FrameId>(open[node])) {
      if (id < 0) {
        (id == kTextEnd ? state.may_end : state.returned) = true;
        continue;
      }
      std::vector<FrameId>& callers = open[all_frames_[id].node];
      const size_t n = callers.size();
      add(callers, callers_[all_frames_[id].callers]);
      if (callers.size() > n) changed.push_back(all_frames_[id].node);
    }
  }
}

void TextStates::follow_calls(const Pending& open, StateData& state) {
  Pending readers;
  std::map<Grammar::Rule, Pending> called;  // called rule -> frames to which it returns
  const auto expand = [&](Grammar::Node node, const std::vector<FrameId>& callers) {
    const Grammar::Closure& closure = grammar_.closure(node);
    for (const Grammar::Node reader : closure.readers) add(readers[reader], callers);
    for (const Grammar::Call& call : closure.calls) add(called[call.rule][call.return_to], callers);
  };
  for (const auto& [node, callers] : open) expand(node, callers);
  while (!called.empty()) {
    const auto first = std::min_element(called.begin(), called.end(), [&](auto& a, auto& b) {
      return grammar_.call_order(a.first) < grammar_.call_order(b.first);
    });
    std::vector<FrameId> callers;
    for (const auto& [node, outer] : first->second)
      callers.push_back(frame_id({node, callers_id(outer)}));
    std::sort(callers.begin(), callers.end());
    const Grammar::Rule rule = first->first;
    called.erase(first);
    expand(grammar_.start(rule), callers);
  }
  for (auto& [node, callers] : readers)
    state.frames.push_back({node, callers_id(std::move(callers))});
}

int32_t TextStates::callers_id(std::vector<FrameId> frames) {
  const auto [it, is_new] = callers_ids_.emplace(frames, static_cast<int32_t>(callers_.size()));
  if (is_new) callers_.push_back(std::move(frames));
  return it->second;
}

TextStates::FrameId TextStates::frame_id(const Frame& frame) {
  const auto [it, is_new] = frame_ids_.emplace(frame, static_cast<FrameId>(all_frames_.size()));
  if (is_new) all_frames_.push_back(frame);
  return it->second;
}

TextStates::State TextStates::state_id(StateData state) {
  const auto [first, last] = state_ids_.equal_range(state.frames);
  for (auto it = first; it != last; ++it) {
    const StateData& known = *states_[it->second];
    if (known.may_end == state.may_end && known.returned == state.returned) return it->second;
  }
  const State id = n_states();
  state_ids_.emplace(state.frames, id);
  states_.push_back(std::make_unique<StateData>(std::move(state)));
  return id;
}

size_t TextStates::Hash::operator()(const Frame& frame) const {
  return mix_hash(static_cast<size_t>(frame.node), static_cast<size_t>(frame.callers));
}

size_t TextStates::Hash::operator()(const std::vector<FrameId>& frames) const {
  size_t hash = frames.size();
  for (const FrameId id : frames) hash = mix_hash(hash, static_cast<size_t>(id));
  return hash;
}

size_t TextStates::Hash::operator()(const std::vector<Frame>& frames) const {
  size_t hash = frames.size();
  for (const Frame& frame : frames) hash = mix_hash(hash, (*this)(frame));
  return hash;
}

}  // namespace tandem
