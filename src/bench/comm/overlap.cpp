// `tandem bench overlap`: steps of replicas, or of a backbone with workers, in one, two and more
// micro-batches, of which one computes while the rows of others travel, beside each other in the
// same process.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "bench/comm/comm.h"
#include "comm/alone.h"
#include "core/clock.h"
#include "engine/micro_batch_policy.h"
#include "io/atomic_file.h"
#include "loader/loaded_model.h"
#include "offload/ranks/rank_timelines.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kNumbers = MicroBatchPolicy::kChoices;
constexpr int kContext = 32;  // tokens of a sequence in a decode step

void check_overlap(const BenchOptions& o) {
  const bool has_workers = !o.workers.addresses.empty();
  require(o.ranks || has_workers,
          "bench overlap measures several ranks, or workers: give --ranks 2 or --workers, or start "
          "it with mpirun");
  require(!o.ranks || !has_workers,
          "--workers: several ranks are measured with replicas, without workers: leave one of them "
          "out");
  require(!has_workers || o.timeline.empty(),
          "--timeline shows several ranks: leave --workers out");
  require_list("--tokens", o.tokens, kMaxStepTokens / kPageSize);
}

// A step in which every replica has so many tokens: of a prompt, or of as many sequences.
class MeasuredStep {
 public:
  MeasuredStep(const ModelConfig& config, int n_replicas, int n_tokens, bool is_decode)
      : is_decode_(is_decode), tokens_(n_tokens), positions_(n_tokens) {
    std::mt19937 random(n_tokens);
    const int n_pages = is_decode ? n_tokens : pages_for(n_tokens);
    for (int i = 0; i < n_pages; ++i) pages_.push_back(i);
    for (int i = 0; i < n_tokens; ++i) {
      tokens_[i] = static_cast<int32_t>(random() % static_cast<unsigned>(config.vocab));
      positions_[i] = is_decode ? kContext - 1 : i;
      if (is_decode) {
        sequences_.push_back({i, 1, kContext, std::span(pages_).subspan(i, 1)});
        logit_rows_.push_back(i);
      }
    }
    if (!is_decode) {
      sequences_.push_back({0, n_tokens, n_tokens, pages_});
      logit_rows_.push_back(n_tokens - 1);
    }
    batches_.assign(n_replicas, {.tokens = tokens_,
                                 .positions = positions_,
                                 .sequences = sequences_,
                                 .logit_rows = logit_rows_});
  }
  std::span<const Batch> batches() const { return batches_; }
  MicroBatchPolicy::Step described() const {
    const int n = static_cast<int>(tokens_.size());
    return {n, is_decode_, std::min(n, kMaxMicroBatches)};
  }

 private:
  const bool is_decode_;
  std::vector<int32_t> tokens_, positions_, pages_, logit_rows_;
  std::vector<Sequence> sequences_;
  std::vector<Batch> batches_;
};

class OverlapBench {
 public:
  OverlapBench(const BenchOptions& options, const OnRow& on_row)
      : o_(options),
        alone_(options.ranks ? nullptr : make_alone()),
        group_(options.ranks ? options.ranks->group : *alone_),
        on_row_(on_row) {
    const int most = *std::max_element(o_.tokens.begin(), o_.tokens.end());
    ModelOptions model{.directory = o_.model.empty() ? embedded_model() : o_.model,
                       .device = o_.device,
                       .isa = o_.isa,
                       .context = std::max(kContext, most),
                       .kv_fraction = 0.5,
                       .max_kv_tokens = int64_t{most} * kPageSize,
                       .step_tokens = most,
                       .max_logits = most,
                       .attention = AttentionForm::kAbsorbed,
                       .ranks = o_.ranks ? o_.ranks->ranks : Ranks(),
                       .workers = o_.workers,
                       .n_replicas = group_.size(),
                       .dispatch = o_.dispatch,
                       .rows = o_.rows,
                       .simulated_delay = o_.simulated_delay,
                       .simulated_rate = o_.simulated_rate,
                       .simulated_hosts = o_.simulated_hosts,
                       .record_timeline = !o_.timeline.empty()};
    model.note = [this](const std::string& line) {
      if (line.starts_with("rows of experts: ")) exchanges_ = line.substr(line.find(": ") + 2);
    };
    if (!o_.workers.addresses.empty()) exchanges_ = "workers";
    loaded_ = std::make_unique<LoadedModel>(model);
  }

  // A whole step, and one in two micro-batches, twice: the first ones touch memory.
  void write_timeline() {
    const MeasuredStep step(loaded_->config(), group_.size(), o_.tokens.back(), false);
    for (const int n : {1, 2, 1, 2}) seconds_of(step, n);
    const std::string text = rank_timelines_json(group_, loaded_->timeline());
    if (group_.rank() == 0) write_new_file(o_.timeline, text);
  }

  void measure(int n_tokens, bool is_decode) {
    const MeasuredStep step(loaded_->config(), group_.size(), n_tokens, is_decode);
    std::array<std::vector<double>, kNumbers.size()> seconds, gains;
    for (const int n : kNumbers) seconds_of(step, n);  // touches memory
    for (const auto start = Clock::now(); all_go_on(start, o_.seconds);) {
      for (size_t i = 0; i < kNumbers.size(); ++i) {
        seconds[i].push_back(seconds_of(step, kNumbers[i]));
        gains[i].push_back(seconds[0].back() / seconds[i].back());
      }
    }
    const Decided as_decided = decided(step);
    Json row = {{"bench", "overlap"},      {"step", is_decode ? "decode" : "prompt"},
                {"ranks", group_.size()},  {"workers", o_.workers.addresses.size()},
                {"exchanges", exchanges_}, {"delay_seconds", o_.simulated_delay.count()},
                {"tokens", n_tokens}};
    add_simulated(row, o_);
    const double one = median(seconds[0]);
    row["tokens_per_second"] = group_.size() * n_tokens / one;
    for (size_t i = 0; i < kNumbers.size(); ++i) {
      row[fmt::format("seconds_{}", kNumbers[i])] = median(seconds[i]);
      row[fmt::format("gain_{}", kNumbers[i])] = median(gains[i]);
    }
    row["seconds_auto"] = as_decided.seconds;
    row["gain_auto"] = as_decided.gain;
    row["micro_batches_auto"] = as_decided.micro_batches;
    on_row_(row);
  }

 private:
  // The time of the rank that takes longest.
  double seconds_of(const MeasuredStep& step, int n) {
    group_.barrier();
    const auto start = Clock::now();
    loaded_->model().obey_forward(step.batches(), loaded_->cache(), n);
    loaded_->model().device().wait();
    group_.barrier();
    return seconds_since(start);
  }
  // Rank 0 decides for all.
  int from_first(int number) {
    group_.broadcast(std::as_writable_bytes(std::span(&number, 1)), 0);
    return number;
  }
  bool all_go_on(Clock::time_point start, double seconds) {
    return from_first(seconds_since(start) < seconds) > 0;
  }
  struct Decided {
    double seconds;
    double gain;
    int micro_batches;
  };
  // As a server decides, after it has learnt, in the second half: the mean of the steps, trials
  // included, over which whole steps beside them take so many times as long, and the usual choice.
  Decided decided(const MeasuredStep& step) {
    MicroBatchPolicy policy;
    std::vector<double> whole, all;
    std::vector<int> chosen;
    for (const auto start = Clock::now(); all.size() < 32 || all_go_on(start, 2 * o_.seconds);) {
      whole.push_back(seconds_of(step, 1));
      chosen.push_back(from_first(policy.choose(step.described())));
      all.push_back(seconds_of(step, chosen.back()));
      policy.measured(step.described(), chosen.back(), all.back(),
                      loaded_->model().seconds_waited());
    }
    const auto half = std::ssize(all) / 2;
    const double sum = std::accumulate(all.begin() + half, all.end(), 0.);
    const auto times = [&](int n) { return std::count(chosen.begin() + half, chosen.end(), n); };
    const int usual = *std::max_element(kNumbers.begin(), kNumbers.end(),
                                        [&](int a, int b) { return times(a) < times(b); });
    return {sum / static_cast<double>(std::ssize(all) - half),
            std::accumulate(whole.begin() + half, whole.end(), 0.) / sum, usual};
  }

  const BenchOptions& o_;
  const std::unique_ptr<Group> alone_;  // null: there are ranks
  Group& group_;
  const OnRow& on_row_;
  std::string exchanges_ = "gather on GPUs";
  std::unique_ptr<LoadedModel> loaded_;
};

void bench_overlap(const BenchInput& bench, const OnRow& on_row) {
  BenchOptions o = bench.options;
  if (o.tokens.empty()) o.tokens = {1, 8, 64, 256};
  OverlapBench overlap(o, on_row);
  if (!o.timeline.empty()) overlap.write_timeline();
  for (const bool is_decode : {true, false})
    for (const int n : o.tokens) overlap.measure(n, is_decode);
}

std::string overlap_header(const Json& row) {
  const int n_workers = row["workers"].get<int>();
  const std::string who = n_workers > 0
                              ? fmt::format("{} worker{}", n_workers, n_workers == 1 ? "" : "s")
                              : fmt::format("{} ranks, {}, {:g} ms a hop", row["ranks"].get<int>(),
                                            row["exchanges"].get<std::string>(),
                                            row["delay_seconds"].get<double>() * 1e3);
  return fmt::format(
      "{}\n\n"
      "| step   | tokens | ms whole |   in 2 | gain |   in 4 | gain | decided | gain | in |\n"
      "|:-------|-------:|---------:|-------:|-----:|-------:|-----:|--------:|-----:|---:|\n",
      who);
}

std::string overlap_text(const Json& row) {
  const auto ms = [&](const char* field) { return row[field].get<double>() * 1e3; };
  const auto number = [&](const char* field) { return row[field].get<double>(); };
  return fmt::format(
      "| {:6} | {:6} | {:8.2f} | {:6.2f} | {:4.2f} | {:6.2f} | {:4.2f} | {:7.2f} | {:4.2f} | {:2} "
      "|\n",
      row["step"].get<std::string>(), row["tokens"].get<int>(), ms("seconds_1"), ms("seconds_2"),
      number("gain_2"), ms("seconds_4"), number("gain_4"), ms("seconds_auto"), number("gain_auto"),
      row["micro_batches_auto"].get<int>());
}

}  // namespace

Benchmark overlap_benchmark() {
  using enum BenchFlag;
  return {
      .name = "overlap",
      .help =
          "steps of replicas, or with workers, in micro-batches, of which one computes while the "
          "rows of others travel",
      .examples =
          "  tandem bench overlap --ranks 2 --simulate-delay 1\n"
          "  tandem bench overlap --model ./DeepSeek-R1 --workers 10.0.0.2:9000\n"
          "  mpirun -np 2 --host a,b --map-by node --bind-to none tandem bench overlap --model "
          "./DeepSeek-R1 --tokens 8,64\n",
      .flags = {kOverlap, kDevice, kIsa, kTokens},
      .tokens_help = "tokens of each replica in a step, a list",
      .check = check_overlap,
      .on_ranks = bench_overlap,
      .header = overlap_header,
      .text = overlap_text};
}

}  // namespace tandem
