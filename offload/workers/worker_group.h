// The workers of a backbone: links to those that are listed, and which of them own which shard. The
// list may change while answers are computed: a worker that comes is one more owner of shards that
// there are, and one that is not listed any more is left once others own what it has. A standby is
// asked to load a shard whose owners are all lost, and is one of its owners from then on. Experts
// of workers that let them move get other owners: then there are other shards.
#pragma once
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "offload/workers/worker_fit.h"
#include "offload/workers/worker_link.h"
#include "offload/workers/worker_move.h"

namespace tandem {

class WorkerGroup {
 public:
  struct Parts {
    Transport& transport;
    MessageWaiter& changed;  // is woken when a worker is up
    WorkerNeeds needs;
    std::function<void(const std::string&)> warn;  // called with one line
    // How long a worker may be down before a standby loads what it has: it may be back at once.
    Clock::duration grace;
  };
  // Keeps the links [workers] of the start, which must answer `welcomes`.
  WorkerGroup(Parts parts, std::vector<std::unique_ptr<WorkerLink>> links,
              const std::vector<WorkerWelcome>& welcomes);

  // Thread-safe. Connects to workers of the list that there is no link to, and leaves those that
  // are not listed, except the last owner of a shard that is up. Called again from time to time
  // with the same list, it leaves that one when another is up, and asks standbys to load what is
  // lost while no step waits for it. One thread calls it.
  void update(const std::vector<std::string>& listed);
  // Thread-safe.
  bool is_up(const std::string& address) const;
  std::vector<WorkerStatus> status() const;

  // What follows is for the thread that computes steps; the others change none of it.
  // For a step that waits: asks standbys to load what is lost. Workers that have come get the next
  // numbers, and standbys own what they have loaded, also in the middle of a step. Returns whether
  // anything has changed.
  bool take_in();
  // The latest time at which a standby that was asked for the shard got on with it; 0: none was.
  Clock::time_point got_on(const Shard& shard) const;
  // ", standby HOST:PORT (why)" for each that was asked for the shard and has not loaded it.
  std::string text_of_standbys(const Shard& shard) const;
  // Between steps: takes in, and forgets workers that were left, so that others get their numbers.
  void begin_step();
  int size() const { return static_cast<int>(links_.size()); }
  WorkerLink& operator[](int worker) const { return *links_[worker]; }
  // Each keeps an owner, and its experts but for finish_move().
  const std::vector<Shard>& shards() const { return shards_; }
  RowType row_type() const { return needs_.rows; }

  // The workers as they are now, of which a move is planned: number 0 is this process. Thread-safe.
  WorkerHomes homes() const;
  // Is another one once `homes` would be.
  std::vector<int64_t> version_of_homes() const;
  // Between steps: workers load what a wave of changes brings to them; the ranks of the changes are
  // numbers of `homes`. What they load is used from finish_move() on, which returns an error, and
  // changes nothing, if one of them is not there any more; empty: the changes hold.
  void begin_move(const WorkerHomes& homes, std::span<const ExpertChange> changes);
  WorkerMoveState move_state() const;
  std::string finish_move();
  // What is loaded for the move is not wanted: workers give it away.
  void give_up_move();

 private:
  std::vector<WorkerLink*> present() const;
  WorkerLink* link_to(const std::string& address) const;
  void leave_unless_needed(WorkerLink& link);
  std::vector<int> experts_of_no_other(const WorkerLink& link) const;
  void ask_standbys();
  std::vector<int> lost_shards(const std::vector<WorkerLink*>& all) const;
  bool take_in_newcomers();
  void set_owners();
  void divide_again();
  WorkerMoveState state_of_move() const;
  void require_newcomer_fits(const WorkerWelcome& worker) const;

  const Parts p_;
  int64_t n_changes_ = 0;
  WorkerMove move_;
  mutable std::mutex mutex_;  // guards what follows
  // The thread of steps changes these three, with the mutex but for the shards.
  WorkerNeeds needs_;  // the owners of its shards are not kept
  std::vector<Shard> shards_;
  std::vector<std::unique_ptr<WorkerLink>> links_;

  std::vector<std::unique_ptr<WorkerLink>> newcomers_;  // not taken in yet
  std::vector<std::unique_ptr<WorkerLink>> forgotten_;  // update() ends them: that takes time
  std::set<std::string> kept_;  // not listed, and the last owners of a shard
};

}  // namespace tandem
