// tandem chat: a conversation on the terminal. Keys of earlier turns stay in the cache, so each
// turn computes only its new tokens.
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/console.h"
#include "cli/conversation.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "text/chat_format.h"

namespace tandem {
namespace {

// Reads a line; false at the end of input. Ctrl-C yields an empty line.
bool read_line(std::string& line) {
  const bool terminal = isatty(STDIN_FILENO);
  Interrupt::clear();
  if (terminal) std::fputs("\n> ", stdout);
  std::fflush(stdout);
  if ((!terminal || Interrupt::wait_for_input()) && std::getline(std::cin, line)) return true;
  if (!Interrupt::pending()) return false;
  std::cin.clear();
  clearerr(stdin);
  line.clear();
  if (terminal) std::fputs("\n(Ctrl-D leaves)", stdout);
  return true;
}

}  // namespace

int chat_command(const Options& options) {
  if (options.model.ranks.follow()) return follow({options.model});
  const GenerateOptions& g = options.generate;
  const Tokenizer tokenizer = Tokenizer::from_directory(options.model.directory);
  const ChatFormat format(options.model.directory, tokenizer);
  LoadedModel loaded(options.model, load_progress(options.quiet));
  nlohmann::ordered_json messages = first_messages(g.system, "");
  messages.erase(messages.size() - 1);
  Engine engine = engine_for(loaded, tokenizer);  // its prefix cache keeps earlier turns
  GenerateOptions turn = g;

  const bool dims = may_write_to_terminal(options.model.ranks);
  if (options.model.ranks.steps) options.model.ranks.steps->begin();
  const Interrupt interrupt;
  for (std::string line; read_line(line);) {
    if (line.empty()) continue;
    messages.push_back({{"role", "user"}, {"content", line}});
    const Request request = make_request(turn, tokenizer, format.prompt(messages));
    AnswerPrinter printer(dims && opens_thinking(tokenizer, request.prompt));
    Answer answer;
    try {
      answer = generate(engine, tokenizer, request, g.stops,
                        [&](std::string_view piece) { printer.print(piece); });
    } catch (const RunError&) {
      throw;
    } catch (const Error& error) {  // the conversation continues without this turn
      std::fprintf(stderr, "error: %s\n", error.what());
      messages.erase(messages.size() - 1);
      continue;
    }
    printer.finish();
    messages.push_back({{"role", "assistant"}, {"content", answer.text}});
    ++turn.sampling.seed;
    if (!options.quiet)
      std::fprintf(stderr, "%s\n", timings(loaded, request, answer.completion).c_str());
  }
  if (isatty(STDIN_FILENO)) std::puts("");
  return 0;
}

}  // namespace tandem
