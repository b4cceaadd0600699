// What is written to a terminal: progress lines that are erased at their end, and answers whose
// thinking is dimmed however their text is cut; and that none of it goes to a pipe.
#include "cli/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <csignal>

#include "cli/command_options.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

// Standard output or standard error is a terminal, or else a pipe, while this lives.
class Captured {
 public:
  Captured(int stream, bool terminal) : stream_(stream), saved_(dup(stream)) {
    int ends[2];
    if (terminal) {
      termios raw{};
      cfmakeraw(&raw);
      EXPECT_EQ(openpty(&ends[0], &ends[1], nullptr, &raw, nullptr), 0);
    } else {
      EXPECT_EQ(pipe(ends), 0);
    }
    flush();
    dup2(ends[1], stream);
    close(ends[1]);
    from_ = ends[0];
  }
  ~Captured() {
    restore();
    close(from_);
    close(saved_);
  }
  // All that was written.
  std::string text() {
    flush();
    restore();
    std::string all;
    char bytes[4096];
    for (ssize_t n; (n = read(from_, bytes, sizeof(bytes))) > 0;)
      all.append(bytes, static_cast<size_t>(n));
    return all;
  }

 private:
  void flush() const { std::fflush(stream_ == 1 ? stdout : stderr); }
  void restore() const { dup2(saved_, stream_); }
  const int stream_, saved_;
  int from_ = -1;
};

std::string output_of(const std::function<void()>& write, int stream = 2, bool terminal = true) {
  Captured captured(stream, terminal);
  write();
  return captured.text();
}

const std::string kErase = "\r\033[K";

TEST(Console, ProgressEndsWithAnErasedLine) {
  const LoadProgress quiet = load_progress(true);
  EXPECT_FALSE(quiet);
  EXPECT_EQ(output_of([] { EXPECT_FALSE(load_progress(false)); }, 2, false), "");
  const std::string text = output_of([] {
    const LoadProgress progress = load_progress(false, "packing");
    progress(1'000'000, 3'000'000, 2);
    progress(3'000'000, 3'000'000, 5);
  });
  EXPECT_TRUE(text.starts_with(kErase + "packing ")) << text;
  EXPECT_TRUE(text.ends_with(kErase));
  EXPECT_EQ(text.find(kErase, 1) + kErase.size(), text.size());
}

TEST(Console, LongPromptsAreShown) {
  const auto write = [](int64_t done, int64_t total) { return [=] { show_prefill(done, total); }; };
  EXPECT_EQ(output_of(write(1, 512)), "");
  EXPECT_EQ(output_of(write(1, 513)), kErase + "prompt 1 of 513 tokens");
  EXPECT_EQ(output_of(write(512, 513)), kErase + "prompt 512 of 513 tokens");
  EXPECT_EQ(output_of(write(513, 513)), kErase);
  EXPECT_EQ(output_of(write(1, 513), 2, false), "");
}

TEST(Console, MeasurementsAreShown) {
  const auto write = [](double done, double of) { return [=] { show_measuring(done, of); }; };
  EXPECT_EQ(output_of(write(1.4, 9.6)), kErase + "measured 1 of 10 s");
  EXPECT_EQ(output_of(write(9.6, 9.6)), kErase);
  EXPECT_EQ(output_of(write(9.7, 9.6)), kErase);
  EXPECT_EQ(output_of(write(1, 2), 2, false), "");
}

std::string answer(const std::string& text, size_t piece, bool starts_thinking, bool terminal) {
  return output_of(
      [&] {
        AnswerPrinter printer(starts_thinking);
        for (size_t at = 0; at < text.size(); at += piece)
          printer.print(std::string_view(text).substr(at, piece));
        printer.print("");
        printer.finish();
      },
      1, terminal);
}

TEST(Console, ThinkingIsDimmedAtAnyCut) {
  struct Case {
    std::string text;
    bool thinking;
    std::string shown;
  };
  const std::string dim = "\033[2m", plain = "\033[0m";
  const Case cases[] = {{"hm </think> yes", true, dim + "hm </think>" + plain + " yes\n"},
                        {"</think>\n", true, dim + "</think>" + plain + "\n"},
                        {"a</thin</thinx</think>b</think>c\n", true,
                         dim + "a</thin</thinx</think>" + plain + "b</think>c\n"},
                        {"never </thin", true, dim + "never </thin" + plain + "\n"},
                        {"", true, dim + plain},
                        {"no </think> no\n", false, "no </think> no\n"},
                        {"", false, ""}};
  for (const Case& c : cases)
    for (size_t piece = 1; piece <= c.text.size() + 1; ++piece) {
      EXPECT_EQ(answer(c.text, piece, c.thinking, true), c.shown) << piece;
      const std::string line = c.text + (c.text.empty() || c.text.ends_with('\n') ? "" : "\n");
      EXPECT_EQ(answer(c.text, piece, c.thinking, false), line) << piece;
    }
}

// What may be the beginning of the mark is held back, and nothing else.
TEST(Console, TextIsShownAsSoonAsItIsKnown) {
  const auto after = [&](const std::string& text) {
    return output_of(
        [&] {
          AnswerPrinter printer(true);

          printer.print(text);
        },
        1);
  };
  EXPECT_EQ(after("abc"), "\033[2mabc");
  EXPECT_EQ(after("abc<"), "\033[2mabc");
  EXPECT_EQ(after("abc</think"), "\033[2mabc");
  EXPECT_EQ(after("abc</think</"), "\033[2mabc</think");
  EXPECT_EQ(after("abc</thinks"), "\033[2mabc</thinks");
}

TEST(Console, AFullDiskIsAnError) {
  const int full = open("/dev/full", O_WRONLY), saved = dup(1);
  std::fflush(stdout);
  dup2(full, 1);
  AnswerPrinter printer(false);
  const std::string error = error_of([&] { printer.print("x"); });
  std::clearerr(stdout);
  dup2(saved, 1);
  close(full);
  close(saved);
  EXPECT_EQ(error, "standard output cannot be written (a full disk or a closed pipe)");
}

TEST(Console, CtrlCIsRemembered) {
  Interrupt::clear();
  {
    const Interrupt interrupt;
    EXPECT_FALSE(Interrupt::pending());
    std::raise(SIGINT);
    EXPECT_TRUE(Interrupt::pending());
    Interrupt::clear();
    EXPECT_FALSE(Interrupt::pending());
  }
  struct sigaction now {};
  sigaction(SIGINT, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
}

TEST(Console, ReadsFiles) {
  const TempDirectory dir;
  dir.write("a", "text\n");
  EXPECT_EQ(read_text(dir.file("a")), "text\n");
  EXPECT_TRUE(says(error_of([&] { read_text(dir.file("b")); }), "No such file"));
}

}  // namespace
}  // namespace tandem
