#include "comm/launcher.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "core/check.h"

namespace tandem {
namespace {

// The process in run_ranks(), for its ranks.
constexpr const char* kStarter = "TANDEM_STARTER";

// A rank keeps a connection to the starter: it sends its number, and before it ends by itself that
// it does, or that it has failed. Messages are numbers.
constexpr int kEnds = -1, kFails = -2;

// The address at which the starter listens, in the namespace of names without files.
struct Address {
  explicit Address(pid_t starter) {
    const std::string name = fmt::format("tandem-starter-{}", starter);
    name.copy(address.sun_path + 1, name.size());
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t bytes;
};

int open_socket(int flags) { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0); }

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

// The signals that run_ranks() handles, blocked while an object exists and read as a file.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&handled_);
    for (const int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD}) sigaddset(&handled_, s);
    pthread_sigmask(SIG_BLOCK, &handled_, &before_);
    file_ = signalfd(-1, &handled_, SFD_CLOEXEC | SFD_NONBLOCK);
    require(file_ >= 0, "signals cannot be read: {}", std::strerror(errno));
  }
  ~BlockedSignals() {
    close(file_);
    restore();
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  void restore() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  int file() const { return file_; }
  // The next signal that has come; nothing: there is none.
  std::optional<signalfd_siginfo> next() const {
    signalfd_siginfo info{};
    if (read(file_, &info, sizeof info) != sizeof info) return {};
    return info;
  }

 private:
  sigset_t handled_, before_;
  int file_ = -1;
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

// The ranks that are connected, and which of them ended first without announcing it. Where one has
// said that it fails, the launcher ends the others, and none counts as lost. Events of the
// kernel come in the order in which connections closed. That of a rank closes before those by which
// the launcher and other ranks learn that it has ended.
class Supervision {
 public:
  Supervision(const BlockedSignals& signals, std::chrono::milliseconds launcher_patience)
      : signals_(signals),
        launcher_patience_(launcher_patience),
        listening_(open_socket(SOCK_NONBLOCK)),
        events_(epoll_create1(EPOLL_CLOEXEC)) {
    const Address address(getpid());
    require(listening_ >= 0 && events_ >= 0 &&
                bind(listening_, address.get(), address.bytes) == 0 && listen(listening_, 64) == 0,
            "ranks cannot be supervised: {}", std::strerror(errno));
    await(signals.file());
    await(listening_);
  }
  ~Supervision() {
    for (const auto& [file, rank] : ranks_) close(file);
    close(listening_);
    close(events_);
  }
  Supervision(const Supervision&) = delete;
  Supervision& operator=(const Supervision&) = delete;

  // Passes signals on until the launcher has ended, and hears what ranks have said until then.
  EndOfRanks run(pid_t launcher) {
    std::array<epoll_event, 64> events{};
    std::optional<int> status;
    bool was_killed = false;
    while (true) {
      const bool may_hang = !was_killed && n_accepted_ > 0 && ranks_.empty();
      const int most_ms = status ? 0 : may_hang ? static_cast<int>(launcher_patience_.count()) : -1;
      const int n = epoll_wait(events_, events.data(), std::ssize(events), most_ms);
      check(n >= 0 || errno == EINTR, "ranks are supervised");
      if (status && n == 0) return {*status, *status != 0 && !asked_to_end_ ? lost_ : ""};
      if (n == 0) was_killed = kill(-launcher, SIGKILL) == 0;
      for (int i = 0; i < n; ++i) {
        const int file = events[i].data.fd;
        if (file == listening_) accept_rank();
        if (ranks_.contains(file)) hear(file);
      }
      while (const auto signal = signals_.next())
        if (signal->ssi_signo != SIGCHLD)
          pass_on(static_cast<int>(signal->ssi_signo), launcher);
        else if (int how = 0; waitpid(launcher, &how, WNOHANG) == launcher)
          status = was_killed       ? one_fails_ || !lost_.empty()
                   : WIFEXITED(how) ? WEXITSTATUS(how)
                                    : 128 + WTERMSIG(how);
    }
  }

 private:
  struct Rank {
    pid_t process;
    int number = -1;  // -1: it has not said
    bool announced_end = false;
  };

  void await(int file) const {
    epoll_event event{.events = EPOLLIN, .data = {.fd = file}};
    check(epoll_ctl(events_, EPOLL_CTL_ADD, file, &event) == 0, "a file is supervised");
  }

  void accept_rank() {
    const int file = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    ucred peer{};
    socklen_t bytes = sizeof peer;
    if (file < 0) return;
    if (getsockopt(file, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.uid != getuid()) {
      close(file);
      return;
    }
    ranks_[file] = {peer.pid};
    ++n_accepted_;
    await(file);
  }

  // Reads what a rank says, up to the end of its connection.
  void hear(int file) {
    Rank& rank = ranks_.at(file);
    int number = 0;
    ssize_t n = 0;
    while ((n = recv(file, &number, sizeof number, 0)) == sizeof number) {
      if (number >= 0) rank.number = number;
      rank.announced_end = rank.announced_end || number < 0;
      one_fails_ = one_fails_ || number == kFails;
    }
    if (n < 0 && errno == EAGAIN) return;
    if (rank.number >= 0 && !rank.announced_end && !one_fails_ && lost_.empty())
      lost_ = fmt::format("rank {} (process {}) was killed or has crashed, and all others end",
                          rank.number, rank.process);
    ranks_.erase(file);
    close(file);
  }

  void pass_on(int signal, pid_t launcher) {
    asked_to_end_ = true;
    for (const auto& [file, rank] : ranks_)
      if (rank.number == 0 && kill(rank.process, signal) == 0) return;
    kill(launcher, signal);
  }

  const BlockedSignals& signals_;
  const std::chrono::milliseconds launcher_patience_;
  const int listening_, events_;
  std::map<int, Rank> ranks_;  // by the file of the connection
  int n_accepted_ = 0;         // connections of ranks so far
  bool asked_to_end_ = false, one_fails_ = false;
  std::string lost_;
};

// The connection of this rank to the starter; -1: there is none. It is global because functions
// that exit() calls have no arguments.
int connection_of_rank = -1;

void tell_starter(int number) {
  if (connection_of_rank >= 0)
    send(connection_of_rank, &number, sizeof number, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

std::string find_launcher(std::string_view path) {
  for (const char* const name : {"mpirun", "mpiexec"})
    for (size_t at = 0; at <= path.size();) {
      const size_t end = std::min(path.find(':', at), path.size());
      std::string program = std::string(path.substr(at, end - at)) + "/" + name;
      std::error_code ignored;
      if (end > at && std::filesystem::is_regular_file(program, ignored) &&
          access(program.c_str(), X_OK) == 0)
        return program;
      at = end + 1;
    }
  return {};
}

EndOfRanks run_ranks(const RanksOfHost& ranks) {
  const BlockedSignals signals;
  Supervision supervision(signals, ranks.launcher_patience);
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
  return supervision.run(launcher);
}

// An MPI that finds a rank lost may call exit() itself.
void announce_rank(int rank) {
  const char* const text = std::getenv(kStarter);
  pid_t starter = 0;
  if (text) std::from_chars(text, text + std::strlen(text), starter);
  if (starter <= 0) return;
  const int connection = open_socket(0);
  const Address address(starter);
  if (connection < 0 || connect(connection, address.get(), address.bytes) != 0) {
    close(connection);
    return;
  }
  // When a process ends, its file with the highest number closes first.
  constexpr int kHigh = 512;
  const int high = fcntl(connection, F_DUPFD_CLOEXEC, kHigh);
  if (high >= 0) close(connection);
  connection_of_rank = high >= 0 ? high : connection;
  tell_starter(rank);
  std::atexit([] { tell_starter(kEnds); });
}

void announce_end(int status) { tell_starter(status == 0 ? kEnds : kFails); }

void end_rank(int status) {
  announce_end(status);
  std::_Exit(status);
}

}  // namespace tandem
