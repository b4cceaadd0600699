// Ranks of this host that a process starts by itself: by the MPI launcher that is installed, with
// its own program and arguments. The process stays, so that signals reach rank 0 and not the
// launcher, which would kill all ranks a second later.
#pragma once
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct RanksOfHost {
  std::string launcher;              // a program, as find_launcher() returns it
  int n;                             // ranks
  std::vector<std::string> command;  // of every rank: program and arguments
  // A launcher that has not ended so long after its last rank is killed: Open MPI's may wait
  // without end for a lock of its own when a rank was lost before MPI had begun.
  std::chrono::milliseconds launcher_patience{10'000};
};

// mpirun or mpiexec in the folders of `path`, the value of PATH; empty: there is none.
std::string find_launcher(std::string_view path);

struct EndOfRanks {
  // That the launcher gives; 128 and the number of the signal where one ended it. Of a launcher
  // that had to be killed: 1 where a rank has failed or is lost, otherwise 0.
  int status;
  // Which rank was the first to end without announcing it, because it was killed or has crashed;
  // empty: none was, one had failed before, or a signal has asked all to end.
  std::string error;
};
// Starts the ranks and waits for them. Until then SIGINT, SIGTERM, SIGHUP and SIGQUIT go to rank 0,
// or to the launcher before rank 0 has called announce_rank(). The launcher is told to end when
// this process is killed. Throws Error where it cannot be started. Must be called before the
// process has other threads.
EndOfRanks run_ranks(const RanksOfHost& ranks);

// Tells the process in run_ranks(), if there is one, that this process is the rank, and when it
// exits that it ends by itself. Signals are passed on to rank 0 from now on.
void announce_rank(int rank);
// Tells it that this rank will end by itself with this status. Where that is not 0 the launcher
// ends the other ranks, of which none is lost then.
void announce_end(int status);
// std::_Exit(), announced as well: for a rank whose other threads cannot end.
[[noreturn]] void end_rank(int status);

}  // namespace tandem
