// What the next step computes: who is let in, whose tokens, on which pages. Every decision is a
// function of the scheduler's state alone: no clock, no threads, no model, so a simulation tests
// it.
//
// A step holds the next token of every sequence that decodes, then pieces of prompts, oldest first,
// up to a budget: no stream waits longer than one such step. Sequences are let in by age while
// pages for what they hold are available; when pages run out, the youngest gives up its pages and
// is computed again later, or its pages are kept in host memory where that is cheaper. The oldest
// never loses its own, so it always ends.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/page_pool.h"
#include "engine/swapping.h"

namespace tandem {

using SequenceId = uint64_t;  // ascending with age: who comes first has the smaller one

class Scheduler {
 public:
  struct Limits {
    int n_pages = 0;          // of the KV cache
    int n_host_pages = 0;     // for sequences that give up theirs; 0: they are computed again
    int max_tokens = 512;     // of a step
    int max_running = 256;    // sequences at a time; at most max_tokens
    int max_logits = 256;     // rows of logits of a step; at least max_running
    bool keeps_pages = true;  // prefix cache: pages of ended sequences are found again
  };

  // Tokens [first, first + n) of a sequence are computed, the last n_logits of them with logits;
  // `last`: none are left after them, so the last one's logits give the next token.
  struct Part {
    SequenceId id;
    int first, n, n_logits;
    bool last;
  };

  struct Counts {
    int n_running = 0, n_waiting = 0;
    int n_pages = 0, n_available_pages = 0;
    int n_host_pages = 0, n_free_host_pages = 0, n_swapped = 0;  // sequences in host memory
    int64_t n_preemptions = 0;
    int64_t n_swaps_out = 0, n_swaps_in = 0;           // sequences to host memory and back
    int64_t n_prompt_tokens = 0, n_cached_tokens = 0;  // looked for and found in the prefix cache
  };

  explicit Scheduler(const Limits& limits);

  // The most tokens that a sequence may ever hold.
  int64_t longest_sequence() const { return int64_t{limits_.n_pages} * kPageSize; }

  // `id` is larger than all before. The prompt is not empty; with what will be appended it is at
  // most longest_sequence(). Its last n_scored tokens, at least one, are given logits, once each;
  // no page of theirs is taken from the prefix cache.
  void add(SequenceId id, std::vector<int32_t> prompt, int n_scored = 1);
  // The prefix cache holds these tokens, as far as pages are available, as if a sequence had
  // computed them and ended.
  void assume_cached(std::span<const int32_t> tokens);

  // What swapping costs from now on; before, nothing is swapped.
  void set_rates(const SwapRates& rates) { rates_ = rates; }

  // The next step; empty when nothing is there to do. Each call is followed by computed() before
  // the next.
  const std::vector<Part>& plan();
  // What is to be copied before the last plan runs, in this order.
  std::span<const PageCopy> copies() const { return copies_; }
  // The plan has run: its tokens are in the cache.
  void computed();

  // The token that follows a sequence's last; it must have none left to compute.
  void append(SequenceId id, int32_t token);
  // The sequence ended, for whatever reason, whether it runs or waits. Not between plan() and
  // computed().
  void remove(SequenceId id);

  bool contains(SequenceId id) const { return running_.count(id) + waiting_.count(id) > 0; }
  bool empty() const { return running_.empty() && waiting_.empty(); }
  int n_computed(SequenceId id) const { return at(id).n_done; }  // tokens in the cache
  std::span<const int32_t> tokens(SequenceId id) const { return at(id).tokens; }
  std::span<const int32_t> pages(SequenceId id) const { return at(id).pages; }
  std::span<const int32_t> host_pages(SequenceId id) const { return at(id).host_pages; }
  // Of its prompt, found in the prefix cache when it was first let in.
  int cached_tokens(SequenceId id) const { return std::max(0, at(id).n_cached); }
  Counts counts() const;
  void forget_pages() { pool_.forget(); }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;  // prompt and what was appended
    std::vector<int32_t> pages;
    std::vector<int32_t> host_pages;  // while it waits: of pages first_swapped to that of n_done
    int first_swapped = 0;            // those before stayed in the cache, with other users
    int n_done = 0;                   // tokens in the cache
    int next_logits = 0;  // the first token whose logits are wanted and were not yet computed
    int n_cached = -1;    // unknown before it is let in
    int n_pending() const { return static_cast<int>(tokens.size()) - n_done; }
  };
  using Sequences = std::map<SequenceId, Sequence>;  // by age

  const Sequence& at(SequenceId id) const;
  void plan_decodes();
  void plan_prompts();
  void admit();
  void take_part(Sequences::value_type& entry);
  bool get_page(Sequences::iterator of);
  void preempt_youngest();
  void swap_out(Sequence& sequence);
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
  std::vector<Part> plan_;
  std::vector<PageCopy> copies_;
  int n_planned_ = 0, n_planned_logits_ = 0;  // tokens and rows of logits in plan_
  int64_t n_preemptions_ = 0, n_prompt_tokens_ = 0, n_cached_tokens_ = 0;
  int n_swapped_ = 0;
  int64_t n_swaps_out_ = 0, n_swaps_in_ = 0;
};

}  // namespace tandem
