#include "comm/launcher.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

#include "core/check.h"

namespace tandem {
namespace {

// The process in run_ranks(), for its ranks.
constexpr const char* kStarter = "TANDEM_STARTER";
constexpr int kTakesSignals = SIGUSR1;  // from rank 0 to the starter

// What launchers need to know is in variables, which every launcher but its own ignores: no options
// are common to all. Variables that the user has set stay. Names without a note are Open MPI's.
struct Variable {
  const char *name, *value;
};
constexpr Variable kVariables[] = {
    // Ranks divide the cores themselves.
    {"OMPI_MCA_hwloc_base_binding_policy", "none"},
    {"PRTE_MCA_hwloc_default_binding_policy", "none"},  // version 5
    {"I_MPI_PIN", "0"},                                 // Intel MPI
    // A batch system may have reserved fewer slots than this process has cores.
    {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
    {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},  // version 5
    // The ranks have said what is wrong.
    {"OMPI_MCA_orte_execute_quiet", "1"},
};
constexpr Variable kVariablesOfRoot[] = {
    {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
    {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
};

// The signals that run_ranks() handles, blocked while an object exists.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&handled_);
    for (const int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD, kTakesSignals})
      sigaddset(&handled_, s);
    pthread_sigmask(SIG_BLOCK, &handled_, &before_);
  }
  ~BlockedSignals() { restore(); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  void restore() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  siginfo_t next() const {
    siginfo_t info{};
    while (sigwaitinfo(&handled_, &info) < 0) check(errno == EINTR, "a signal is waited for");
    return info;
  }

 private:
  sigset_t handled_, before_;
};

// Two ends of a pipe that no other program inherits.
struct Pipe {
  Pipe() {
    int ends[2];
    require(pipe2(ends, O_CLOEXEC) == 0, "a pipe cannot be opened: {}", std::strerror(errno));
    out = ends[0];
    in = ends[1];
  }
  int out, in;
};

void set_environment(pid_t starter) {
  for (const Variable& v : kVariables) setenv(v.name, v.value, 0);
  if (geteuid() == 0)
    for (const Variable& v : kVariablesOfRoot) setenv(v.name, v.value, 0);
  setenv(kStarter, std::to_string(starter).c_str(), 1);
}

// Becomes the launcher, in a process group of its own, so that Ctrl-C on the terminal does not
// reach it; writes to `failure` why it cannot.
[[noreturn]] void become_launcher(const RanksOfHost& ranks, pid_t starter, int standard_input,
                                  int failure) {
  std::vector<std::string> words = {ranks.launcher, "-n", std::to_string(ranks.n)};
  words.insert(words.end(), ranks.command.begin(), ranks.command.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != starter) std::_Exit(1);  // it was killed before the line above
  if (standard_input >= 0) dup2(standard_input, STDIN_FILENO);
  set_environment(starter);
  execv(ranks.launcher.c_str(), arguments.data());
  const int why = errno;
  if (write(failure, &why, sizeof why) != sizeof why) std::_Exit(1);
  std::_Exit(1);
}

// The launcher cannot read a terminal from its process group.
void copy_terminal(int to) {
  char text[4096];
  ssize_t n;
  while ((n = read(STDIN_FILENO, text, sizeof text)) > 0)
    for (ssize_t at = 0; at < n;) {
      const ssize_t written = write(to, text + at, n - at);
      if (written < 0 && errno != EINTR) return;
      at += std::max<ssize_t>(written, 0);
    }
  close(to);
}

int status_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Passes signals on until the launcher has ended.
int wait_for_launcher(const BlockedSignals& signals, pid_t launcher) {
  pid_t rank_0 = 0;
  while (true) {
    const siginfo_t signal = signals.next();
    int status = 0;
    if (signal.si_signo == kTakesSignals)
      rank_0 = signal.si_pid;
    else if (signal.si_signo != SIGCHLD && (rank_0 == 0 || kill(rank_0, signal.si_signo) != 0))
      kill(launcher, signal.si_signo);
    else if (signal.si_signo == SIGCHLD && waitpid(launcher, &status, WNOHANG) == launcher)
      return status_of(status);
  }
}

}  // namespace

std::string find_launcher(std::string_view path) {
  for (const char* const name : {"mpirun", "mpiexec"})
    for (size_t at = 0; at <= path.size();) {
      const size_t end = std::min(path.find(':', at), path.size());
      const std::string program = std::string(path.substr(at, end - at)) + "/" + name;
      std::error_code ignored;
      if (end > at && std::filesystem::is_regular_file(program, ignored) &&
          access(program.c_str(), X_OK) == 0)
        return program;
      at = end + 1;
    }
  return {};
}

int run_ranks(const RanksOfHost& ranks) {
  const BlockedSignals signals;
  const Pipe failure;
  std::optional<Pipe> input;
  if (isatty(STDIN_FILENO)) input.emplace();
  const pid_t starter = getpid(), launcher = fork();
  require(launcher >= 0, "a process cannot be started: {}", std::strerror(errno));
  if (launcher == 0) {
    signals.restore();
    become_launcher(ranks, starter, input ? input->out : -1, failure.in);
  }
  close(failure.in);
  int why = 0;
  if (read(failure.out, &why, sizeof why) == sizeof why) {
    waitpid(launcher, nullptr, 0);
    fail("{} cannot be started: {}", ranks.launcher, std::strerror(why));
  }
  if (input) {
    close(input->out);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTTIN, SIG_IGN);  // in the background reading fails instead
    std::thread(copy_terminal, input->in).detach();
  }
  return wait_for_launcher(signals, launcher);
}

void take_signals_of_starter() {
  const char* const text = std::getenv(kStarter);
  pid_t starter = 0;
  if (text) std::from_chars(text, text + std::strlen(text), starter);
  if (starter > 0) kill(starter, kTakesSignals);
}

}  // namespace tandem
