// tandem run: one prompt, one answer.
#include <sys/resource.h>

#include <cstdio>

#include "cli/console.h"
#include "cli/conversation.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "io/atomic_file.h"
#include "io/json.h"
#include "offload/plan/placement_json.h"
#include "offload/ranks/rank_timelines.h"
#include "text/chat_format.h"

namespace tandem {
namespace {

std::string prompt_text(const GenerateOptions& options) {
  require(options.prompt.empty() || options.prompt_file.empty(),
          "both -p and -f were given: choose one");
  std::string text = options.prompt_file.empty() ? options.prompt : read_text(options.prompt_file);
  require(!text.empty(), "the prompt is empty: give -p TEXT, -f FILE, or -f - for standard input");
  return text;
}

int64_t peak_rss_bytes() {
  struct rusage usage {};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

nlohmann::ordered_json logprob_of(const Tokenizer& tokenizer, const TokenEvent& event) {
  nlohmann::ordered_json top = nlohmann::ordered_json::array();
  const auto entry = [&](int32_t token, float logprob) {
    return nlohmann::ordered_json{
        {"id", token}, {"token", tokenizer.decode({&token, 1})}, {"logprob", logprob}};
  };
  for (const TokenLogprob& t : event.top) top.push_back(entry(t.token, t.logprob));
  auto chosen = entry(*event.token, event.logprob);
  chosen["top"] = std::move(top);
  return chosen;
}

nlohmann::ordered_json run_report(const LoadedModel& loaded, const Request& request,
                                  const Answer& answer) {
  const Completion& c = answer.completion;
  const LoadReport& load = loaded.load_report();
  nlohmann::ordered_json report = {{"text", answer.text},
                                   {"token_ids", c.tokens},
                                   {"prompt_tokens", request.prompt.size()},
                                   {"generated_tokens", c.tokens.size()},
                                   {"prefill_tokens_per_second", prefill_rate(request, c)},
                                   {"decode_tokens_per_second", decode_rate(c)},
                                   {"load_seconds", load.seconds},
                                   {"load_bytes_per_second", load.bytes_per_second()},
                                   {"peak_rss_bytes", peak_rss_bytes()},
                                   {"model_bytes", load.bytes},
                                   {"finish_reason", name_of(c.finish)},
                                   {"device", loaded.device()},
                                   {"isa", loaded.isa()},
                                   {"threads", loaded.n_threads()}};
  if (!loaded.dense_products().empty()) report["dense_products"] = loaded.dense_products();
  return report;
}

// Ends the steps of other ranks, which then tell what they have recorded.
std::string timeline_text(const LoadedModel& loaded, const Ranks& ranks,
                          const std::vector<PlannedLayer>& planned) {
  if (!ranks.group) return timeline_json(*loaded.timeline(), planned);
  ranks.steps->end();
  return rank_timelines_json(*ranks.group, loaded.timeline(), planned);
}

}  // namespace

int run_command(const Options& options) {
  ModelOptions model = options.model;
  model.record_routing = !options.record_routing.empty();
  model.record_timeline = !options.timeline.empty();
  if (model.ranks.follow()) return follow({model});
  const GenerateOptions& g = options.generate;
  const std::string text = prompt_text(g);
  const Tokenizer tokenizer = Tokenizer::from_directory(options.model.directory);
  const std::vector<int32_t> prompt =
      g.raw ? raw_prompt(tokenizer, text)
            : ChatFormat(options.model.directory, tokenizer).prompt(first_messages(g.system, text));
  const Request request = make_request(g, tokenizer, prompt);

  const bool quiet = options.quiet || options.json;
  std::optional<AtomicFile> statistics;
  if (!options.record_routing.empty()) statistics.emplace(options.record_routing);
  std::optional<AtomicFile> timeline;
  std::vector<PlannedLayer> planned;
  if (!options.timeline.empty()) {
    timeline.emplace(options.timeline);
    const std::string& placement = options.model.placement;
    if (!placement.empty())
      planned = planned_layers(read_text_file(placement, kMaxPlacementBytes), placement);
  }
  LoadedModel loaded(model, load_progress(quiet));
  const Interrupt interrupt;
  const bool dims = !options.json && may_write_to_terminal(model.ranks);
  AnswerPrinter printer(dims && !g.raw && opens_thinking(tokenizer, prompt));
  nlohmann::ordered_json logprobs = nlohmann::ordered_json::array();
  const auto on_text = [&](std::string_view piece) {
    if (!options.json) printer.print(piece);
  };
  const auto on_token = [&](const TokenEvent& event) {
    if (g.sampling.n_top_logprobs >= 0) logprobs.push_back(logprob_of(tokenizer, event));
  };
  Engine engine = engine_for(loaded, tokenizer);
  const Answer answer = generate(engine, tokenizer, request, g.stops, on_text, on_token);
  if (statistics) {
    statistics->write(routing_statistics_json(loaded.config(), *loaded.routing()));
    statistics->close();
  }
  if (timeline) {
    timeline->write(timeline_text(loaded, model.ranks, planned));
    timeline->close();
  }

  if (options.json) {
    nlohmann::ordered_json report = run_report(loaded, request, answer);
    if (g.sampling.n_top_logprobs >= 0) report["logprobs"] = std::move(logprobs);
    if (loaded.drafting().source != Drafting::Source::kNone) {
      report["accepted_drafts"] = answer.completion.accepted_drafts;
      report["rejected_drafts"] = answer.completion.rejected_drafts;
    }
    std::puts(
        report.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
    return 0;
  }
  printer.finish();
  if (!quiet) {
    const LoadReport& load = loaded.load_report();
    std::fprintf(stderr, "\nloaded %.1f MB in %.2f s; %s\n", static_cast<double>(load.bytes) * 1e-6,
                 load.seconds, timings(loaded, request, answer.completion).c_str());
  }
  return 0;
}

}  // namespace tandem
