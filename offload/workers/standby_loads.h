// What the backbones of a worker have asked it to load, which of its experts each uses, and what it
// answers them. It loads for one at a time, in the order in which they asked. A standby keeps what
// it has loaded. A worker whose experts move gives the memory of an expert to others once a
// backbone has given it away and no other one that is connected uses it; where a load needs more
// room, those make it that no backbone which is connected uses.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "offload/workers/expert_loader.h"
#include "transport/expert_messages.h"

namespace tandem {

class StandbyLoads {
 public:
  // A worker that has these experts. `loader` outlives the object; null: it loads none. moves: the
  // experts of the worker move.
  StandbyLoads(ExpertsOfLayers experts, ExpertLoader* loader, bool moves = false)
      : experts_(std::move(experts)), loader_(loader), moves_(moves) {}

  bool loads() const { return loader_ != nullptr; }
  bool moves() const { return moves_; }
  const ExpertsOfLayers& experts() const { return experts_; }  // that are computed

  // Backbone `peer` wants these experts. Throws ProtocolError while it waits for others.
  void ask(int peer, ExpertsOfLayers experts);
  // It is connected from now on, and uses all that there is until it says otherwise by uses(),
  // which throws ProtocolError for experts that it may not ask for, and for a worker whose experts
  // stay. left() ends both.
  void joined(int peer);
  void uses(int peer, ExpertsOfLayers experts);
  void left(int peer);
  // What the backbone may ask for.
  const ExpertsOfLayers& used_by(int peer) const { return users_.at(peer).experts; }
  // Begins what was asked first, unless a load is under way or drop_unused() is to be called.
  void begin_next();
  // Whether drop_unused() is to be called: while nothing is computed. It returns one line, which
  // says what the worker does not have any more.
  bool has_unused() const;
  std::string drop_unused();
  // Whether finish() is to be called: while nothing is computed. It returns one line, which says
  // what was loaded, or why it was not.
  bool has_ended() const;
  std::string finish();
  // What the backbone is to be told now; nothing: it waits for no experts. What is told that is not
  // kLoading ends its wait.
  std::optional<LoadAnswer> answer(int peer) const;
  void told(int peer);

 private:
  struct Asked {
    int peer;
    ExpertsOfLayers experts;
    std::string refusal;  // empty: it is not refused
    int64_t n_bytes = 0;  // that were loaded for it
  };
  struct User {
    ExpertsOfLayers experts;
    bool has_said = false;  // uses() was called
  };
  const Asked* next() const;
  ExpertsOfLayers unused() const;
  ExpertsOfLayers to_drop() const;
  ExpertsOfLayers missing(const Asked& asked) const;

  ExpertsOfLayers experts_;
  ExpertLoader* const loader_;
  const bool moves_;
  std::map<int, User> users_;      // by the backbone's number
  ExpertsOfLayers given_away_;     // by a backbone, and not dropped yet
  mutable bool may_drop_ = false;  // to_drop() may have changed since it was found empty
  std::vector<Asked> asked_;       // in the order in which they came
  ExpertsOfLayers loading_;        // empty: no load is under way
};

}  // namespace tandem
