// Lock-step of ranks, by simulation: random traces of steps whose calls of groups and windows are
// recorded. The ranks of a group make the same calls, and which calls a step makes follows from
// what was agreed alone: the sizes of its batches, and the number of its micro-batches.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

#include "tests/rank_grids.h"

namespace tandem::test {
namespace {

struct RankCall {
  char kind;
  int64_t size, other;  // bytes and root, or rank of a window's signal
  bool operator==(const RankCall&) const = default;
};
using RankCalls = std::vector<RankCall>;

// What one rank calls of each group and window. Groups have the same name on all of their ranks.
class Recording {
 public:
  RankCalls& of(const std::string& name) {
    const std::lock_guard lock(mutex_);
    auto& calls = calls_[name];
    if (!calls) calls = std::make_unique<RankCalls>();
    return *calls;
  }
  void add(RankCalls& calls, RankCall call) {
    const std::lock_guard lock(mutex_);
    calls.push_back(call);
  }
  std::map<std::string, RankCalls> all() {
    const std::lock_guard lock(mutex_);
    std::map<std::string, RankCalls> copies;
    for (const auto& [name, calls] : calls_) copies[name] = *calls;
    return copies;
  }
  // What was called since the last time, but announcements: those of steps have one broadcast or
  // two, by their size, and heartbeats come in between.
  std::map<std::string, RankCalls> since() {
    const std::lock_guard lock(mutex_);
    std::map<std::string, RankCalls> more;
    for (const auto& [name, calls] : calls_) {
      size_t& seen = seen_[name];
      for (; seen < calls->size(); ++seen)
        if ((*calls)[seen].kind != 'c') more[name].push_back((*calls)[seen]);
    }
    return more;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<RankCalls>> calls_;
  std::map<std::string, size_t> seen_;
};

class RecordedWindow final : public Window {
 public:
  RecordedWindow(std::unique_ptr<Window> window, Recording& recording, RankCalls& calls)
      : window_(std::move(window)), recording_(recording), calls_(calls) {}
  Bytes of(int rank) const override { return window_->of(rank); }
  void signal(int rank, uint64_t number) override {
    recording_.add(calls_, {'s', 0, rank});
    window_->signal(rank, number);
  }
  void wait(int rank, uint64_t number) override {
    recording_.add(calls_, {'w', 0, rank});
    window_->wait(rank, number);
  }

 private:
  const std::unique_ptr<Window> window_;
  Recording& recording_;
  RankCalls& calls_;
};

// Sizes that all ranks know. Those of all_to_all are of two ranks, which compare them.
class RecordedGroup final : public Group {
 public:
  RecordedGroup(Group& group, Recording& recording, std::string name)
      : group_(group), recording_(recording), name_(std::move(name)), calls_(recording.of(name_)) {}
  RecordedGroup(std::unique_ptr<Group> owned, Recording& recording, std::string name)
      : RecordedGroup(*owned, recording, std::move(name)) {
    owned_ = std::move(owned);
  }
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  int world_rank(int rank) const override { return group_.world_rank(rank); }
  void set_patience(Patience patience) override { group_.set_patience(patience); }
  void barrier() override {
    recording_.add(calls_, {'b', 0, 0});
    group_.barrier();
  }
  void broadcast(Bytes x, int root) override {
    recording_.add(calls_, {'c', std::ssize(x), root});
    group_.broadcast(x, root);
  }
  void all_gather(ConstBytes mine, Pieces<std::byte> out) override {
    recording_.add(calls_, {'g', std::ssize(out.all), 0});
    group_.all_gather(mine, out);
  }
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override {
    recording_.add(calls_, {'a', 0, 0});
    group_.all_to_all(in, out);
  }
  void reduce_scatter(Pieces<const float> in, std::span<float> out) override {
    recording_.add(calls_, {'r', std::ssize(in.all), 0});
    group_.reduce_scatter(in, out);
  }
  void all_reduce(std::span<float> x) override {
    recording_.add(calls_, {'+', std::ssize(x), 0});
    group_.all_reduce(x);
  }
  std::unique_ptr<Group> split(int color) override {
    recording_.add(calls_, {'/', 0, 0});
    auto part = group_.split(color);
    const std::string name = fmt::format("{}/{}.{}", name_, n_split_++, color);
    if (!part) return nullptr;
    return std::make_unique<RecordedGroup>(std::move(part), recording_, name);
  }
  std::unique_ptr<Window> allocate_window(int64_t bytes) override {
    recording_.add(calls_, {'m', bytes, 0});
    const std::string name = fmt::format("{} window {}", name_, n_windows_++);
    return std::make_unique<RecordedWindow>(group_.allocate_window(bytes), recording_,
                                            recording_.of(name));
  }
  void wait_for_rank(int rank, const std::function<bool()>& done) override {
    group_.wait_for_rank(rank, done);
  }

 private:
  std::unique_ptr<Group> owned_;
  Group& group_;
  Recording& recording_;
  const std::string name_;
  RankCalls& calls_;
  int n_split_ = 0, n_windows_ = 0;
};

constexpr int kSequences = 2, kContext = kPageSize;  // of each replica; tokens of each

// A random step: of each sequence of each replica none, one or a few tokens. Half of the steps have
// the sizes of an earlier one.
class Trace {
 public:
  Trace(LoadedModel& loaded, unsigned seed)
      : vocab_(loaded.config().vocab), random_(seed), lengths_(loaded.model().n_replicas()) {
    for (auto& lengths : lengths_) lengths.assign(kSequences, 0);
    const std::vector<uint32_t> allowed((vocab_ + 31) / 32, ~0u);
    loaded.model().set_vocabulary({allowed, vocab_});
  }

  // The sizes of the next step, which decide its calls; some replica has tokens, unless steps are
  // in flight.
  std::vector<int> next(bool in_flight = false) {
    std::vector<int> sizes = draw();
    while (!in_flight && std::all_of(sizes.begin(), sizes.end(), [](int n) { return n == 0; }))
      sizes = draw();
    return sizes;
  }

  void run(LoadedModel& loaded, bool in_flight = false) {
    if (in_flight)
      loaded.model().forward_in_flight(batches_, loaded.cache());
    else
      loaded.model().forward(batches_, loaded.cache());
    std::vector<LogitsWanted> wanted;
    size_t n = 0;
    for (const Arrays& a : arrays_) {
      wanted.push_back({.copied = std::span(kRows).first(a.rows.size())});
      n += a.rows.size();
    }
    logits_.resize(n * vocab_);
    loaded.model().read_logits(
        wanted, {}, {logits_.data(), static_cast<int64_t>(n), vocab_, vocab_, DType::kF32});
  }

 private:
  std::vector<int> draw_sizes() {
    if (!earlier_.empty() && random_() % 2 == 0) return earlier_[random_() % earlier_.size()];
    constexpr int kNumbers[] = {0, 0, 1, 1, 9};
    std::vector<int>& sizes = earlier_.emplace_back(lengths_.size() * kSequences);
    for (int& n : sizes) n = kNumbers[random_() % std::size(kNumbers)];
    return sizes;
  }
  std::vector<int> draw() {
    batches_.clear();
    arrays_ = std::vector<Arrays>(lengths_.size());
    std::vector<int> sizes = draw_sizes();
    for (size_t replica = 0; replica < lengths_.size(); ++replica) {
      Arrays& a = arrays_[replica];
      for (int s = 0; s < kSequences; ++s) {
        const int n = sizes[replica * kSequences + s];
        int& length = lengths_[replica][s];
        if (length + n > kContext) length = 0;
        for (int t = 0; t < n; ++t) {
          a.tokens.push_back(static_cast<int32_t>(random_() % static_cast<unsigned>(vocab_)));
          a.positions.push_back(length + t);
        }
        length += n;
        if (n > 0) {
          a.sequences.push_back({static_cast<int32_t>(a.tokens.size()) - n, n, length,
                                 std::span(kPages).subspan(s, 1)});
          a.rows.push_back(static_cast<int32_t>(a.tokens.size()) - 1);
        }
      }
      batches_.push_back({a.tokens, a.positions, a.sequences, a.rows});
    }
    return sizes;
  }

  static constexpr int32_t kRows[kSequences] = {0, 1}, kPages[kSequences] = {0, 1};
  struct Arrays {
    std::vector<int32_t> tokens, positions, rows;
    std::vector<Sequence> sequences;
  };
  const int vocab_;
  std::mt19937 random_;
  std::vector<std::vector<int>> earlier_;  // sizes
  std::vector<std::vector<int>> lengths_;  // [replicas][kSequences]
  std::vector<Arrays> arrays_;
  std::vector<Batch> batches_;
  std::vector<float> logits_;
};

std::string text_of(const std::map<std::string, RankCalls>& calls) {
  std::string text;
  for (const auto& [name, of_group] : calls) {
    text += name + ":";
    for (const RankCall& call : of_group)
      text += fmt::format(" {}{},{}", call.kind, call.size, call.other);
    text += "\n";
  }
  return text;
}

bool is_window(const std::string& name) { return name.find("window") != std::string::npos; }

class LockStep : public testing::TestWithParam<RankGrid> {};

// In flight, those of the last steps decide, one for each stage.
void expect_lock_step(const RankGrid& grid, bool in_flight) {
  ModelOptions options = {.directory = kGolden + "v3_bf16",
                          .context = kContext,
                          .kv_fraction = 0.5,
                          .max_kv_tokens = kSequences * kContext,
                          .step_tokens = 32,
                          .max_logits = kSequences,
                          .n_replicas = grid.dp,
                          .tp = grid.tp,
                          .n_stages = grid.pp,
                          .dispatch = grid.dispatch,
                          .micro_batches = grid.micro_batches,
                          .simulated_hosts = grid.hosts};
  const int n_ranks = grid.dp * grid.tp * grid.pp, n_steps = is_long() ? 1'000 : 60;
  std::vector<Recording> recordings(n_ranks);
  run_local_ranks({n_ranks}, [&](Group& world) {
    RecordedGroup group(world, recordings[world.rank()], "world");
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    if (!steps.leads()) return steps.follow();
    Recording& recording = recordings[0];
    Trace trace(loaded, 7);
    std::map<std::vector<int>, std::map<std::string, RankCalls>> calls_of;
    int n_again = 0;
    std::deque<std::vector<int>> last;  // of each stage, the first one's first
    for (int i = 0; i < (in_flight ? grid.pp : 1); ++i) {
      last.push_front(trace.next(in_flight));
      trace.run(loaded, in_flight);
    }
    recording.since();
    for (int i = 0; i < n_steps; ++i) {
      last.push_front(trace.next(in_flight));
      last.pop_back();
      trace.run(loaded, in_flight);
      const std::map<std::string, RankCalls> calls = recording.since();
      std::vector<int> sizes;
      for (const auto& of_stage : last) sizes.insert(sizes.end(), of_stage.begin(), of_stage.end());
      const auto [known, is_new] = calls_of.try_emplace(sizes, calls);
      n_again += !is_new;
      ASSERT_EQ(text_of(calls), text_of(known->second)) << "step " << i;
    }
    EXPECT_GT(n_again, n_steps / (in_flight ? 40 : 10));
    steps.end();
  });
  // The ranks of each group, and of its window.
  std::map<std::string, std::map<int, RankCalls>> of_groups;
  for (int rank = 0; rank < n_ranks; ++rank)
    for (auto& [name, calls] : recordings[rank].all()) of_groups[name][rank] = std::move(calls);
  int n_shared = 0;
  for (const auto& [name, of_ranks] : of_groups) {
    SCOPED_TRACE(name);
    const RankCalls& first = of_ranks.begin()->second;
    n_shared += of_ranks.size() > 1 && std::ssize(first) > n_steps / 2;
    for (const auto& [rank, calls] : of_ranks) {
      EXPECT_EQ(calls.size(), first.size()) << "rank " << rank;
      EXPECT_TRUE(is_window(name) || calls == first) << "rank " << rank;
    }
  }
  EXPECT_GT(n_shared, 0);
}

TEST_P(LockStep, CallsFollowFromTheSizesOfBatches) { expect_lock_step(GetParam(), false); }

TEST_P(LockStep, CallsInFlightFollowFromTheSizesOfTheLastBatches) {
  if (GetParam().pp > 1) expect_lock_step(GetParam(), true);
}

INSTANTIATE_TEST_SUITE_P(Grids, LockStep,
                         testing::Values(RankGrid{1, 3},
                                         RankGrid{3, 1, ExpertDispatch::kGather, 1, 1},
                                         RankGrid{2, 2, ExpertDispatch::kAllToAll, 1, 1},
                                         RankGrid{4, 1, ExpertDispatch::kLowLatency, 1, 2},
                                         RankGrid{2, 1, ExpertDispatch::kAllToAll, 2, 1},
                                         RankGrid{4, 1, ExpertDispatch::kAllToAll, 1, 3, {2, 2}},
                                         RankGrid{1, 1, ExpertDispatch::kAuto, 2}),
                         [](const auto& info_of) { return fmt::format("Grid{}", info_of.index); });

}  // namespace
}  // namespace tandem::test
