// A simulated engine with a real Scheduler. Its keys are hashes of all preceding tokens, so the
// next token that reads a wrong, stale or wrongly shared page, on the GPU or in host memory,
// detects it.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "scheduling/kv_cache.h"
#include "scheduling/scheduler.h"

namespace tandem::test {

inline uint64_t chained(uint64_t before, int32_t token) {
  return (before ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15 + 1;
}

// Executes the steps that a Scheduler plans.
class Simulation {
 public:
  // Before every step up to `drafts.n` tokens are drafted for each decoding sequence, of which a
  // fraction is right.
  struct Drafts {
    int n = 0;
    double right = 0;
    std::mt19937 rng{};
  };

  explicit Simulation(const Scheduler::Limits& limits)
      : scheduler(limits),
        limits_(limits),
        keys_(size_t{kPageSize} * limits.n_pages),
        host_keys_(size_t{kPageSize} * limits.n_host_pages) {}

  SequenceId add(std::vector<int32_t> prompt, int n_new, bool all_logits = false) {
    const SequenceId id = ++last_id_;
    wanted_[id] = static_cast<int>(prompt.size()) + n_new;
    expected_logits_[id].assign(wanted_[id] - 1, 1);
    n_logits_[id].resize(wanted_[id] - 1);
    if (!all_logits) std::fill_n(expected_logits_[id].begin(), prompt.size() - 1, 0);
    const int n_scored = all_logits ? static_cast<int>(prompt.size()) : 1;
    scheduler.add(id, std::move(prompt), n_scored);
    return id;
  }

  void abort(SequenceId id) {
    scheduler.remove(id);
    end(id);
  }

  // Executes one step. Returns false if there was nothing to do.
  bool step() {
    std::set<SequenceId> decoding;
    for (const auto& [id, length] : wanted_)
      if (is_decoding(id)) decoding.insert(id);
    draft();
    const std::vector<Part> plan = scheduler.plan();
    if (plan.empty()) {
      EXPECT_TRUE(wanted_.empty()) << "work is left and none is planned";
      return false;
    }
    ++n_steps;
    check_plan(plan, decoding);
    for (const PageCopy& c : scheduler.copies()) copy(c);
    compute_all(begun(plan));
    return true;
  }

  // The same in a pipeline of so many stages: executes what the last stage computes while the first
  // one computes a new share of the decoding sequences. A step that is no share comes when nothing
  // is in flight.
  bool step_of_stages(int n_stages) {
    const bool shares = scheduler.only_decodes() && scheduler.n_running() > 1;
    if (!shares && in_flight_.empty()) return step();
    if (shares) draft();
    in_flight_.push_back(begun(shares ? scheduler.plan_share(n_stages) : std::vector<Part>()));
    check_share(n_stages);
    if (std::ssize(in_flight_) < n_stages) return true;
    const std::vector<Begun> oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    if (!oldest.empty()) {
      ++n_steps;
      ++n_shares;
      compute_all(oldest);
    }
    const auto is_empty = [](const auto& parts) { return parts.empty(); };
    if (std::all_of(in_flight_.begin(), in_flight_.end(), is_empty)) in_flight_.clear();
    return true;
  }

  void run(int n_stages = 1) {
    while (step_of_stages(n_stages)) {
    }
    EXPECT_TRUE(scheduler.empty());
    EXPECT_EQ(scheduler.counts().n_available_pages, limits_.n_pages) << "pages were lost";
    EXPECT_EQ(scheduler.counts().n_free_host_pages, limits_.n_host_pages);
  }

  static int32_t next_token(std::span<const int32_t> tokens) {
    uint64_t hash = 0;
    for (const int32_t token : tokens) hash = chained(hash, token);
    return static_cast<int32_t>(hash >> 60);
  }

  const std::map<SequenceId, int>& unfinished() const { return wanted_; }

  Scheduler scheduler;
  Drafts drafts;
  int64_t n_shares = 0;  // steps of a share of the sequences
  int64_t n_steps = 0, n_computed = 0, n_copied_out = 0, n_copied_in = 0,
          n_copied_within = 0;  // pages
  int64_t n_drafted = 0, n_accepted = 0;
  std::map<SequenceId, std::vector<int32_t>> texts;
  std::map<SequenceId, int> n_ended;

 private:
  using Part = Scheduler::Part;
  // A part of a step when it begins: a sequence that is removed later is still computed.
  struct Begun {
    Part part;
    std::vector<int32_t> tokens, pages;
  };
  std::vector<Begun> begun(const std::vector<Part>& plan) const {
    std::vector<Begun> parts;
    for (const Part& part : plan) {
      const auto tokens = scheduler.tokens_and_drafts(part.id);
      const auto pages = scheduler.pages(part.id);
      parts.push_back({part, {tokens.begin(), tokens.end()}, {pages.begin(), pages.end()}});
    }
    return parts;
  }

  void compute_all(const std::vector<Begun>& parts) {
    for (const Begun& part : parts) compute(part);
    scheduler.computed();
    check_pages();
    for (const auto& [part, tokens, pages] : parts) {
      if (!part.last || wanted_.count(part.id) == 0) continue;
      decoding_.insert(part.id);
      take_tokens(part);
    }
    check_pages();
  }

  // Each sequence is in flight once, and each newest share is a fair one.
  void check_share(int n_stages) {
    std::set<SequenceId> in_flight;
    for (const std::vector<Begun>& parts : in_flight_)
      for (const Begun& b : parts) {
        EXPECT_TRUE(in_flight.insert(b.part.id).second) << b.part.id << " is in flight twice";
        EXPECT_TRUE(b.part.last && b.part.n == 1 + b.part.n_drafts);
      }
    int n_tokens = 0;
    for (const Begun& b : in_flight_.back()) {
      n_tokens += b.part.n;
      n_drafted += b.part.n_drafts;
      const auto there = static_cast<int>(b.tokens.size());
      for (int i = b.part.first; i < there - b.part.n_drafts; ++i) ++n_logits_[b.part.id].at(i);
    }
    EXPECT_LE(n_tokens, std::min(limits_.max_tokens, limits_.max_logits));
    EXPECT_LE(std::ssize(in_flight_.back()), (scheduler.n_running() + n_stages - 1) / n_stages);
  }

  void draft() {
    for (const auto& [id, length] : wanted_) {
      if (!scheduler.is_decoding(id) || drafts.n == 0) continue;
      const auto known = scheduler.tokens(id);
      std::vector<int32_t> text(known.begin(), known.end());
      const int n = std::min(static_cast<int>(drafts.rng() % (drafts.n + 1)),
                             length - static_cast<int>(known.size()) - 1);
      for (int i = 0; i < n; ++i) {
        const bool right = drafts.rng() % 1000 < 1000 * drafts.right;
        text.push_back(next_token(text) ^ (right ? 0 : 1));
      }
      scheduler.draft(id, std::span(text).last(std::max(0, n)));
    }
  }

  // Appends the tokens that the rows of logits give, until one differs from its draft.
  void take_tokens(const Scheduler::Part& part) {
    for (int row = 0; row <= part.n_drafts; ++row) {
      const bool was_drafted = scheduler.append(part.id, next_token(scheduler.tokens(part.id)));
      const auto tokens = scheduler.tokens(part.id);
      if (was_drafted) ++n_logits_[part.id].at(tokens.size() - 1);
      n_accepted += was_drafted;
      if (static_cast<int>(tokens.size()) >= wanted_.at(part.id)) {
        texts[part.id].assign(tokens.begin(), tokens.end());
        EXPECT_EQ(n_logits_[part.id], expected_logits_[part.id]) << "how often a token had logits";
        scheduler.remove(part.id);
        return end(part.id);
      }
      if (!was_drafted) return;
    }
    ADD_FAILURE() << "the last row's token cannot be a draft";
  }

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
      for (int i = part.first + part.n - part.n_logits; i < part.first + part.n - part.n_drafts;
           ++i)
        ++n_logits_[part.id].at(i);
      const auto n_tokens_there = static_cast<int>(scheduler.tokens_and_drafts(part.id).size());
      EXPECT_EQ(part.last, part.first + part.n == n_tokens_there);
      EXPECT_TRUE(part.n_drafts == 0 || part.n == 1 + part.n_drafts);
      EXPECT_LE(part.n_drafts, drafts.n);
      n_drafted += part.n_drafts;
    }
    EXPECT_LE(n_tokens, limits_.max_tokens);
    EXPECT_LE(n_logits, limits_.max_logits);
    EXPECT_LE(scheduler.counts().n_running, limits_.max_running);
    EXPECT_TRUE(planned.count(wanted_.begin()->first)) << "the oldest does not move";
    for (const SequenceId id : decoding)  // a running sequence is left out only if it has no pages
      if (scheduler.pages(id).empty()) {
        decoding_.erase(id);
      } else {
        EXPECT_TRUE(planned.count(id)) << id << " is left out";
      }
  }

  // Copies a page. After a copy from host memory the host page is overwritten.
  void copy(const PageCopy& c) {
    const bool within = c.way == PageCopy::Way::kWithin;
    ASSERT_TRUE(c.page >= 0 && c.page < limits_.n_pages);
    ASSERT_TRUE(c.other >= 0 && c.other < (within ? limits_.n_pages : limits_.n_host_pages));
    const auto gpu = keys_.begin() + kPageSize * c.page;
    const auto host = (within ? keys_.begin() : host_keys_.begin()) + kPageSize * c.other;
    if (within) {
      ASSERT_EQ(users_of(c.page), 1) << "a shared page is written";
      std::copy_n(host, kPageSize, gpu);
      ++n_copied_within;
    } else if (c.way == PageCopy::Way::kToHost) {
      std::copy_n(gpu, kPageSize, host);
      ++n_copied_out;
    } else {
      std::copy_n(host, kPageSize, gpu);
      std::fill_n(host, kPageSize, 0);
      ++n_copied_in;
    }
  }

  void compute(const Begun& begun) {
    const auto& [part, tokens, pages] = begun;
    const bool is_there = wanted_.count(part.id) > 0;
    ASSERT_LE(static_cast<size_t>(pages_for(part.first + part.n)), pages.size());
    uint64_t key = 0;
    for (int i = 0; i < part.first + part.n; ++i) {
      key = chained(key, tokens[i]);
      uint64_t& slot = keys_[size_t{kPageSize} * pages[i / kPageSize] + i % kPageSize];
      if (i < part.first) {
        ASSERT_EQ(slot, key) << "sequence " << part.id << " reads a foreign key at " << i;
      } else {
        ASSERT_TRUE(!is_there || users_of(pages[i / kPageSize]) == 1) << "a shared page is written";
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
    check_host_pages();
  }

  void check_host_pages() {
    std::set<int32_t> used;
    int n_swapped = 0;
    for (const auto& [id, length] : wanted_) {
      const auto pages = scheduler.host_pages(id);
      n_swapped += !pages.empty();
      EXPECT_TRUE(pages.empty() || scheduler.pages(id).empty()) << id << " is in both memories";
      for (const int32_t page : pages) EXPECT_TRUE(used.insert(page).second) << "a page of two";
    }
    EXPECT_EQ(scheduler.counts().n_swapped, n_swapped);
    EXPECT_EQ(scheduler.counts().n_free_host_pages + static_cast<int>(used.size()),
              limits_.n_host_pages);
  }

  const Scheduler::Limits limits_;
  std::vector<uint64_t> keys_, host_keys_;
  std::map<SequenceId, int> wanted_;  // length at which each sequence ends
  std::map<SequenceId, std::vector<int>> n_logits_, expected_logits_;  // for each token
  std::set<SequenceId> decoding_;
  std::deque<std::vector<Begun>> in_flight_;  // the newest last
  SequenceId last_id_ = 0;
};

inline std::vector<int32_t> text(int n, int seed) {
  std::vector<int32_t> tokens(n);
  uint64_t state = seed;
  for (int32_t& token : tokens) token = static_cast<int32_t>((state = chained(state, 7)) >> 60);
  return tokens;
}

// The tokens that a sequence must produce in any batch.
inline std::vector<int32_t> alone(std::vector<int32_t> tokens, int n_new) {
  for (int i = 0; i < n_new; ++i) tokens.push_back(Simulation::next_token(tokens));
  return tokens;
}

// Prompts begin with one of few texts, so that pages are shared; some are repeated completely.
inline std::vector<int32_t> prompt_with_known_beginning(std::mt19937& rng, int longest) {
  const auto up_to = [&](int n) { return static_cast<int>(rng() % n); };
  std::vector<int32_t> prompt = text(1 + up_to(longest), up_to(3));
  if (prompt.size() > kPageSize && up_to(4) == 0)  // the same pages after a different first page
    std::ranges::copy(text(kPageSize, up_to(3)), prompt.begin());
  if (up_to(3) == 0) return prompt;
  prompt.resize(std::max(1, static_cast<int>(prompt.size()) - up_to(40)));
  for (int n = up_to(60); n > 0 && static_cast<int>(prompt.size()) < longest; --n)
    prompt.push_back(up_to(16));
  return prompt;
}

}  // namespace tandem::test
