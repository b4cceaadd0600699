// The ranks of a command that an MPI launcher started. All of them run the same command; rank 0
// alone writes to standard output and files, and each error is reported once.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/group.h"
#include "comm/launch.h"
#include "loader/model_options.h"

namespace tandem {

class CommandRanks {
 public:
  // Throws Error where the launcher's environment makes no sense.
  CommandRanks();
  // Whether this process reports errors that all ranks have alike, such as wrong options.
  bool reports() const { return !launch_ || launch_->rank == 0; }
  bool alone() const { return !launch_ || launch_->size == 1; }
  // Opens MPI; nothing for a process that was started alone. Throws Error when there is no MPI or
  // the ranks were started with different arguments, RunError when one does not answer.
  Ranks open(int argc, char** argv);
  // Runs a command on all ranks; rank 0 leads, and the others follow() it. Returns its exit status.
  int run(const std::function<int()>& command);

 private:
  std::optional<Launch> launch_;
  std::unique_ptr<Group> world_;
  std::unique_ptr<StepChannel> steps_;
};

// Whether a terminal on standard output is the user's: a launcher may give its ranks another one.
inline bool may_write_to_terminal(const Ranks& ranks) { return !ranks.group; }

// What a command does where ranks.follow(): loads the models that it loads on rank 0, in the same
// order, and repeats the steps of rank 0 until that has ended. Returns 0.
int follow(const std::vector<ModelOptions>& models);

}  // namespace tandem
