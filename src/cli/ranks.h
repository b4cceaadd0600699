// The ranks of a command that an MPI launcher started. All of them run the same command; rank 0
// alone writes to standard output and files, and each error is reported once.
#pragma once
#include <memory>
#include <optional>
#include <string>

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

 private:
  std::optional<Launch> launch_;
  std::unique_ptr<Group> world_;
};

// The contents of a file as read_text() reads it; standard input is rank 0's.
std::string read_on_ranks(const Ranks& ranks, const std::string& path);

}  // namespace tandem
