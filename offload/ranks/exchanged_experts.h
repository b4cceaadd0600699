// The pool of a rank whose replica of the backbone has tokens of its own: rows go to the ranks that
// have their experts, and sums come back (expert_exchange.h).
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "model/backbone_share.h"
#include "model/config.h"
#include "offload/ranks/exchange_lane.h"
#include "offload/timeline.h"

namespace tandem {

struct ExchangedParts {
  Group& group;            // of all ranks of the grid
  const HostLayout hosts;  // of these ranks
  const BackboneGrid grid;
  const ExpertOwners& owners;
  const cpu::KernelTable& kernels;
  const ModelConfig& config;
  ExpertPool& mine;                  // has at least this rank's experts, for grid.most_tokens()
  int max_tokens;                    // of a replica in a step
  RowFormats formats;                // of rows and sums; those that are reduced travel as floats
  std::optional<ExchangeMode> mode;  // nothing: for prompts and for decode what is faster here
  int micro_batches = 1;             // of every step, or kMeasured
  Patience patience = {};            // with a rank that is lost
};

// The same on all ranks, which make the same calls in the same order. The ranks of a replica, which
// all have its tokens, send a part of them each and add the sums of these tokens only: the forward
// pass adds up what its ranks have (Ops::all_reduce).
//
// In a step of several micro-batches each of them has a lane, whose rows travel while others are
// computed. Lanes are independent of each other, and within a lane all ranks take turns: rows,
// sums, rows of the next layer.
class ExchangedExperts final : public ExpertPool {
 public:
  // References outlive the object. All ranks construct it together, and throw Error together where
  // the mode needs memory that they do not share.
  explicit ExchangedExperts(const ExchangedParts& parts);
  // Bytes of buffers that a rank of the grid needs at most; the arguments are those of
  // ExchangedParts. Which mode is faster, and in which format rows travel, is not known before.
  static int64_t bytes_for(const ModelConfig& config, BackboneGrid grid, const HostLayout& hosts,
                           int max_tokens, std::optional<ExchangeMode> mode, int micro_batches);
  // "prompts by all-to-all, decode by gather"; between hosts of several ranks "all-to-all (once to
  // each host)" or "all-to-all (to each rank)"; then the formats where they are not exact
  std::string modes() const;

  bool waits(Ticket ticket) override { return lanes_[ticket]->is_apart(); }
  bool serve(Ticket ticket) override;
  void add_to(Ticket ticket, TensorView y) override;
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  int micro_batches(std::span<const Batch>, bool) const override { return p_.micro_batches; }
  bool computes_for_others() const override { return true; }
  std::optional<double> seconds_waited() const override;
  // Starts recording when this rank computes and when its rows travel. The timeline outlives the
  // object.
  void record(Timeline& timeline) { timeline_ = &timeline; }

 private:
  static constexpr int kDecodeTokens = 64;  // of a rank in a step that counts as decode
  void add_lane(int number);
  // Whether a token's experts are added up host by host, which gives other bits.
  bool adds_by_host(ExchangeChoice choice) const;
  // by_host: only of choices that add in this order.
  ExchangeWay way_for(const HostGroups& groups, int max_tokens, std::optional<ExchangeChoice> asked,
                      std::optional<bool> by_host = {});
  std::string name_of(ExchangeChoice choice) const;
  double seconds_of(ExpertExchange& exchange, int n_tokens);
  Ticket start(const ExpertBatch& batch) override;
  void compute(Ticket ticket);
  template <class Call>
  void or_settled(const Call& call);
  void add_span(const char* name, Ticket ticket, double begin);
  void add_travel(const char* name, Ticket ticket);

  const ExchangedParts p_;
  std::vector<std::unique_ptr<Group>> groups_;            // of the lanes; none: there is one lane
  std::vector<std::unique_ptr<HostGroups>> host_groups_;  // of the lanes
  std::vector<std::unique_ptr<ExchangeLane>> lanes_;      // by micro-batch
  std::vector<int64_t> n_tokens_;                         // [ranks] that each sends
  int n_micro_batches_ = 0;                               // of the step
  Timeline* timeline_ = nullptr;
  std::array<int, kMaxTickets> layers_ = {};  // of the tickets
  double left_ = 0;                           // when the backbone was called last
};

}  // namespace tandem
