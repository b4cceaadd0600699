// The terminal: progress lines, dimmed thinking, Ctrl-C. None of it is written to a file or a pipe.
#pragma once
#include <string>
#include <string_view>

#include "loader/loaded_model.h"

namespace tandem {

// While an object exists, Ctrl-C sets a flag instead of ending the program.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  static bool pending();
  static void clear();
  // Waits until standard input, a terminal, can be read. Returns false once Ctrl-C has been pressed
  // after clear(), also if that was before this call or if another thread received the signal.
  static bool wait_for_input();
};

// Replaces the progress line on standard error, which must be a terminal; "" erases it.
void show_progress(const std::string& line);

// Progress of loading (or of `what`) on standard error, if that is a terminal and `quiet` is false.
LoadProgress load_progress(bool quiet, const std::string& what = "loading");

// Shows how much of a long prompt is computed; the line is erased at the end.
void show_prefill(int64_t done, int64_t total);

// Shows how much of a measurement is done; the line is erased at its end.
void show_measuring(double done_seconds, double of_seconds);

// Writes an answer as it arrives. Text before </think> is dimmed if standard output is a terminal.
class AnswerPrinter {
 public:
  explicit AnswerPrinter(bool starts_thinking);
  void print(std::string_view text);
  void finish();  // ends the last line; throws Error if writing fails

 private:
  void write(std::string_view text);

  const bool colours_;
  bool thinking_;
  std::string held_;  // possible beginning of </think>
  char last_ = '\n';
};

// The contents of a file, or of standard input for "-". Throws Error when it cannot be read.
std::string read_text(const std::string& path);

}  // namespace tandem
