// Decides what the next step computes: which sequences run, which of their tokens, on which pages.
// Every decision is a function of the scheduler's state alone (no clock, threads or model), so a
// simulation tests it.
//
// A step holds the next token of every decoding sequence, then pieces of prompts, oldest first, up
// to a limit of tokens, so no stream waits longer than one such step. Sequences are admitted by age
// while pages are available for all their tokens. When pages run out, the youngest is preempted: it
// is recomputed later, or its pages are swapped to host memory where that is cheaper. The oldest is
// never preempted, so it always ends.
//
// The stages of a pipeline compute several plans at a time, one each: plans in flight. Those have
// shares of the decoding sequences.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "scheduling/page_pool.h"
#include "scheduling/swapping.h"

namespace tandem {

using SequenceId = uint64_t;  // ascending: an older sequence has the smaller id

class Scheduler {
 public:
  struct Limits {
    int n_pages = 0;          // pages of the KV cache
    int n_host_pages = 0;     // for preempted sequences; 0: they are recomputed
    int max_tokens = 512;     // tokens of a step
    int max_running = 256;    // sequences at a time; at most max_tokens
    int max_logits = 256;     // rows of logits of a step; at least max_running
    bool keeps_pages = true;  // prefix cache: pages of ended sequences are found again
  };

  // Tokens [first, first + n) of a sequence are computed, the last n_logits of them with logits.
  // `last`: no tokens remain, so the last row of logits gives the next token. The last n_drafts
  // tokens are drafts: the row before each of them, and the last row, give the token that follows.
  struct Part {
    SequenceId id;
    int first, n, n_logits;
    bool last;
    int n_drafts = 0;
  };

  struct Counts {
    int n_running = 0, n_waiting = 0;
    int n_pages = 0, n_available_pages = 0;
    int n_host_pages = 0, n_free_host_pages = 0, n_swapped = 0;  // sequences in host memory
    int64_t n_preemptions = 0;
    int64_t n_swaps_out = 0, n_swaps_in = 0;              // sequences to host memory and back
    int64_t n_prompt_tokens = 0, n_cached_tokens = 0;     // looked up and found in the prefix cache
    int64_t n_drafted_tokens = 0, n_accepted_tokens = 0;  // computed, and equal to the next token
    Counts& operator+=(const Counts& other);
  };

  explicit Scheduler(const Limits& limits);

  // The maximum number of tokens of a sequence.
  int64_t longest_sequence() const { return int64_t{limits_.n_pages} * kPageSize; }

  // `id` is new; older sequences have smaller ids. The prompt is not empty and, with all appended
  // tokens, at most longest_sequence() tokens. Logits are computed once for each of its last
  // n_scored tokens, at least one; their pages are not taken from the prefix cache.
  void add(SequenceId id, std::vector<int32_t> prompt, int n_scored = 1);
  // Takes page `index` of a prompt, which ends there or later, into the prefix cache, which has the
  // pages before it: fill(page) writes the keys. Returns false, and calls nothing, if the cache has
  // not, or if running sequences may need the page. A full page that is there already is not filled
  // again.
  bool adopt_page(std::span<const int32_t> prompt, int index,
                  const std::function<void(int32_t page)>& fill);
  // Marks these tokens as computed in the prefix cache, as far as pages are available, as if a
  // sequence had computed them and ended.
  void assume_cached(std::span<const int32_t> tokens);

  // Sets the cost of swapping; nothing is swapped before.
  void set_rates(const SwapRates& rates) { rates_ = rates; }

  // Whether the next plan computes one token of the sequence, so that drafts may follow it.
  bool is_decoding(SequenceId id) const {
    const auto it = running_.find(id);
    return it != running_.end() && it->second.n_pending() == 1 && !it->second.in_flight;
  }
  // Adds drafts, tokens that may come next, to a sequence that is_decoding(). The next plan
  // computes as many as the step and the free pages have room for, and forgets the others; no
  // sequence is preempted for a draft.
  void draft(SequenceId id, std::span<const int32_t> tokens);

  // The next step; empty when there is nothing to do. No other plan is in flight. This one is, if
  // it is not empty, until computed() or abandon().
  const std::vector<Part>& plan();
  // Whether plan() would compute the next tokens of all running sequences and nothing else, with
  // pages for all of them.
  bool only_decodes() const;
  // A step of 1 / n_shares of the decoding sequences, of those that are not in flight the oldest
  // ones; other plans may be in flight. Only where only_decodes().
  const std::vector<Part>& plan_share(int n_shares);
  // The copies to make before the last plan runs, in this order.
  std::span<const PageCopy> copies() const { return copies_; }
  // Reports that the oldest plan in flight has run: its tokens are in the cache.
  void computed();

  // Reports that no plan in flight has run: their sequences are to be removed.
  void abandon() { in_flight_.clear(); }

  // Appends the next token to a sequence that has none left to compute. Returns true if it equals
  // the next draft: it is computed already, and the next row of logits gives the token after it.
  // Otherwise all its drafts are forgotten.
  bool append(SequenceId id, int32_t token);
  // Removes a sequence that ended for any reason, running or waiting. What a plan in flight still
  // computes of it is lost; its pages may be used by later plans.
  void remove(SequenceId id);

  // Tokens of all sequences, running or waiting, that are still to be computed.
  int64_t n_pending() const;
  // How many tokens of a prompt the prefix cache has in full pages.
  int64_t n_cached(std::span<const int32_t> prompt) const {
    const auto n_pages = static_cast<int>((prompt.size() - 1) / kPageSize);
    return std::ssize(pool_.find(prompt, n_pages)) * kPageSize;
  }

  bool contains(SequenceId id) const { return running_.count(id) + waiting_.count(id) > 0; }
  bool empty() const { return running_.empty() && waiting_.empty(); }
  int n_running() const { return static_cast<int>(running_.size()); }
  int n_computed(SequenceId id) const { return at(id).n_done; }  // tokens in the cache, no drafts
  std::span<const int32_t> tokens(SequenceId id) const {
    const Sequence& s = at(id);
    return std::span(s.tokens).first(s.tokens.size() - s.n_drafts);
  }
  // Whether append() would accept the token.
  bool is_drafted(SequenceId id, int32_t token) const {
    const Sequence& s = at(id);
    return s.n_drafts > 0 && s.tokens[s.n_done] == token;
  }
  int n_drafts(SequenceId id) const { return at(id).n_drafts; }  // neither accepted nor forgotten
  std::span<const int32_t> tokens_and_drafts(SequenceId id) const { return at(id).tokens; }
  std::span<const int32_t> pages(SequenceId id) const { return at(id).pages; }
  std::span<const int32_t> host_pages(SequenceId id) const { return at(id).host_pages; }
  // Prompt tokens found in the prefix cache when the sequence was first admitted.
  int cached_tokens(SequenceId id) const { return std::max(0, at(id).n_cached); }
  Counts counts() const;
  void forget_pages() { pool_.forget(); }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;  // the prompt, all appended tokens, and drafts
    std::vector<int32_t> pages;
    std::vector<int32_t> host_pages;  // while it waits, from page first_swapped on
    int first_swapped = 0;            // earlier pages stayed in the cache, with other users
    int n_done = 0;                   // tokens in the cache, without drafts
    int n_drafts = 0;                 // the last tokens
    int next_logits = 0;  // the first token whose logits are wanted and not yet computed
    int n_cached = -1;    // unknown before it is first admitted
    bool in_flight = false;
    int n_pending() const { return static_cast<int>(tokens.size()) - n_drafts - n_done; }
  };
  using Sequences = std::map<SequenceId, Sequence>;  // by age

  const Sequence& at(SequenceId id) const;
  void begin_plan();
  const std::vector<Part>& planned();
  void plan_decodes();
  void plan_prompts();
  void admit();
  void take_part(Sequences::value_type& entry);
  bool get_page(Sequences::iterator of);
  void fit_drafts(Sequence& sequence, int room);
  void drop_drafts(Sequence& sequence, int n_kept);
  void preempt_youngest();
  void swap_out(Sequence& sequence);
  bool leaves_enough(int n_pages) const;
  bool can_admit() const;
  bool let_in(Sequence& sequence);
  void swap_in(Sequence& sequence, int n_found);
  void begin_page(Sequence& sequence, int n_found);
  void release_host_pages(Sequence& sequence);
  void publish(Sequence& sequence, int first);
  void release_pages(Sequence& sequence);
  bool has_room() const { return n_planned_ < limits_.max_tokens; }

  const Limits limits_;
  PagePool pool_;
  Sequences running_, waiting_;
  std::vector<int32_t> free_host_pages_;  // taken from the back
  SwapRates rates_;
  std::vector<Part> plan_;                   // the newest
  std::deque<std::vector<Part>> in_flight_;  // plans, the oldest first
  std::vector<PageCopy> copies_;
  int n_planned_ = 0, n_planned_logits_ = 0;  // tokens and rows of logits in plan_
  int64_t n_preemptions_ = 0, n_prompt_tokens_ = 0, n_cached_tokens_ = 0;
  int64_t n_drafted_tokens_ = 0, n_accepted_tokens_ = 0;
  int n_swapped_ = 0;
  int64_t n_swaps_out_ = 0, n_swaps_in_ = 0;
};

}  // namespace tandem
