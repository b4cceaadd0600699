// tandem eval: perplexity of a text, and the divergence of a second model's predictions.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/console.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "engine/completion.h"
#include "io/json.h"
#include "text/tokenizer.h"

namespace tandem {
namespace {

constexpr int64_t kDefaultWindow = 512;

struct Totals {
  int64_t n_predicted = 0, n_agreed = 0;
  double negative_log_likelihood = 0, divergence = 0;
};

double log_sum_exp(std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float v : logits) sum += std::exp(double{v} - max);
  return max + std::log(sum);
}

size_t argmax(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

// Kullback-Leibler divergence of q from p, in nats.
double divergence(std::span<const float> p, std::span<const float> q) {
  const double p_sum = log_sum_exp(p), q_sum = log_sum_exp(q);
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double log_p = p[i] - p_sum;
    sum += std::exp(log_p) * (log_p - (q[i] - q_sum));
  }
  return sum;
}

// Windows share no prefix, so the prefix cache is off.
struct Scored {
  Scored(const ModelOptions& options, const LoadProgress& progress) : loaded(options, progress) {}
  LoadedModel loaded;
  Engine engine{loaded.model(),
                loaded.cache(),
                {loaded.config().vocab, {}},
                loaded.context(),
                {.max_running = 1, .keeps_pages = false}};
};

// Scores one window of the text: every token but the first is predicted from those before it.
void evaluate(Scored& model, Scored* other, std::span<const int32_t> tokens, Totals& totals) {
  const size_t vocab = model.loaded.config().vocab;
  std::vector<float> kept;
  score(model.engine, tokens, 0, [&](int64_t i, std::span<const float> logits) {
    if (i + 1 == static_cast<int64_t>(tokens.size())) return;
    totals.negative_log_likelihood += log_sum_exp(logits) - logits[tokens[i + 1]];
    ++totals.n_predicted;
    if (other) kept.insert(kept.end(), logits.begin(), logits.end());
  });
  if (!other) return;
  score(other->engine, tokens, 0, [&](int64_t i, std::span<const float> logits) {
    if (i + 1 == static_cast<int64_t>(tokens.size())) return;
    const std::span<const float> mine(kept.data() + i * vocab, vocab);
    totals.divergence += divergence(mine, logits);
    totals.n_agreed += argmax(mine) == argmax(logits);
  });
}

void show_perplexity(int64_t done, int64_t total, double perplexity, bool quiet) {
  if (!quiet)
    std::fprintf(stderr, "\r\033[K%ld of %ld tokens, perplexity %.4f", done, total, perplexity);
}

// The second model; nothing: there is none.
std::optional<ModelOptions> options_of_other(const Options& options, const ModelOptions& first) {
  if (!options.against.empty()) require_folder(options.against);
  require(options.against.empty() || !options.compares_experts,
          "--against and --against-experts: choose one");
  if (options.against.empty() && !options.compares_experts) return {};
  ModelOptions other = first;
  other.placement.clear();  // describes the first model
  other.workers = {};       // have the first model
  if (options.compares_experts)
    other.experts = options.against_experts;
  else
    other.directory = options.against;
  return other;
}

}  // namespace

int eval_command(const Options& options) {
  ModelOptions model_options = options.model;
  if (model_options.context == 0) model_options.context = kDefaultWindow;
  require(model_options.context >= 2, "--ctx {}: a window of at least 2 tokens is needed",
          model_options.context);
  model_options.max_logits = 64;
  const std::optional<ModelOptions> other_options = options_of_other(options, model_options);
  if (model_options.ranks.follow())
    return other_options ? follow({model_options, *other_options}) : follow({model_options});
  const Tokenizer tokenizer = Tokenizer::from_directory(model_options.directory);
  std::vector<int32_t> tokens = tokenizer.encode(read_text(options.file));
  require(tokens.size() >= 2, "{} has {} tokens: at least 2 are needed", options.file,
          tokens.size());

  const bool quiet = options.quiet || options.json || !isatty(2);
  Scored model(model_options, load_progress(quiet));
  std::unique_ptr<Scored> other;
  const std::optional<WeightFormat>& other_format = options.against_experts;
  const std::string format = other_format ? format_name(*other_format) : "stored";
  const std::string other_name =
      options.compares_experts ? "experts as " + format : options.against;
  if (other_options) {
    other = std::make_unique<Scored>(*other_options, load_progress(quiet));
    require(other->loaded.config().vocab == model.loaded.config().vocab,
            "{} has {} tokens and {} has {}: their predictions cannot be compared",
            options.model.directory, model.loaded.config().vocab, other_name,
            other->loaded.config().vocab);
  }

  Totals totals;
  std::vector<int32_t> window;
  const auto n = static_cast<int64_t>(tokens.size());
  const bool bos = tokenizer.add_bos() && tokenizer.bos();
  const int64_t step = model.loaded.context() - (bos ? 1 : 0);
  for (int64_t at = 0; at < n; at += step) {
    window.clear();
    if (bos) window.push_back(*tokenizer.bos());
    window.insert(window.end(), tokens.begin() + at, tokens.begin() + std::min(n, at + step));
    if (window.size() < 2) break;
    evaluate(model, other.get(), window, totals);
    show_perplexity(std::min(n, at + step), n,
                    std::exp(totals.negative_log_likelihood / totals.n_predicted), quiet);
  }
  if (!quiet) std::fputs("\r\033[K", stderr);

  const auto count = static_cast<double>(totals.n_predicted);
  nlohmann::ordered_json report = {
      {"tokens", totals.n_predicted},
      {"window", model.loaded.context()},
      {"perplexity", std::exp(totals.negative_log_likelihood / count)}};
  if (other) {
    report["mean_kl_divergence"] = totals.divergence / count;
    report["top1_agreement"] = static_cast<double>(totals.n_agreed) / count;
  }
  if (options.json) {
    std::puts(report.dump().c_str());
    return 0;
  }
  std::printf("perplexity %.4f over %ld tokens in windows of %ld\n",
              report["perplexity"].get<double>(), totals.n_predicted, model.loaded.context());
  if (other)
    std::printf("against %s: mean KL divergence %.3g nats, top-1 agreement %.2f %%\n",
                other_name.c_str(), report["mean_kl_divergence"].get<double>(),
                100 * report["top1_agreement"].get<double>());
  return 0;
}

}  // namespace tandem
