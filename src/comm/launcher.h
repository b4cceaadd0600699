// Ranks of this host that a process starts by itself: by the MPI launcher that is installed, with
// its own program and arguments. The process stays, so that signals reach rank 0 and not the
// launcher, which would kill all ranks a second later.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct RanksOfHost {
  std::string launcher;              // a program, as find_launcher() returns it
  int n;                             // ranks
  std::vector<std::string> command;  // of every rank: program and arguments
};

// mpirun or mpiexec in the folders of `path`, the value of PATH; empty: there is none.
std::string find_launcher(std::string_view path);

// Starts the ranks, waits for them and returns the exit status that the launcher gives; 128 and the
// number of the signal where one ended the launcher. Until then SIGINT, SIGTERM, SIGHUP and SIGQUIT
// go to rank 0, or to the launcher before rank 0 has called take_signals_of_starter(). The launcher
// is told to end when this process is killed. Throws Error where it cannot be started. Must be
// called before the process has other threads.
int run_ranks(const RanksOfHost& ranks);

// On rank 0: the process in run_ranks(), if there is one, sends its signals here from now on.
void take_signals_of_starter();

}  // namespace tandem
