// `tandem bench generate`: a reduced model with random weights, run end to end by the engine.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <span>

#include "bench/benchmark.h"
#include "bench/costs.h"
#include "bench/cpu_bench_model.h"
#include "bench/prediction.h"
#include "bench/random_inputs.h"
#include "engine/completion.h"
#include "io/json.h"
#include "offload/plan/drafts.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMinRounds = 3;
constexpr int kBurstsOfPrompt = 4;  // a median of three could follow a single disturbance
constexpr double kFirstBurst = 0.02;

int64_t longest_sequence(const BenchInput& bench) {
  return std::max(most_of(bench.options.contexts) + bench.options.new_tokens +
                      most_of(bench.options.draft_tokens),
                  most_of(bench.options.tokens)) +
         1;
}

// For all sequences that decode concurrently, each with a page to spare: without it the engine does
// not let the last of them in.
int64_t cache_tokens(const BenchInput& bench) {
  const int64_t pages = pages_for(static_cast<int>(longest_sequence(bench))) + 1;
  return most_of(bench.options.batches) * pages * kPageSize;
}

std::unique_ptr<Engine> engine_for(StepRunner& model, KvCache& cache, const BenchInput& bench,
                                   const Engine::Options& options) {
  const int vocab = model.config().vocab;
  return std::make_unique<Engine>(model, cache, Vocabulary{vocab, {}}, longest_sequence(bench),
                                  options);
}

// Drafts of a sequence per step, and the part of them that is right, if all before are.
struct DraftCase {
  int n_drafts;
  double acceptance;
};

std::vector<double> acceptances_of(const BenchOptions& o) {
  return o.acceptances.empty() ? std::vector{Workload{}.acceptance} : o.acceptances;
}

std::vector<DraftCase> draft_cases(const BenchOptions& o) {
  std::vector<DraftCase> cases;
  for (const int n : o.draft_tokens)
    for (const double a : acceptances_of(o))
      if (n > 0) cases.push_back({n, a});
  return cases;
}

// Drafts for sequences whose answers are known from an earlier run without drafts: the right token
// or another one. The right ones at one place of a step, among those before which all were right,
// are evenly spread, so that few steps have the wanted acceptance.
class KnownAnswers final : public DraftSource {
 public:
  explicit KnownAnswers(int vocab) : vocab_(vocab) {}
  void begin(DraftCase wanted) {
    case_ = wanted;
    of_.clear();
  }
  void add(SequenceId id, int64_t n_prompt, std::vector<int32_t> answer) {
    of_[id] = {n_prompt, std::move(answer)};
  }
  std::vector<int32_t> draft(SequenceId id, std::span<const int32_t> tokens, int most) override {
    const auto it = of_.find(id);
    std::vector<int32_t> drafts;
    if (it == of_.end()) return drafts;
    const auto& [n_prompt, answer] = it->second;
    const int64_t first = std::ssize(tokens) - n_prompt;
    const int64_t n = std::min<int64_t>(std::min(most, case_.n_drafts), std::ssize(answer) - first);
    bool is_right = true;
    for (int i = 0; i < n; ++i) {
      is_right = is_right && next_is_right(n_drafted_[i]);
      const auto other = static_cast<int32_t>(1 + rng_() % (vocab_ - 1));
      drafts.push_back(is_right ? answer[first + i] : (answer[first + i] + other) % vocab_);
    }
    return drafts;
  }

 private:
  struct Answer {
    int64_t n_prompt;
    std::vector<int32_t> tokens;
  };
  bool next_is_right(int& n_drafted) const {
    const double before = std::floor(n_drafted * case_.acceptance + 0.5);
    return std::floor(++n_drafted * case_.acceptance + 0.5) > before;
  }

  const int vocab_;
  std::mt19937 rng_{1};
  DraftCase case_ = {};
  std::array<int, kMaxDraftTokens>
      n_drafted_{};  // at each place of a step, if all before were right
  std::map<SequenceId, Answer> of_;
};

Request greedy(std::vector<int32_t> prompt, int n_new) {
  SamplingParams params;
  params.temperature = 0;
  return {.prompt = std::move(prompt), .max_new_tokens = n_new, .sampling = params, .stop_ids = {}};
}

// An answer of random tokens, the same for the same prompt: greedy answers of random weights repeat
// tokens, and equal tokens choose equal experts.
Request random_answer(std::vector<int32_t> prompt, int n_new) {
  Request request = greedy(std::move(prompt), n_new);
  request.sampling.temperature = 1e6f;
  request.sampling.top_p = 1;
  request.sampling.seed = static_cast<uint64_t>(request.prompt.back());
  return request;
}

// A step, or a prompt, with the bursts right before and after it.
struct TimedRun {
  double seconds;
  int first_burst, end_burst;
};

double median_seconds(const std::vector<TimedRun>& runs) {
  std::vector<double> seconds;
  for (const TimedRun& run : runs) seconds.push_back(run.seconds);
  return median(std::move(seconds));
}

// The timed steps, and what all sequences together got from them.
struct DecodeRuns {
  std::vector<TimedRun> runs;
  int64_t n_tokens = 0;
  // A draft counts if all drafts before it in its step were accepted.
  int64_t n_accepted = 0, n_rejected = 0;

  // Tokens per step of each of `batch` sequences.
  double tokens_per_step(int batch) const {
    return static_cast<double>(n_tokens) / batch / static_cast<double>(runs.size());
  }
  double acceptance() const {
    return static_cast<double>(n_accepted) /
           static_cast<double>(std::max<int64_t>(1, n_accepted + n_rejected));
  }
};

struct DecodeTimes {
  DecodeRuns plain;
  std::vector<DecodeRuns> drafted;  // for each of draft_cases(), if there are known answers
};

// Times steps that decode. With `known`, the answers of every round without drafts are then decoded
// with drafts.
class DecodeBench {
 public:
  DecodeBench(Engine& engine, const BenchInput& bench, RatesProbe& probe, KnownAnswers* known)
      : engine_(engine),
        bench_(bench),
        probe_(probe),
        known_(known),
        cases_(known ? draft_cases(bench.options) : std::vector<DraftCase>()) {}

  // Steps of `batch` sequences after `context` cached tokens.
  DecodeTimes times(int context, int batch) {
    std::mt19937 rng(context);
    DecodeTimes times;
    times.drafted.resize(cases_.size());
    double spent = 0;
    for (int round = 0; round < kMinRounds || spent < bench_.options.seconds; ++round) {
      const std::vector<Tokens> prompts = cached_prompts(context, batch, rng);
      const auto first = std::ssize(times.plain.runs);
      const std::vector<Tokens> answers = decode(prompts, {}, times.plain);
      for (const TimedRun& run : std::span(times.plain.runs).subspan(first)) spent += run.seconds;
      for (size_t i = 0; i < cases_.size(); ++i) {
        known_->begin(cases_[i]);
        decode(prompts, answers, times.drafted[i]);
      }
    }
    return times;
  }

  // The same in turns with an engine that decides how many tokens of `deciding` are drafted, for so
  // many steps of it.
  std::pair<DecodeRuns, DecodeRuns> times_beside(DecodeBench& deciding, DraftCase wanted,
                                                 int context, int batch, int n_steps) {
    std::mt19937 rng(context);
    std::pair<DecodeRuns, DecodeRuns> runs;
    deciding.known_->begin(wanted);
    while (std::ssize(runs.second.runs) < n_steps) {
      const std::vector<Tokens> prompts = cached_prompts(context, batch, rng);
      for (const Tokens& prompt : prompts) deciding.engine_.assume_cached(prompt);
      const std::vector<Tokens> answers = decode(prompts, {}, runs.first);
      deciding.decode(prompts, answers, runs.second);
    }
    return runs;
  }

 private:
  using Tokens = std::vector<int32_t>;

  std::vector<Tokens> cached_prompts(int context, int batch, std::mt19937& rng) {
    std::vector<Tokens> prompts;
    for (int i = 0; i < batch; ++i) {
      prompts.push_back(random_tokens(context, engine_.vocabulary_size(), rng));
      engine_.assume_cached(prompts.back());
    }
    return prompts;
  }

  // Returns an answer to each prompt, drafted from `answers` if they are known. Times each step
  // until an answer has new_tokens tokens, with bursts of the probe in between.
  std::vector<Tokens> decode(const std::vector<Tokens>& prompts, const std::vector<Tokens>& answers,
                             DecodeRuns& out) {
    const size_t batch = prompts.size();
    const int n_new = bench_.options.new_tokens;
    std::vector<Tokens> drawn(batch);
    size_t n_begun = 0, n_ended = 0, longest = 0;
    DecodeRuns counted;
    for (size_t i = 0; i < batch; ++i) {
      const auto count = [&, i](const TokenEvent& event) {
        if (event.token) {
          n_begun += drawn[i].empty();
          drawn[i].push_back(*event.token);
          longest = std::max(longest, drawn[i].size());
          ++counted.n_tokens;
        }
        counted.n_accepted += event.was_drafted;
        counted.n_rejected += event.n_rejected > 0;
        n_ended += event.finish.has_value();
        return true;
      };
      // With these further tokens the last timed step has as many drafts as the others.
      const int n = n_new + most_of(bench_.options.draft_tokens);
      Request request = cases_.empty() ? greedy(prompts[i], n) : random_answer(prompts[i], n);
      const SequenceId id = engine_.submit({.request = std::move(request), .on_event = count});
      if (!answers.empty()) known_->add(id, std::ssize(prompts[i]), answers[i]);
    }
    while (n_begun < batch) engine_.step();
    probe_.burst(kFirstBurst);
    counted = {};
    while (longest < static_cast<size_t>(n_new)) {
      const double seconds = seconds_of([&] { engine_.step(); });
      const int burst = probe_.n_bursts();
      probe_.burst(seconds);
      out.runs.push_back({seconds, burst - 1, burst + 1});
    }
    out.n_tokens += counted.n_tokens;
    out.n_accepted += counted.n_accepted;
    out.n_rejected += counted.n_rejected;
    while (n_ended < batch) engine_.step();
    return drawn;
  }

  Engine& engine_;
  const BenchInput& bench_;
  RatesProbe& probe_;
  KnownAnswers* const known_;
  const std::vector<DraftCase> cases_;
};

std::vector<TimedRun> prefill_runs(Engine& engine, const BenchInput& bench, int n,
                                   RatesProbe& probe) {
  std::mt19937 rng(n);
  std::vector<TimedRun> runs;
  double spent = 0;
  int before = probe.n_bursts();
  probe.burst(kFirstBurst);
  for (int round = 0; round < kMinRounds || spent < bench.options.seconds; ++round) {
    const Request request = greedy(random_tokens(n, engine.vocabulary_size(), rng), 1);
    const double seconds = seconds_of([&] { complete(engine, {&request, 1}); });
    const int after = probe.n_bursts();
    for (int i = 0; i < kBurstsOfPrompt; ++i) probe.burst(seconds / kBurstsOfPrompt);
    runs.push_back({seconds, before, probe.n_bursts()});
    before = after;
    spent += seconds;
  }
  return runs;
}

// The bounds of a kind of product at the rates of `machine`.
Bounds bounds_of(const Machine& machine, const cpu::PeakLoop& peak) {
  const double ops = peak.type == cpu::Arithmetic::kInt8   ? machine.peak.int8
                     : peak.type == cpu::Arithmetic::kBF16 ? machine.peak.bf16
                                                           : machine.peak.fp32;
  return {machine.nodes[0].read_bytes_per_second, ops};
}

// Adds the planner's prediction and its relative error: the median over the runs, each compared
// with predict(machine) at the rates measured right before and after it.
template <class Predict>
void add_prediction(Json& row, const std::vector<TimedRun>& runs, const RatesProbe& probe,
                    const Predict& predict) {
  std::vector<double> ratios;
  for (const TimedRun& run : runs)
    ratios.push_back(predict(probe.machine(run.first_burst, run.end_burst)) / run.seconds);
  const double ratio = median(std::move(ratios));
  row["predicted_seconds"] = row["seconds"].get<double>() * ratio;
  row["prediction_error"] = ratio - 1;
}

// Adds what drafts bring: `row` has the steps with drafts, `plain` those without.
void add_drafts(Json& row, DraftCase drafted, const DecodeRuns& runs, const Json& plain) {
  const auto ratio = [&](const char* field) {
    return row[field].get<double>() / plain[field].get<double>();
  };
  const double expected = expected_tokens(drafted.n_drafts, drafted.acceptance);
  const double predicted = expected / ratio("predicted_seconds");
  row.update({{"draft_tokens", drafted.n_drafts},
              {"acceptance", drafted.acceptance},
              {"measured_acceptance", runs.acceptance()},
              {"tokens_per_step", runs.tokens_per_step(row["batch"])},
              {"expected_tokens_per_step", expected},
              {"times_without", ratio("tokens_per_second")},
              {"predicted_times_without", predicted}});
}

// Tokens a second with as many drafts as the engine decides, over those without, in turns.
// plain_seconds(run): predicted for a step without drafts at the rates measured beside the run. As
// a unit of time it leaves out what other programs do to one turn and not to the other.
template <class PlainSeconds>
Json decided_row(const DraftCase& wanted, int context, int batch,
                 const std::pair<DecodeRuns, DecodeRuns>& runs, const PlainSeconds& plain_seconds) {
  const auto tokens_per = [](const DecodeRuns& of, const auto& time_of) {
    double time = 0;
    for (const TimedRun& run : of.runs) time += time_of(run);
    return static_cast<double>(of.n_tokens) / time;
  };
  const auto seconds = [](const TimedRun& run) { return run.seconds; };
  const auto steps = [&](const TimedRun& run) { return run.seconds / plain_seconds(run); };
  const double plain = tokens_per(runs.first, seconds), decided = tokens_per(runs.second, seconds);
  return {{"context", context},
          {"batch", batch},
          {"acceptance", wanted.acceptance},
          {"steps", runs.second.runs.size()},
          {"accepted", runs.second.n_accepted},
          {"rejected", runs.second.n_rejected},
          {"tokens_per_step", runs.second.tokens_per_step(batch)},
          {"tokens_per_second", decided},
          {"times_without", decided / plain},
          {"times_without_at_equal_rates",
           tokens_per(runs.second, steps) / tokens_per(runs.first, steps)}};
}

// The share of the GPU's memory bandwidth that reading all bytes of a token takes.
void add_gpu_ratio(Json& row, const std::optional<Gpu>& gpu) {
  std::optional<double> ratio;
  if (gpu && row["gpu_tokens_per_second"].is_number())
    ratio = row["bytes_per_token"].get<double>() * row["gpu_tokens_per_second"].get<double>() /
            gpu->read_bytes_per_second;
  row["gpu_roofline_ratio"] = or_null(ratio);
}

// The model to run. Throws Error when layers, contexts or memory are insufficient.
ModelConfig cut_model(const BenchInput& bench) {
  const ModelConfig c = with_layers(bench.config, bench.options.layers);
  const int64_t cache = KvCache::bytes_for(c, cache_tokens(bench), DType::kBF16);
  const int64_t left = bench.memory_bytes - backbone_bytes(c, bench.formats) - cache;
  require(
      left > 0,
      "{} layers with a cache of {} tokens need {:.2f} GB without experts, and {:.2f} GB may be "
      "used; choose fewer --layers, a shorter --ctx or raise --memory",
      c.n_layers, cache_tokens(bench), gigabytes(bench.memory_bytes - left),
      gigabytes(bench.memory_bytes));
  return with_simulated_routing(bench, with_resident_experts(c, bench.formats.experts, left));
}

void bench_generate(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                    const OnRow& on_row) {
  const ModelConfig config = cut_model(bench);
  const int n_drafts = most_of(bench.options.draft_tokens);
  const StepLimits limits = {bench.step_tokens, most_of(bench.options.batches) * (1 + n_drafts)};
  CpuBenchModel cpu(config, bench.formats, kernels, speed.team(), limits, cache_tokens(bench));
  fill_with_random(cpu.cache, config);
  KnownAnswers known(config.vocab);
  const std::vector<DraftCase> cases = draft_cases(bench.options);
  const std::unique_ptr<Engine> engine =
      engine_for(cpu.model, cpu.cache, bench,
                 {.drafting = {.n_tokens = n_drafts, .given = n_drafts > 0 ? &known : nullptr}});
  const ModelOnGpu on_gpu(bench.gpus,
                          {.config = config,
                           .formats = bench.formats,
                           .wanted = [](const WeightSpec&) { return true; },
                           .max_tokens = bench.step_tokens,
                           .context = longest_sequence(bench)},
                          limits, cache_tokens(bench));
  std::unique_ptr<Engine> engine_there;
  if (on_gpu.model()) engine_there = engine_for(*on_gpu.model(), *on_gpu.cache(), bench, {});
  const auto per_second_there = [&](int n, const auto& runs_of) {
    if (!engine_there) return Json();
    return Json(n / median_seconds(runs_of(*engine_there)));
  };
  const cpu::PeakLoop products = peak_of_products(speed, kernels, bench.formats.experts.dtype);
  const cpu::PeakLoop attention = peak_of_attention(speed, kernels);
  RatesProbe probe(speed, kernels.isa, bench.curves);

  const auto predicted_decode = [&](DecodeShape shape) {
    return [&, shape](const Machine& rates) {
      return StepPrediction(config, bench.formats, rates).decode_seconds(shape);
    };
  };
  // A row of steps of 1 + shape.n_drafts tokens of each sequence.
  const auto decode_row = [&](DecodeShape shape, const DecodeRuns& runs, const Machine& machine) {
    const double seconds = median_seconds(runs.runs);
    const double tokens = runs.tokens_per_step(shape.batch) * shape.batch;
    const CostOfParts cost =
        cost_of_step(config, bench.formats, shape, size_of(cache_type_for(kernels)));
    const Bounds bounds = bounds_of(machine, products);
    const double roofline = bounds.seconds(cost.matrices) + bounds.seconds(cost.experts) +
                            bounds_of(machine, attention).seconds(cost.attention);
    const auto bytes = static_cast<double>(cost.sum().bytes);
    return Json{{"context", shape.context},
                {"batch", shape.batch},
                {"seconds", seconds},
                {"tokens_per_second", tokens / seconds},
                {"bytes_per_token", std::llround(bytes / tokens)},
                {"roofline_seconds", roofline},
                {"roofline_ratio", roofline / seconds},
                {"bandwidth_ratio", bytes / bounds.read_bytes_per_second / seconds}};
  };

  Json decode = Json::array(), drafts = Json::array();
  for (const int context : bench.options.contexts) {
    for (const int batch : bench.options.batches) {
      const int first_burst = probe.n_bursts();
      const DecodeTimes times = DecodeBench(*engine, bench, probe, &known).times(context, batch);
      const Machine machine = probe.machine(first_burst, probe.n_bursts());
      const DecodeShape shape = {context, batch, 0};
      decode.push_back(decode_row(shape, times.plain, machine));
      decode.back()["gpu_tokens_per_second"] = per_second_there(batch, [&](Engine& there) {
        return DecodeBench(there, bench, probe, nullptr).times(context, batch).plain.runs;
      });
      add_prediction(decode.back(), times.plain.runs, probe, predicted_decode(shape));
      add_gpu_ratio(decode.back(), bench.gpu);
      for (size_t i = 0; i < cases.size(); ++i) {
        const DecodeShape drafted = {context, batch, cases[i].n_drafts};
        Json row = decode_row(drafted, times.drafted[i], machine);
        add_prediction(row, times.drafted[i].runs, probe, predicted_decode(drafted));
        add_drafts(row, cases[i], times.drafted[i], decode.back());
        drafts.push_back(std::move(row));
      }
    }
  }
  Json decided = Json::array();
  if (bench.options.decided_steps > 0) {
    const int context = bench.options.contexts.front(), batch = bench.options.batches.front();
    for (const double acceptance : acceptances_of(bench.options)) {
      KnownAnswers answers(config.vocab);
      const std::unique_ptr<Engine> deciding =
          engine_for(cpu.model, cpu.cache, bench,
                     {.drafting = {.n_tokens = n_drafts, .given = &answers, .decides = true}});
      DecodeBench beside(*deciding, bench, probe, &answers);
      const DraftCase wanted = {n_drafts, acceptance};
      decided.push_back(decided_row(
          wanted, context, batch,
          DecodeBench(*engine, bench, probe, &known)
              .times_beside(beside, wanted, context, batch, bench.options.decided_steps),
          [&](const TimedRun& run) {
            return predicted_decode({context, batch, 0})(
                probe.machine(run.first_burst, run.end_burst));
          }));
    }
  }
  Json prefill = Json::array();
  for (const int n : bench.options.tokens) {
    const std::vector<TimedRun> runs = prefill_runs(*engine, bench, n, probe);
    const double seconds = median_seconds(runs);
    prefill.push_back({{"tokens", n},
                       {"seconds", seconds},
                       {"tokens_per_second", n / seconds},
                       {"gpu_tokens_per_second", per_second_there(n, [&](Engine& there) {
                          return prefill_runs(there, bench, n, probe);
                        })}});
    add_prediction(prefill.back(), runs, probe, [&](const Machine& rates) {
      return StepPrediction(config, bench.formats, rates).prefill_seconds(n, bench.step_tokens);
    });
  }

  const Bounds bounds = bounds_of(probe.machine(0, probe.n_bursts()), products);
  Json report = {{"bench", "generate"}, {"config", bench.options.config}};
  add_cut_model(report, kernels.name, speed.team().size(), config, bench.formats);
  report.update({{"prefill_tokens_per_second", prefill.back()["tokens_per_second"]},
                 {"decode_tokens_per_second", decode[0]["tokens_per_second"]},
                 {"gpu_prefill_tokens_per_second", prefill.back()["gpu_tokens_per_second"]},
                 {"gpu_decode_tokens_per_second", decode[0]["gpu_tokens_per_second"]},
                 {"bytes_per_token", decode[0]["bytes_per_token"]},
                 {"roofline_ratio", decode[0]["roofline_ratio"]},
                 {"bandwidth_ratio", decode[0]["bandwidth_ratio"]},
                 {"read_bytes_per_second", bounds.read_bytes_per_second},
                 {"peak_ops_per_second", bounds.ops_per_second},
                 {"instruction", products.instruction},
                 {"decode", decode}});
  if (!cases.empty()) report["drafts"] = drafts;
  if (!decided.empty()) report["decided_drafts"] = decided;
  report["prefill"] = prefill;
  on_row(report);
}

std::string generate_text(const Json& r) {
  std::string text = fmt::format(
      "{} cut to {} layers ({} dense), {} of its experts a layer, experts {}, other matrices {}\n"
      "{}, {} threads{}; measured beside it: reading {:.1f} GB/s, {} {:.0f} Gop/s\n"
      "{:<10}{:>9}{:>7}{:>11}{:>11}{:>8}{:>11}{:>11}{:>10}{:>11}\n",
      r["config"].get<std::string>(), r["layers"].get<int>(), r["dense_layers"].get<int>(),
      r["resident_experts"].get<int>(), r["experts"].get<std::string>(),
      r["format"].get<std::string>(), r["isa"].get<std::string>(), r["threads"].get<int>(),
      simulated_routing_text(r), r["read_bytes_per_second"].get<double>() * 1e-9,
      r["instruction"].get<std::string>(), r["peak_ops_per_second"].get<double>() * 1e-9, "",
      "tokens", "batch", "ms", "predicted", "off", "tokens/s", "GB/token", "roofline", "bandwidth");
  const auto add_steps = [&](const char* what, const Json& d) {
    text += fmt::format(
        "{:<10}{:>9}{:>7}{:>11.2f}{:>11.2f}{:>6.0f} %{:>11.2f}{:>11.3f}{:>8.0f} %{:>9.0f} %\n",
        what, d["context"].get<int>(), d["batch"].get<int>(), d["seconds"].get<double>() * 1e3,
        d["predicted_seconds"].get<double>() * 1e3, d["prediction_error"].get<double>() * 100,
        d["tokens_per_second"].get<double>(), d["bytes_per_token"].get<double>() * 1e-9,
        d["roofline_ratio"].get<double>() * 100, d["bandwidth_ratio"].get<double>() * 100);
  };
  for (const Json& d : r["decode"]) add_steps("decode", d);
  for (const Json& d : r.value("drafts", Json::array())) {
    add_steps("drafts", d);
    text += fmt::format(
        "  {} draft(s) a step at acceptance {:g}, measured {:.2f}: {:.2f} tokens a step, {:.2f} "
        "times the tokens/s without; predicted {:.2f}\n",
        d["draft_tokens"].get<int>(), d["acceptance"].get<double>(),
        d["measured_acceptance"].get<double>(), d["tokens_per_step"].get<double>(),
        d["times_without"].get<double>(), d["predicted_times_without"].get<double>());
  }
  for (const Json& p : r["prefill"])
    text += fmt::format("{:<10}{:>9}{:>7}{:>11.2f}{:>11.2f}{:>6.0f} %{:>11.2f}\n", "prefill",
                        p["tokens"].get<int>(), 1, p["seconds"].get<double>() * 1e3,
                        p["predicted_seconds"].get<double>() * 1e3,
                        p["prediction_error"].get<double>() * 100,
                        p["tokens_per_second"].get<double>());
  return text;
}

void check_generate(const BenchOptions& o) {
  require(o.new_tokens >= 2 && o.new_tokens <= kMaxTokens, "-n {}: must be between 2 and {}",
          o.new_tokens, kMaxTokens);
  require(o.decided_steps >= 0 && o.decided_steps <= kMaxTokens,
          "--decided-steps {}: must be between 0 and {}", o.decided_steps, kMaxTokens);
  require(o.decided_steps == 0 || most_of(o.draft_tokens) > 0,
          "--decided-steps {}: add --draft-tokens, the most that are drafted", o.decided_steps);
  for (const double a : o.acceptances)
    require(a >= 0 && a <= 1, "--acceptance {}: must be between 0 and 1", a);
}

void check_generate_input(const BenchInput& bench) {
  const int batch = most_of(bench.options.batches), n_drafts = most_of(bench.options.draft_tokens);
  require(batch * (1 + n_drafts) <= bench.step_tokens,
          "--batch {} with --draft-tokens {}: a step has at most {} tokens", batch, n_drafts,
          bench.step_tokens);
  cut_model(bench);
}

}  // namespace

Benchmark generate_benchmark() {
  using enum BenchFlag;
  return {.name = "generate",
          .help = "a cut model with random weights, end to end",
          .examples =
              "  tandem bench generate --config r1 --layers 5 --experts fp8 --ctx 1024,16384\n"
              "  tandem bench generate --layers 5 --ctx 1024 -n 64 --draft-tokens 1 --acceptance "
              "0.85\n",
          .flags = {kConfig, kIsa, kContexts, kTokens, kBatches, kLayers, kExperts, kFormat,
                    kActivations, kNewTokens, kDraftTokens, kDrafts, kSimulateRouting},
          .tokens_help = "lengths of prompts, a list",
          .tokens = {64, 512},
          .contexts = {1024, 8192},
          .batches = {1},
          .memory_part = 0.6,
          .check = check_generate,
          .check_input = check_generate_input,
          .on_cpu = bench_generate,
          .header = nullptr,
          .text = generate_text};
}

}  // namespace tandem
