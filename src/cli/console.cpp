#include "cli/console.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <limits>

#include "io/json.h"
#include "io/load_jobs.h"
#include "scheduling/stop_text.h"

namespace tandem {
namespace {

constexpr std::string_view kEndOfThinking = "</think>";
constexpr const char *kDim = "\033[2m", *kPlain = "\033[0m", *kEraseLine = "\r\033[K";

// Replaces the line of progress.

// What the signal handler changes. The event wakes a thread that waits for input.
std::atomic<bool> interrupted{false};
int wakes = -1;  // eventfd

}  // namespace

Interrupt::Interrupt() {
  struct sigaction action {};
  if (wakes < 0) wakes = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  action.sa_handler = [](int) {
    const int error = errno;
    interrupted = true;
    eventfd_write(wakes, 1);
    errno = error;
  };
  sigaction(SIGINT, &action, nullptr);  // no SA_RESTART: a read from the terminal returns
}

Interrupt::~Interrupt() { signal(SIGINT, SIG_DFL); }

bool Interrupt::pending() { return interrupted; }

void Interrupt::clear() {
  interrupted = false;
  eventfd_t ignored = 0;
  eventfd_read(wakes, &ignored);
}

bool Interrupt::wait_for_input() {
  struct pollfd files[] = {{STDIN_FILENO, POLLIN, 0}, {wakes, POLLIN, 0}};
  while (!interrupted && poll(files, 2, -1) < 0 && errno == EINTR) {
  }
  return !interrupted;
}

void show_progress(const std::string& line) {
  std::fprintf(stderr, "%s%s", kEraseLine, line.c_str());
  std::fflush(stderr);
}

LoadProgress load_progress(bool quiet, const std::string& what) {
  if (quiet || !isatty(STDERR_FILENO)) return {};
  return [what](int64_t done, int64_t total, double seconds) {
    show_progress(done == total ? "" : progress_line(done, total, seconds, what));
  };
}

void show_prefill(int64_t done, int64_t total) {
  if (!isatty(STDERR_FILENO) || total <= kStepTokens) return;
  show_progress(done == total ? "" : fmt::format("prompt {} of {} tokens", done, total));
}

void show_measuring(double done, double of) {
  if (!isatty(STDERR_FILENO)) return;
  show_progress(done >= of ? "" : fmt::format("measured {:.0f} of {:.0f} s", done, of));
}

AnswerPrinter::AnswerPrinter(bool starts_thinking)
    : colours_(isatty(STDOUT_FILENO)), thinking_(starts_thinking) {
  if (thinking_ && colours_) std::fputs(kDim, stdout);
}

void AnswerPrinter::print(std::string_view text) {
  if (text.empty()) return;
  last_ = text.back();
  if (!thinking_ || !colours_) return write(text);
  held_ += text;
  const size_t end = held_.find(kEndOfThinking);
  if (end == std::string::npos) {
    const size_t keep = partial_match_length(held_, kEndOfThinking);
    write(std::string_view(held_).substr(0, held_.size() - keep));
    held_.erase(0, held_.size() - keep);
    return;
  }
  write(std::string_view(held_).substr(0, end + kEndOfThinking.size()));
  thinking_ = false;
  std::fputs(kPlain, stdout);
  write(std::string_view(held_).substr(end + kEndOfThinking.size()));
  held_.clear();
}

void AnswerPrinter::finish() {
  write(held_);
  held_.clear();
  if (thinking_ && colours_) std::fputs(kPlain, stdout);
  if (last_ != '\n') write("\n");
}

void AnswerPrinter::write(std::string_view text) {
  const bool written =
      std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  require(written, "standard output cannot be written (a full disk or a closed pipe)");
}

std::string read_text(const std::string& path) {
  if (path == "-") return {std::istreambuf_iterator<char>(std::cin), {}};
  return read_text_file(path, std::numeric_limits<int64_t>::max());
}

}  // namespace tandem
