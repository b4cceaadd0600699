// The scheduler against a simulated model whose keys are hashes of all tokens before them: a wrong,
// stale or wrongly shared page is seen by the next token that reads it.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "engine/kv_cache.h"

namespace tandem::test {
namespace {

uint64_t chained(uint64_t before, int32_t token) {
  return (before ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15 + 1;
}

// Plays the engine around a Scheduler.
class Simulation {
 public:
  explicit Simulation(const Scheduler::Limits& limits)
      : scheduler(limits), limits_(limits), keys_(size_t{kPageSize} * limits.n_pages) {}

  SequenceId add(std::vector<int32_t> prompt, int n_new, bool all_logits = false) {
    const SequenceId id = ++last_id_;
    wanted_[id] = static_cast<int>(prompt.size()) + n_new;
    expected_logits_[id].assign(wanted_[id] - 1, 1);
    n_logits_[id].resize(wanted_[id] - 1);
    if (!all_logits) std::fill_n(expected_logits_[id].begin(), prompt.size() - 1, 0);
    scheduler.add(id, std::move(prompt), all_logits);
    return id;
  }

  void abort(SequenceId id) {
    scheduler.remove(id);
    end(id);
  }

  // One step. False: there was nothing to do.
  bool step() {
    std::set<SequenceId> decoding;
    for (const auto& [id, length] : wanted_)
      if (is_decoding(id)) decoding.insert(id);
    const std::vector<Scheduler::Part> plan = scheduler.plan();
    if (plan.empty()) {
      EXPECT_TRUE(wanted_.empty()) << "work is left and none is planned";
      return false;
    }
    ++n_steps;
    check_plan(plan, decoding);
    for (const Scheduler::Part& part : plan) compute(part);
    scheduler.computed();
    check_pages();
    for (const Scheduler::Part& part : plan) {
      if (!part.last) continue;
      decoding_.insert(part.id);
      scheduler.append(part.id, next_token(scheduler.tokens(part.id)));
      if (static_cast<int>(scheduler.tokens(part.id).size()) < wanted_.at(part.id)) continue;
      const auto tokens = scheduler.tokens(part.id);
      texts[part.id].assign(tokens.begin(), tokens.end());
      EXPECT_EQ(n_logits_[part.id], expected_logits_[part.id]) << "how often a token had logits";
      scheduler.remove(part.id);
      end(part.id);
    }
    return true;
  }

  void run() {
    while (step()) {
    }
    EXPECT_TRUE(scheduler.empty());
    EXPECT_EQ(scheduler.counts().n_available_pages, limits_.n_pages) << "pages were lost";
  }

  static int32_t next_token(std::span<const int32_t> tokens) {
    uint64_t hash = 0;
    for (const int32_t token : tokens) hash = chained(hash, token);
    return static_cast<int32_t>(hash >> 60);
  }

  const std::map<SequenceId, int>& unfinished() const { return wanted_; }

  Scheduler scheduler;
  int64_t n_steps = 0, n_computed = 0;
  std::map<SequenceId, std::vector<int32_t>> texts;
  std::map<SequenceId, int> n_ended;

 private:
  bool is_decoding(SequenceId id) const {
    return decoding_.count(id) > 0 && !scheduler.pages(id).empty();
  }

  void end(SequenceId id) {
    wanted_.erase(id);
    decoding_.erase(id);
    ++n_ended[id];
  }

  void check_plan(const std::vector<Scheduler::Part>& plan, const std::set<SequenceId>& decoding) {
    int n_tokens = 0, n_logits = 0;
    std::set<SequenceId> planned;
    for (const Scheduler::Part& part : plan) {
      EXPECT_TRUE(planned.insert(part.id).second) << "twice in a step";
      EXPECT_GT(part.n, 0);
      n_tokens += part.n;
      n_logits += part.n_logits;
      for (int i = part.first + part.n - part.n_logits; i < part.first + part.n; ++i)
        ++n_logits_[part.id].at(i);
      EXPECT_EQ(part.last,
                part.first + part.n == static_cast<int>(scheduler.tokens(part.id).size()));
    }
    EXPECT_LE(n_tokens, limits_.max_tokens);
    EXPECT_LE(n_logits, limits_.max_logits);
    EXPECT_LE(scheduler.counts().n_running, limits_.max_running);
    EXPECT_TRUE(planned.count(wanted_.begin()->first)) << "the oldest does not move";
    for (const SequenceId id : decoding)  // a stream waits only for pages
      if (scheduler.pages(id).empty()) {
        decoding_.erase(id);
      } else {
        EXPECT_TRUE(planned.count(id)) << id << " is left out";
      }
  }

  void compute(const Scheduler::Part& part) {
    const auto tokens = scheduler.tokens(part.id);
    const auto pages = scheduler.pages(part.id);
    ASSERT_LE(static_cast<size_t>(pages_for(part.first + part.n)), pages.size());
    uint64_t key = 0;
    for (int i = 0; i < part.first + part.n; ++i) {
      key = chained(key, tokens[i]);
      uint64_t& slot = keys_[size_t{kPageSize} * pages[i / kPageSize] + i % kPageSize];
      if (i < part.first) {
        ASSERT_EQ(slot, key) << "sequence " << part.id << " reads a foreign key at " << i;
      } else {
        ASSERT_EQ(users_of(pages[i / kPageSize]), 1) << "a shared page is written";
        slot = key;
        ++n_computed;
      }
    }
  }

  int users_of(int32_t page) const {
    int n = 0;
    for (const auto& [id, length] : wanted_)
      for (const int32_t p : scheduler.pages(id)) n += p == page;
    return n;
  }

  void check_pages() {
    std::set<int32_t> used;
    for (const auto& [id, length] : wanted_) {
      std::set<int32_t> own;
      for (const int32_t page : scheduler.pages(id)) {
        ASSERT_TRUE(page >= 0 && page < limits_.n_pages);
        EXPECT_TRUE(own.insert(page).second) << "a page twice in a sequence";
        used.insert(page);
      }
    }
    EXPECT_EQ(scheduler.counts().n_available_pages + static_cast<int>(used.size()),
              limits_.n_pages);
  }

  const Scheduler::Limits limits_;
  std::vector<uint64_t> keys_;
  std::map<SequenceId, int> wanted_;                                   // length at which each ends
  std::map<SequenceId, std::vector<int>> n_logits_, expected_logits_;  // of each token
  std::set<SequenceId> decoding_;
  SequenceId last_id_ = 0;
};

std::vector<int32_t> text(int n, int seed) {
  std::vector<int32_t> tokens(n);
  uint64_t state = seed;
  for (int32_t& token : tokens) token = static_cast<int32_t>((state = chained(state, 7)) >> 60);
  return tokens;
}

// What a sequence must say whatever happens around it.
std::vector<int32_t> alone(std::vector<int32_t> tokens, int n_new) {
  for (int i = 0; i < n_new; ++i) tokens.push_back(Simulation::next_token(tokens));
  return tokens;
}

// Prompts begin with one of few texts, so that pages are shared; some repeat wholly.
std::vector<int32_t> random_prompt(std::mt19937& rng, int longest) {
  const auto up_to = [&](int n) { return static_cast<int>(rng() % n); };
  std::vector<int32_t> prompt = text(1 + up_to(longest), up_to(3));
  if (prompt.size() > kPageSize && up_to(4) == 0)  // the same pages behind another one
    std::ranges::copy(text(kPageSize, up_to(3)), prompt.begin());
  if (up_to(3) == 0) return prompt;
  prompt.resize(std::max(1, static_cast<int>(prompt.size()) - up_to(40)));
  for (int n = up_to(60); n > 0 && static_cast<int>(prompt.size()) < longest; --n)
    prompt.push_back(up_to(16));
  return prompt;
}

void play_random_trace(int seed) {
  std::mt19937 rng(seed);
  const auto up_to = [&](int n) { return static_cast<int>(rng() % n); };
  Scheduler::Limits limits;
  limits.n_pages = 1 + up_to(24);
  limits.max_tokens = 1 + up_to(100);
  limits.max_running = 1 + up_to(std::min(limits.max_tokens, 12));
  limits.max_logits = limits.max_running + (up_to(2) ? up_to(20) : 0);
  limits.keeps_pages = up_to(4) > 0;
  Simulation simulation(limits);
  const int longest = limits.n_pages * kPageSize;

  std::map<SequenceId, std::vector<int32_t>> expected;
  int64_t n_tokens = 0;
  for (int left = 1 + up_to(25); left > 0 || up_to(8) > 0;) {
    const int what = up_to(20);
    if (what < 5 && left > 0) {
      --left;
      const auto prompt = random_prompt(rng, std::min(longest - 1, 300));
      const int n_new = 1 + up_to(std::min<int>(150, longest - static_cast<int>(prompt.size())));
      n_tokens += static_cast<int64_t>(prompt.size()) + n_new;
      expected[simulation.add(prompt, n_new, up_to(4) == 0)] = alone(prompt, n_new);
    } else if (what == 5 && !simulation.unfinished().empty() && up_to(3) == 0) {
      auto victim = simulation.unfinished().begin();
      std::advance(victim, up_to(static_cast<int>(simulation.unfinished().size())));
      const SequenceId id = victim->first;
      simulation.abort(id);
      expected[id].clear();
    } else if (what == 6 && up_to(5) == 0) {
      simulation.scheduler.forget_pages();
    } else {
      simulation.step();
    }
    if (testing::Test::HasFatalFailure() || testing::Test::HasNonfatalFailure()) return;
  }
  simulation.run();
  for (const auto& [id, tokens] : expected) {
    EXPECT_EQ(simulation.n_ended[id], 1) << id;
    if (tokens.empty()) continue;  // aborted
    EXPECT_EQ(simulation.texts[id], tokens) << id;
  }
  EXPECT_LE(simulation.n_steps, n_tokens) << "every step moves the oldest";
}

TEST(Scheduler, RandomTraces) {
  for (int seed = 0; seed < 2000 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    play_random_trace(seed);
  }
}

TEST(Scheduler, PromptsComeInPiecesBesideDecodes) {
  Simulation s({.n_pages = 32, .max_tokens = 100, .max_running = 8});
  const SequenceId stream = s.add(text(10, 1), 50);
  s.step();
  s.add(text(250, 2), 5);
  for (const int piece : {99, 99, 52}) {
    const auto plan = s.scheduler.plan();
    ASSERT_EQ(plan.size(), 2);
    EXPECT_EQ(plan[0].id, stream);
    EXPECT_EQ(plan[0].n, 1);
    EXPECT_EQ(plan[1].n, piece);
    EXPECT_EQ(plan[1].last, piece == 52);
    s.scheduler.computed();
    for (const auto& part : plan)
      if (part.last) s.scheduler.append(part.id, 1);
  }
}

TEST(Scheduler, LettingInLeavesAPageForEachThatRuns) {
  Simulation s({.n_pages = 4, .max_tokens = 512, .max_running = 8});
  s.add(text(64, 1), 10);
  s.add(text(128, 2), 1);  // 2 of the 3 pages left: one stays for the first
  s.add(text(1, 3), 1);    // none stays for the second
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_waiting, 1);
  s.run();
}

TEST(Scheduler, TheYoungestGivesWayAndComesBack) {
  Simulation s({.n_pages = 4, .max_tokens = 64, .max_running = 4, .keeps_pages = false});
  const auto first = s.add(text(60, 1), 190);  // grows to all four pages
  const auto second = s.add(text(60, 2), 20);
  s.run();
  EXPECT_EQ(s.texts[first], alone(text(60, 1), 190));
  EXPECT_EQ(s.texts[second], alone(text(60, 2), 20));
  EXPECT_EQ(s.scheduler.counts().n_preemptions, 0) << "the second ends before pages run out";

  Simulation tight({.n_pages = 4, .max_tokens = 64, .max_running = 4, .keeps_pages = false});
  tight.add(text(60, 1), 190);
  tight.add(text(60, 2), 190);
  tight.run();
  EXPECT_GE(tight.scheduler.counts().n_preemptions, 1);
}

TEST(Scheduler, ARepeatedPromptIsFoundAndNotComputedAgain) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  s.add(text(300, 1), 1);
  s.run();
  EXPECT_EQ(s.n_computed, 300);
  const auto again = s.add(text(300, 1), 2);
  s.step();
  EXPECT_EQ(s.scheduler.cached_tokens(again), 256);
  s.run();
  EXPECT_EQ(s.n_computed, 300 + 45);
  // A prompt of whole pages computes its last page again: its last token's logits are needed.
  s.add(text(256, 1), 1);
  s.run();
  EXPECT_EQ(s.n_computed, 300 + 45 + 64);
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 256 + 192);
  EXPECT_EQ(s.scheduler.counts().n_prompt_tokens, 300 + 300 + 256);
}

TEST(Scheduler, PagesThatWereNotUsedForLongestAreGivenUpFirst) {
  Simulation s({.n_pages = 8, .max_tokens = 512, .max_running = 1});
  const auto play = [&](int n, int seed) {
    const auto id = s.add(text(n, seed), 1);
    s.step();
    return s.n_ended[id];
  };
  play(193, 1);  // 3 pages kept, 1 empty again
  play(193, 2);  // 3 more
  play(193, 1);  // used again: now younger than those of 2
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 192);
  play(193, 3);  // takes two empty ones and the last pages of 2
  play(193, 1);
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 2 * 192);
  play(193, 2);
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 2 * 192 + 64);
}

TEST(Scheduler, SequencesThatStartTogetherShareTheirPagesOnceComputed) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  s.add(text(130, 1), 3);
  s.add(text(130, 1), 3);
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_available_pages, 16 - 2 - 2);
  s.run();
}

TEST(Scheduler, APromptWhoseTokensAllWantLogitsSharesTheRowsWithOthers) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4, .max_logits = 100});
  s.add(text(300, 1), 1);
  s.run();
  s.add(text(10, 2), 20);
  s.step();
  const auto scored = s.add(text(300, 1), 1, true);
  s.add(text(200, 3), 1);
  const auto plan = s.scheduler.plan();
  ASSERT_EQ(plan.size(), 3);
  EXPECT_EQ(plan[1].n, 99) << "a row is the first one's; none of the cached pages is taken";
  EXPECT_EQ(plan[2].n, 199) << "no row is left for its last token";
  EXPECT_FALSE(plan[2].last);
  EXPECT_EQ(s.scheduler.cached_tokens(scored), 0);
}

TEST(Scheduler, AFoundPageHasTheSamePagesBeforeIt) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  const auto prompt = [](int first_page, int second_page) {
    std::vector<int32_t> tokens = text(kPageSize, first_page);
    for (const int32_t token : text(kPageSize, second_page)) tokens.push_back(token);
    tokens.push_back(1);
    return tokens;
  };
  for (const int first_page : {1, 2}) {
    s.add(prompt(first_page, 10 + first_page), 1);
    s.run();
  }
  const auto mixed = s.add(prompt(2, 11), 1);
  s.step();
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, kPageSize) << "the second page stood elsewhere";
  EXPECT_EQ(s.n_ended[mixed], 1);
}

TEST(Scheduler, ForgottenPagesAreNotFound) {
  Simulation s({.n_pages = 16, .max_tokens = 512, .max_running = 4});
  s.add(text(300, 1), 1);
  s.run();
  s.scheduler.forget_pages();
  s.add(text(300, 1), 1);
  s.run();
  EXPECT_EQ(s.scheduler.counts().n_cached_tokens, 0);
}

}  // namespace
}  // namespace tandem::test
