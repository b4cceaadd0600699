#include "engine/scheduler.h"

#include <utility>

#include "core/check.h"
#include "engine/kv_cache.h"

namespace tandem {

Scheduler::Scheduler(const Limits& limits)
    : limits_(limits), pool_(limits.n_pages, limits.keeps_pages) {
  require(limits.n_pages > 0, "{} pages of KV cache: give it more memory", limits.n_pages);
  require(limits.max_running > 0 && limits.max_running <= limits.max_tokens,
          "{} sequences at a time and {} tokens a step: each sequence needs a token of a step",
          limits.max_running, limits.max_tokens);
  check(limits.max_running <= limits.max_logits, "each sequence may want logits");
}

const std::vector<Scheduler::Part>& Scheduler::plan() {
  check(plan_.empty(), "the last plan has run");
  n_planned_ = n_planned_logits_ = 0;
  plan_decodes();
  plan_prompts();
  admit();
  return plan_;
}

// By age: a page that is missing comes from the youngest, which is not in the plan yet.
void Scheduler::plan_decodes() {
  for (auto it = running_.begin(); it != running_.end(); ++it) {
    if (it->second.n_pending() != 1) continue;
    if (!get_page(it)) return;  // it was the youngest itself
    take_part(*it);
  }
}

// Those that were let in have all the pages of their prompt.
void Scheduler::plan_prompts() {
  for (auto& entry : running_)
    if (entry.second.n_pending() > 1 && has_room()) take_part(entry);
}

void Scheduler::admit() {
  while (!waiting_.empty() && has_room() &&
         static_cast<int>(running_.size()) < limits_.max_running) {
    const auto oldest = waiting_.begin();
    if (!let_in(oldest->second)) return;
    const auto entry = running_.insert(waiting_.extract(oldest)).position;
    take_part(*entry);
  }
}

// As many tokens as there is room for, in tokens and in logits.
void Scheduler::take_part(Sequences::value_type& entry) {
  const auto& [id, s] = entry;
  const int n_without = std::max(0, s.next_logits - s.n_done);
  const int n = std::min({s.n_pending(), limits_.max_tokens - n_planned_,
                          n_without + limits_.max_logits - n_planned_logits_});
  if (n == 0) return;
  const int n_logits = std::max(0, n - n_without);
  plan_.push_back({id, s.n_done, n, n_logits, n == s.n_pending()});
  n_planned_ += n;
  n_planned_logits_ += n_logits;
}

// Makes sure that there is a page for the last token. False: the sequence had to give up its own.
bool Scheduler::get_page(Sequences::iterator of) {
  Sequence& sequence = of->second;
  if (pages_for(static_cast<int64_t>(sequence.tokens.size())) <=
      static_cast<int>(sequence.pages.size()))
    return true;
  while (pool_.n_available() == 0) {
    const bool is_youngest = std::next(of) == running_.end();
    preempt_youngest();
    if (is_youngest) return false;
  }
  sequence.pages.push_back(pool_.take());
  return true;
}

void Scheduler::preempt_youngest() {
  const auto youngest = std::prev(running_.end());
  pool_.release(youngest->second.pages);
  waiting_.insert(running_.extract(youngest));
  ++n_preemptions_;
}

// Gives a waiting sequence pages for all its tokens and leaves one page for each that runs, so that
// it is not sent away again at once. A page with tokens whose logits are wanted stays its own.
bool Scheduler::let_in(Sequence& s) {
  const auto n = static_cast<int>(s.tokens.size());
  s.pages = pool_.match(s.tokens, s.next_logits / kPageSize);
  const auto n_found = static_cast<int>(s.pages.size());
  const int n_missing = pages_for(n) - n_found;
  const int n_left = pool_.n_available() - n_missing;
  if (n_left < (running_.empty() ? 0 : static_cast<int>(running_.size()))) {
    check(!running_.empty(), "a sequence fits into the empty cache");
    pool_.release(s.pages);
    return false;
  }
  for (int i = 0; i < n_missing; ++i) s.pages.push_back(pool_.take());
  s.n_done = n_found * kPageSize;
  if (s.n_cached < 0) {
    s.n_cached = s.n_done;
    n_prompt_tokens_ += n;
    n_cached_tokens_ += s.n_cached;
  }
  return true;
}

void Scheduler::computed() {
  for (const Part& part : plan_) {
    Sequence& s = running_.at(part.id);
    const int first_full = s.n_done / kPageSize;
    s.n_done += part.n;
    s.next_logits = std::max(s.next_logits, s.n_done);
    for (int page = first_full; page < s.n_done / kPageSize; ++page)
      pool_.publish(s.pages, page,
                    std::span(s.tokens).subspan(size_t{kPageSize} * page, kPageSize));
  }
  plan_.clear();
}

void Scheduler::add(SequenceId id, std::vector<int32_t> prompt, bool all_logits) {
  check(!prompt.empty() && static_cast<int64_t>(prompt.size()) <= longest_sequence(),
        "a prompt fits into the cache");
  const bool youngest = (waiting_.empty() || waiting_.rbegin()->first < id) &&
                        (running_.empty() || running_.rbegin()->first < id);
  check(youngest, "ids ascend");
  Sequence& s = waiting_[id];
  s.tokens = std::move(prompt);
  s.next_logits = all_logits ? 0 : static_cast<int>(s.tokens.size()) - 1;
}

void Scheduler::append(SequenceId id, int32_t token) {
  Sequence& s = running_.at(id);
  check(s.n_pending() == 0, "a token follows when all before it are computed");
  s.tokens.push_back(token);
  check(static_cast<int64_t>(s.tokens.size()) <= longest_sequence(), "a sequence fits the cache");
}

void Scheduler::remove(SequenceId id) {
  check(plan_.empty(), "nothing is removed while a plan runs");
  if (const auto it = running_.find(id); it != running_.end()) {
    pool_.release(it->second.pages);
    running_.erase(it);
    return;
  }
  check(waiting_.erase(id) == 1, "only a sequence that is there is removed");
}

const Scheduler::Sequence& Scheduler::at(SequenceId id) const {
  const auto it = running_.find(id);
  return it != running_.end() ? it->second : waiting_.at(id);
}

Scheduler::Counts Scheduler::counts() const {
  return {.n_running = static_cast<int>(running_.size()),
          .n_waiting = static_cast<int>(waiting_.size()),
          .n_pages = pool_.n_pages(),
          .n_available_pages = pool_.n_available(),
          .n_preemptions = n_preemptions_,
          .n_prompt_tokens = n_prompt_tokens_,
          .n_cached_tokens = n_cached_tokens_};
}

}  // namespace tandem
