// The ranks of a command that an MPI launcher started, or this program for --ranks. All of them run
// the same command; rank 0 alone writes to standard output and files, and each error is reported
// once.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/heartbeat.h"
#include "comm/launch.h"
#include "comm/launcher.h"
#include "comm/mpi/mpi_collectives.h"
#include "loader/model_options.h"

namespace tandem {

// The number of ranks that --ranks or a placement asks for, and which of them does; 0: neither.
struct AskedRanks {
  int n = 0;
  std::string by;  // "--ranks 2" or "--dp 2", for messages
};
// --dp, --tp and --pp ask for ranks, and a placement does where the CPUs of several hosts or
// several GPUs have the backbone, unless a launcher has started some. A placement that cannot be
// read asks for none: it is reported when the model is loaded.
AskedRanks asked_ranks(std::optional<int> option, const ModelOptions& model, bool launched);

class CommandRanks {
 public:
  // Throws Error where the launcher's environment makes no sense.
  CommandRanks();
  // Whether this process reports errors that all ranks have alike, such as wrong options.
  bool reports() const { return !launch_ || launch_->rank == 0; }
  bool launched() const { return launch_.has_value(); }
  bool alone() const { return !launch_ || launch_->size == 1; }
  // The ranks that this process has to start on this host, for run_ranks(). Nothing: it is one of
  // them already, or they are fewer than 2. Throws Error for a number that the launcher did not
  // start, or that cannot be started here.
  std::optional<RanksOfHost> to_start(const AskedRanks& asked, int argc, char** argv) const;
  // Opens MPI; nothing for a process that was started alone. Throws Error when there is no MPI or
  // the ranks were started with different arguments, RunError when one does not answer.
  Ranks open(int argc, char** argv);
  // MPI's own calls of the ranks that open() has opened.
  std::unique_ptr<RawCollectives> raw_collectives() const {
    return open_mpi_collectives(launch_->libraries);
  }
  // Runs a command that makes the same calls on all ranks. Returns its exit status.
  int run_alike(const std::function<int()>& command);
  // Runs a command on all ranks; rank 0 leads, and the others follow() it. Returns its exit status.
  int run(const std::function<int()>& command);

 private:
  std::optional<Launch> launch_;
  std::unique_ptr<Group> world_;
  std::unique_ptr<Heartbeat> heartbeat_;  // until the first step, or the end where it goes on
  std::unique_ptr<StepChannel> steps_;
};

// Whether a terminal on standard output is the user's: a launcher may give its ranks another one.
inline bool may_write_to_terminal(const Ranks& ranks) { return !ranks.group; }

// What a command does where ranks.follow(): loads the models that it loads on rank 0, in the same
// order, and repeats the steps of rank 0 until that has ended. Returns 0.
int follow(const std::vector<ModelOptions>& models);

}  // namespace tandem
