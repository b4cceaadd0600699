// What the backbones of a standby have asked it to load, and what it answers them. It loads for one
// at a time, in the order in which they asked, and keeps what it has loaded.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "offload/workers/expert_loader.h"
#include "transport/expert_messages.h"

namespace tandem {

class StandbyLoads {
 public:
  // A worker that has these experts. `loader` outlives the object; null: it is no standby.
  StandbyLoads(ExpertsOfLayers experts, ExpertLoader* loader)
      : experts_(std::move(experts)), loader_(loader) {}

  bool is_standby() const { return loader_ != nullptr; }
  const ExpertsOfLayers& experts() const { return experts_; }  // that are computed

  // Backbone `peer` wants these experts. Throws ProtocolError while it waits for others.
  void ask(int peer, ExpertsOfLayers experts);
  void left(int peer);
  // Begins what was asked first, unless a load is under way.
  void begin_next();
  // Whether finish() is to be called: while nothing is computed. It returns one line, which says
  // what was loaded, or why it was not.
  bool has_ended() const;
  std::string finish();
  // What the backbone is to be told now; nothing: it waits for no experts. What is told that is not
  // kLoading ends its wait.
  std::optional<LoadAnswer> answer(int peer) const;
  void told(int peer) { left(peer); }

 private:
  struct Asked {
    int peer;
    ExpertsOfLayers experts;
    std::string refusal;  // empty: it is not refused
  };
  ExpertsOfLayers missing(const Asked& asked) const;

  ExpertsOfLayers experts_;
  ExpertLoader* const loader_;
  std::vector<Asked> asked_;  // in the order in which they came
  ExpertsOfLayers loading_;   // empty: no load is under way
};

}  // namespace tandem
