// The pool of a rank whose replica of the backbone has tokens of its own: rows go to the ranks that
// have their experts, and sums come back (expert_exchange.h).
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "core/memory.h"
#include "model/backbone_share.h"
#include "model/config.h"
#include "offload/ranks/expert_exchange.h"

namespace tandem {

struct ExchangedParts {
  Group& group;  // of all ranks of the grid
  const BackboneGrid grid;
  const ExpertOwners& owners;
  const cpu::KernelTable& kernels;
  const ModelConfig& config;
  ExpertPool& mine;                  // has at least this rank's experts, for grid.most_tokens()
  int max_tokens;                    // of a replica in a step
  RowFormat there;                   // in which rows travel; sums come back as floats
  std::optional<ExchangeMode> mode;  // nothing: for prompts and for decode what is faster here
};

// The same on all ranks, which make the same calls in the same order. The ranks of a replica, which
// all have its tokens, send a part of them each and add the sums of these tokens only: the forward
// pass adds up what its ranks have (Ops::all_reduce).
class ExchangedExperts final : public ExpertPool {
 public:
  // References outlive the object. All ranks construct it together, and throw Error together where
  // the mode needs memory that they do not share.
  explicit ExchangedExperts(const ExchangedParts& parts);
  // "prompts by all-to-all, decode by gather"
  std::string modes() const;

  void add_to(Ticket ticket, TensorView y) override;
  void begin_step(std::span<const Batch> replicas) override;

 private:
  struct Way {
    ExchangeMode mode;
    std::unique_ptr<ExpertExchange> exchange;
  };
  static constexpr int kDecodeTokens = 64;  // of a rank in a step that counts as decode
  Way way_for(int max_tokens);
  double seconds_of(ExpertExchange& exchange, int n_tokens);
  Ticket start(const ExpertBatch& batch) override;

  const ExchangedParts p_;
  Buffer sums_;                        // [rows, dim]
  Way prompts_, decode_;               // no exchange: the prompts' is used for decode too
  ExpertExchange* current_ = nullptr;  // of this step
  std::vector<int64_t> n_tokens_;      // [ranks] that each sends in this step
  int64_t n_rows_ = 0;                 // that this rank computes of the layer
};

}  // namespace tandem
