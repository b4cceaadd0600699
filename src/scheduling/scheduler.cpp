#include "scheduling/scheduler.h"

#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/rounding.h"
#include "scheduling/kv_cache.h"

namespace tandem {

Scheduler::Scheduler(const Limits& limits)
    : limits_(limits), pool_(limits.n_pages, limits.keeps_pages) {
  require(limits.n_pages > 0, "{} pages of KV cache: give it more memory", limits.n_pages);
  require(limits.max_running > 0 && limits.max_running <= limits.max_tokens,
          "{} sequences at a time and {} tokens a step: each sequence needs a token of a step",
          limits.max_running, limits.max_tokens);
  check(limits.max_running <= limits.max_logits, "each sequence may want logits");
  free_host_pages_.resize(limits.n_host_pages);
  std::iota(free_host_pages_.rbegin(), free_host_pages_.rend(), 0);
}

const std::vector<Scheduler::Part>& Scheduler::plan() {
  check(in_flight_.empty(), "the last plan has run");
  begin_plan();
  plan_decodes();
  plan_prompts();
  admit();
  return planned();
}

void Scheduler::begin_plan() {
  n_planned_ = n_planned_logits_ = 0;
  plan_.clear();
  copies_.clear();
}

const std::vector<Scheduler::Part>& Scheduler::planned() {
  if (!plan_.empty()) in_flight_.push_back(plan_);
  return plan_;
}

bool Scheduler::only_decodes() const {
  return pool_.n_available() >= n_running() && !can_admit() &&
         std::all_of(running_.begin(), running_.end(),
                     [](const auto& entry) { return entry.second.n_pending() == 1; });
}

const std::vector<Scheduler::Part>& Scheduler::plan_share(int n_shares) {
  check(only_decodes(), "a share of what is decoded");
  begin_plan();
  int n_left = ceil_div(n_running(), n_shares);
  int room = std::min(limits_.max_tokens, limits_.max_logits) - n_left;  // for drafts
  for (auto it = running_.begin(); it != running_.end() && n_left > 0; ++it) {
    if (it->second.in_flight) continue;
    get_page(it);
    fit_drafts(it->second, room);
    room -= it->second.n_drafts;
    take_part(*it);
    --n_left;
  }
  return planned();
}

// Oldest first: a missing page is taken from the youngest sequence, which is not in the plan yet.
void Scheduler::plan_decodes() {
  // For drafts. A token of the step is left for each prompt.
  int room = std::min(limits_.max_tokens, limits_.max_logits) - static_cast<int>(running_.size());
  for (auto it = running_.begin(); it != running_.end(); ++it) {
    if (it->second.n_pending() != 1) continue;
    if (!get_page(it)) return;  // the sequence itself was preempted
    fit_drafts(it->second, room);
    room -= it->second.n_drafts;
    take_part(*it);
  }
}

// Keeps at most `room` drafts and gets pages for them, which are those that no running sequence may
// need for its next token.
void Scheduler::fit_drafts(Sequence& s, int room) {
  if (s.n_drafts == 0) return;
  const auto n_known = static_cast<int>(s.tokens.size()) - s.n_drafts;
  const int n_spare = std::max(0, pool_.n_available() - static_cast<int>(running_.size()));
  const int n_pages = static_cast<int>(s.pages.size()) + n_spare;
  drop_drafts(s, std::min({s.n_drafts, room, n_pages * kPageSize - n_known}));
  while (static_cast<int>(s.pages.size()) < pages_for(std::ssize(s.tokens)))
    s.pages.push_back(pool_.take());
}

// Keeps the first drafts, and no more pages than the tokens fill.
void Scheduler::drop_drafts(Sequence& s, int n_kept) {
  s.tokens.resize(s.tokens.size() - s.n_drafts + n_kept);
  s.n_drafts = n_kept;
  std::vector<int32_t> unused;
  while (static_cast<int>(s.pages.size()) > pages_for(std::ssize(s.tokens))) {
    unused.push_back(s.pages.back());
    s.pages.pop_back();
  }
  pool_.release(unused);
}

// Admitted sequences have all pages of their prompt.
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

// Plans as many tokens of a sequence as fit the step's limits of tokens and of logits.
void Scheduler::take_part(Sequences::value_type& entry) {
  auto& [id, s] = entry;
  const int n_without = std::max(0, s.next_logits - s.n_done);
  const int n_left = s.n_pending() + s.n_drafts;
  const int n = std::min({n_left, limits_.max_tokens - n_planned_,
                          n_without + limits_.max_logits - n_planned_logits_});
  if (n == 0) return;
  const int n_logits = std::max(0, n - n_without);
  s.in_flight = true;
  plan_.push_back({id, s.n_done, n, n_logits, n == n_left, s.n_drafts});
  n_planned_ += n;
  n_planned_logits_ += n_logits;
}

// Ensures that there is a page for the last token before drafts. Returns false if the sequence
// itself was preempted.
bool Scheduler::get_page(Sequences::iterator of) {
  Sequence& sequence = of->second;
  if (pages_for(std::ssize(sequence.tokens) - sequence.n_drafts) <= std::ssize(sequence.pages))
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
  drop_drafts(youngest->second, 0);
  swap_out(youngest->second);
  pool_.release(youngest->second.pages);
  waiting_.insert(running_.extract(youngest));
  ++n_preemptions_;
}

// Swaps a sequence out if that is cheaper than recomputing and host pages are free. Its first pages
// are not copied as long as other sequences use them too.
void Scheduler::swap_out(Sequence& s) {
  const int n_used = pages_for(s.n_done);
  int first = 0;
  while (first < n_used && pool_.stays(s.pages[first])) ++first;
  const int n = n_used - first;
  if (n == 0 || n > static_cast<int>(free_host_pages_.size()) ||
      !swapping_pays(n, s.n_done - first * kPageSize, rates_))
    return;
  s.first_swapped = first;
  for (int page = first; page < n_used; ++page) {
    s.host_pages.push_back(free_host_pages_.back());
    free_host_pages_.pop_back();
    copies_.push_back({s.pages[page], s.host_pages.back(), PageCopy::Way::kToHost});
  }
  ++n_swapped_;
  ++n_swaps_out_;
}

// Whether so many available pages are one for each running sequence, so that one that is admitted
// is not preempted again at once.
bool Scheduler::leaves_enough(int n_pages) const {
  check(!running_.empty() || n_pages >= 0, "a sequence fits into the empty cache");
  return n_pages >= n_running();
}

// Whether let_in() would admit the oldest waiting sequence, if there is room in the step.
bool Scheduler::can_admit() const {
  if (waiting_.empty() || n_running() >= limits_.max_running) return false;
  const Sequence& s = waiting_.begin()->second;
  const std::vector<int32_t> found = pool_.find(s.tokens, s.next_logits / kPageSize);
  const auto n_missing = pages_for(std::ssize(s.tokens)) - static_cast<int>(found.size());
  return leaves_enough(pool_.n_available() - pool_.n_without_users(found) - n_missing);
}

// Admits a waiting sequence if there are pages for all its tokens. Pages with tokens whose logits
// are wanted are not shared.
bool Scheduler::let_in(Sequence& s) {
  const auto n = static_cast<int>(s.tokens.size());
  s.pages = pool_.match(s.tokens, s.next_logits / kPageSize);
  const auto n_found = static_cast<int>(s.pages.size());
  const int n_missing = pages_for(n) - n_found;
  if (!leaves_enough(pool_.n_available() - n_missing)) {
    pool_.release(s.pages);
    return false;
  }
  for (int i = 0; i < n_missing; ++i) s.pages.push_back(pool_.take());
  swap_in(s, n_found);
  begin_page(s, n_found);
  if (s.n_cached < 0) {
    s.n_cached = s.n_done;
    n_prompt_tokens_ += n;
    n_cached_tokens_ += s.n_cached;
  }
  return true;
}

// Sets the number of tokens in the cache. Pages that were found are not copied from host memory.
// Those before first_swapped may be lost, because their other users have ended; the host pages are
// useless then.
void Scheduler::swap_in(Sequence& s, int n_found) {
  const int n_swapped = s.host_pages.empty() || n_found < s.first_swapped ? 0 : s.n_done;
  s.n_done = std::max(n_found * kPageSize, n_swapped);
  if (n_swapped > 0) {
    for (int page = n_found; page < pages_for(n_swapped); ++page)
      copies_.push_back(
          {s.pages[page], s.host_pages[page - s.first_swapped], PageCopy::Way::kFromHost});
    publish(s, n_found);
    ++n_swaps_in_;
  }
  release_host_pages(s);
}

// If a page that was not found has a common prefix with another page, copies the keys of that
// prefix. Others may take that other page in the same step, but they write to it only after the
// copy.
void Scheduler::begin_page(Sequence& s, int n_found) {
  const int first = n_found * kPageSize;
  if (s.n_done > first || s.next_logits <= first) return;
  const std::span<const int32_t> tokens = std::span(s.tokens).subspan(first, s.next_logits - first);
  const auto [page, n] = pool_.match_begun(s.pages, n_found, tokens);
  if (n == 0) return;
  copies_.push_back({s.pages[n_found], page, PageCopy::Way::kWithin});
  s.n_done = first + n;
}

void Scheduler::release_host_pages(Sequence& s) {
  if (s.host_pages.empty()) return;
  --n_swapped_;
  free_host_pages_.insert(free_host_pages_.end(), s.host_pages.rbegin(), s.host_pages.rend());
  s.host_pages.clear();
}

// Lets other sequences find the full pages from `first` on.
void Scheduler::publish(Sequence& s, int first) {
  for (int page = first; page < s.n_done / kPageSize; ++page)
    pool_.publish(s.pages, page, std::span(s.tokens).subspan(size_t{kPageSize} * page, kPageSize));
}

// Releases the pages of a sequence that has ended; its last page, partly filled, can be found too.
void Scheduler::release_pages(Sequence& s) {
  const int n_full = s.n_done / kPageSize;
  pool_.publish_begun(
      s.pages, n_full,
      std::span(s.tokens).subspan(size_t{kPageSize} * n_full, s.n_done % kPageSize));
  pool_.release(s.pages);
}

void Scheduler::computed() {
  check(!in_flight_.empty(), "a plan has run");
  for (const Part& part : in_flight_.front()) {
    n_drafted_tokens_ += part.n_drafts;
    const auto it = running_.find(part.id);
    if (it == running_.end()) continue;  // removed meanwhile
    Sequence& s = it->second;
    s.in_flight = false;
    const int first_full = s.n_done / kPageSize;
    s.n_done += part.n - part.n_drafts;
    s.next_logits = std::max(s.next_logits, s.n_done);
    publish(s, first_full);
  }
  in_flight_.pop_front();
}

void Scheduler::add(SequenceId id, std::vector<int32_t> prompt, int n_scored) {
  check(!prompt.empty() && static_cast<int64_t>(prompt.size()) <= longest_sequence(),
        "a prompt fits into the cache");
  check(!contains(id), "a new sequence");
  Sequence& s = waiting_[id];
  s.tokens = std::move(prompt);
  s.next_logits = static_cast<int>(s.tokens.size()) - n_scored;
}

bool Scheduler::adopt_page(std::span<const int32_t> prompt, int index,
                           const std::function<void(int32_t page)>& fill) {
  const std::span<const int32_t> tokens = prompt.subspan(size_t{kPageSize} * index);
  const bool is_full = std::ssize(tokens) >= kPageSize;
  std::vector<int32_t> pages = pool_.match(prompt, index + is_full);  // so they are not taken below
  if (std::ssize(pages) == index && pool_.n_available() > std::ssize(running_)) {
    pages.push_back(pool_.take());
    fill(pages.back());
    if (is_full)
      pool_.publish(pages, index, tokens.first(kPageSize));
    else
      pool_.publish_begun(pages, index, tokens);
  }
  const bool is_there = std::ssize(pages) > index;
  pool_.release(pages);
  return is_there;
}

void Scheduler::assume_cached(std::span<const int32_t> tokens) {
  Sequence s;
  s.tokens.assign(tokens.begin(), tokens.end());
  s.n_done = static_cast<int>(
      std::min<int64_t>(std::ssize(tokens), int64_t{pool_.n_available()} * kPageSize));
  for (int i = 0; i < pages_for(s.n_done); ++i) s.pages.push_back(pool_.take());
  publish(s, 0);
  release_pages(s);
}

void Scheduler::draft(SequenceId id, std::span<const int32_t> tokens) {
  check(is_decoding(id), "drafts follow a token that is computed in the same step");
  Sequence& s = running_.at(id);
  drop_drafts(s, 0);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.n_drafts = static_cast<int>(tokens.size());
}

bool Scheduler::append(SequenceId id, int32_t token) {
  Sequence& s = running_.at(id);
  check(s.n_pending() == 0, "a token follows when all before it are computed");
  if (is_drafted(id, token)) {
    const int first_full = s.n_done / kPageSize;
    --s.n_drafts;
    ++s.n_done;
    ++n_accepted_tokens_;
    s.next_logits = s.n_done;
    publish(s, first_full);
    return true;
  }
  drop_drafts(s, 0);
  s.tokens.push_back(token);
  check(static_cast<int64_t>(s.tokens.size()) <= longest_sequence(), "a sequence fits the cache");
  return false;
}

void Scheduler::remove(SequenceId id) {
  if (const auto it = running_.find(id); it != running_.end()) {
    release_pages(it->second);
    running_.erase(it);
    return;
  }
  const auto it = waiting_.find(id);
  check(it != waiting_.end(), "only a known sequence is removed");
  release_host_pages(it->second);
  waiting_.erase(it);
}

const Scheduler::Sequence& Scheduler::at(SequenceId id) const {
  const auto it = running_.find(id);
  return it != running_.end() ? it->second : waiting_.at(id);
}

int64_t Scheduler::n_pending() const {
  int64_t n = 0;
  for (const Sequences* all : {&running_, &waiting_})
    for (const auto& [id, sequence] : *all) n += sequence.n_pending();
  return n;
}

Scheduler::Counts& Scheduler::Counts::operator+=(const Counts& other) {
  for (int Counts::*n :
       {&Counts::n_running, &Counts::n_waiting, &Counts::n_pages, &Counts::n_available_pages,
        &Counts::n_host_pages, &Counts::n_free_host_pages, &Counts::n_swapped})
    this->*n += other.*n;
  for (int64_t Counts::*n :
       {&Counts::n_preemptions, &Counts::n_swaps_out, &Counts::n_swaps_in, &Counts::n_prompt_tokens,
        &Counts::n_cached_tokens, &Counts::n_drafted_tokens, &Counts::n_accepted_tokens})
    this->*n += other.*n;
  return *this;
}

Scheduler::Counts Scheduler::counts() const {
  return {.n_running = static_cast<int>(running_.size()),
          .n_waiting = static_cast<int>(waiting_.size()),
          .n_pages = pool_.n_pages(),
          .n_available_pages = pool_.n_available(),
          .n_host_pages = limits_.n_host_pages,
          .n_free_host_pages = static_cast<int>(free_host_pages_.size()),
          .n_swapped = n_swapped_,
          .n_preemptions = n_preemptions_,
          .n_swaps_out = n_swaps_out_,
          .n_swaps_in = n_swaps_in_,
          .n_prompt_tokens = n_prompt_tokens_,
          .n_cached_tokens = n_cached_tokens_,
          .n_drafted_tokens = n_drafted_tokens_,
          .n_accepted_tokens = n_accepted_tokens_};
}

}  // namespace tandem
