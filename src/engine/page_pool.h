// The pages of the KV cache: who uses each, and which hold the keys of tokens that another sequence
// may begin with. Full pages are shared; of others the beginning is copied. Knows numbers of pages
// only, not their memory.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/ops.h"

namespace tandem {

class PagePool {
 public:
  // Pages 0 to n_pages - 1. Without `keeps`, nothing is remembered of a page that nobody uses.
  PagePool(int n_pages, bool keeps);

  int n_pages() const { return static_cast<int>(pages_.size()); }
  // Nobody uses them; what some of them remember is forgotten when they are taken.
  int n_available() const { return static_cast<int>(free_.size()) + n_kept_; }

  // A page for one user, an empty one if there is one, else the one remembered for longest. One
  // must be available.
  int32_t take();

  // Pages that hold the keys of the first tokens of `tokens`, at most max_pages, each with one more
  // user. Exact: tokens are compared, not only hashes.
  std::vector<int32_t> match(std::span<const int32_t> tokens, int max_pages);

  // Page `index` of a sequence, whose pages are `pages`, is full: it can be found by match() from
  // now on. Where another page holds the same already, the sequence shares that one from now on
  // and pages[index] changes; the keys are the same.
  void publish(std::vector<int32_t>& pages, int index, std::span<const int32_t> tokens);

  // The page that begins most like `tokens`, behind the first n_found pages of a sequence, which
  // match() found, and how many tokens they have in common; 0: none. Of many such pages, only the
  // newest are looked at. The page may be taken by others from now on.
  std::pair<int32_t, int> match_begun(const std::vector<int32_t>& pages, int n_found,
                                      std::span<const int32_t> tokens) const;

  // Page `index` of a sequence that ends holds only these tokens: match_begun() may find it.
  void publish_begun(const std::vector<int32_t>& pages, int index, std::span<const int32_t> tokens);

  // Whether match() would still find the page if one user less had it, while the others do.
  bool stays(int32_t page) const {
    return pages_[page].n_users > 1 && pages_[page].serial != kUnpublished;
  }

  // One user less each. What they remember is given up from the last to the first.
  void release(std::vector<int32_t>& pages);

  // Nothing can be matched any more.
  void forget();

 private:
  static constexpr uint64_t kUnpublished = 0, kRoot = 1;

  // A published page is known by the serial number of the page before it and its own tokens, so a
  // chain of pages stands for one beginning of a text and no other.
  struct Page {
    int n_users = 0, n_tokens = 0;
    uint64_t serial = kUnpublished, parent = kUnpublished;
    uint64_t key = 0;  // in index_
    std::array<int32_t, kPageSize> tokens{};
    int32_t older = -1, newer = -1;                  // among the kept ones
    int32_t older_sibling = -1, newer_sibling = -1;  // among those behind the same page
  };
  int32_t find(uint64_t key, uint64_t parent, std::span<const int32_t> tokens) const;
  void enter(int32_t page, uint64_t parent, std::span<const int32_t> tokens);
  uint64_t serial_before(const std::vector<int32_t>& pages, int index) const;
  void add_user(int32_t page);
  void remove_user(int32_t page);
  void unpublish(int32_t page);
  void unlink(int32_t page);

  const bool keeps_;
  std::vector<Page> pages_;
  std::vector<int32_t> free_;                           // empty ones, taken from the back
  std::unordered_map<uint64_t, int32_t> index_;         // full pages, by key
  std::unordered_map<uint64_t, int32_t> newest_child_;  // of a serial number
  uint64_t last_serial_ = kRoot;
  int32_t oldest_ = -1, newest_ = -1;  // of the kept ones: published, without a user
  int n_kept_ = 0;
};

}  // namespace tandem
