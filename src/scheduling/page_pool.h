// The pages of the KV cache: how many sequences use each, and which hold the keys of a prefix that
// another sequence may share. Full pages are shared; of partly filled ones the beginning is copied.
// Handles page numbers only, not their memory.
#pragma once
#include <algorithm>
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
  // Pages 0 to n_pages - 1. Without `keeps`, a page without users is forgotten at once.
  PagePool(int n_pages, bool keeps);

  int n_pages() const { return static_cast<int>(pages_.size()); }
  // Pages without users; the tokens of published ones are forgotten when they are taken.
  int n_available() const { return static_cast<int>(free_.size()) + n_kept_; }
  // How many of these pages have no users.
  int n_without_users(std::span<const int32_t> pages) const {
    return static_cast<int>(
        std::ranges::count_if(pages, [&](int32_t page) { return pages_[page].n_users == 0; }));
  }

  // Gives one user an empty page, or else the published page that has been without users longest.
  // At least one page must be available.
  int32_t take();

  // Pages that hold the keys of the first tokens of `tokens`, at most max_pages, each with one more
  // user. Exact: the tokens are compared, not only their hashes.
  std::vector<int32_t> match(std::span<const int32_t> tokens, int max_pages);
  // The same pages without a user more: what match() would find.
  std::vector<int32_t> find(std::span<const int32_t> tokens, int max_pages) const;

  // Makes the full page `index` of a sequence with the given pages available to match(). If another
  // page already holds the same tokens, the sequence shares that page and pages[index] changes; the
  // keys are the same.
  void publish(std::vector<int32_t>& pages, int index, std::span<const int32_t> tokens);

  // The page with the longest common prefix with `tokens` among those that follow the first n_found
  // pages of a sequence, which match() found, and the length of that prefix; 0: none. Looks at the
  // newest such pages only. The page gets no user, so it may be taken by others.
  std::pair<int32_t, int> match_begun(const std::vector<int32_t>& pages, int n_found,
                                      std::span<const int32_t> tokens) const;

  // Page `index` of a sequence that ends is filled with these tokens only: match_begun() may find
  // it.
  void publish_begun(const std::vector<int32_t>& pages, int index, std::span<const int32_t> tokens);

  // Whether match() would still find the page with one user less, because it has others.
  bool stays(int32_t page) const {
    return pages_[page].n_users > 1 && pages_[page].serial != kUnpublished;
  }

  // Removes one user of each page. Published pages are forgotten from the last to the first.
  void release(std::vector<int32_t>& pages);

  // Forgets all published pages.
  void forget();

 private:
  static constexpr uint64_t kUnpublished = 0, kRoot = 1;

  // A published page is identified by the serial number of the preceding page and its own tokens,
  // so a chain of pages stands for exactly one prefix.
  struct Page {
    int n_users = 0, n_tokens = 0;
    uint64_t serial = kUnpublished, parent = kUnpublished;
    uint64_t key = 0;  // key in index_
    std::array<int32_t, kPageSize> tokens{};
    int32_t older = -1, newer = -1;                  // neighbours in the list of kept pages
    int32_t older_sibling = -1, newer_sibling = -1;  // pages that follow the same page
  };
  int32_t find_page(uint64_t key, uint64_t parent, std::span<const int32_t> tokens) const;
  void enter(int32_t page, uint64_t parent, std::span<const int32_t> tokens);
  uint64_t serial_before(const std::vector<int32_t>& pages, int index) const;
  void add_user(int32_t page);
  void remove_user(int32_t page);
  void unpublish(int32_t page);
  void unlink(int32_t page);

  const bool keeps_;
  std::vector<Page> pages_;
  std::vector<int32_t> free_;                           // empty pages, taken from the back
  std::unordered_map<uint64_t, int32_t> index_;         // full pages, by key
  std::unordered_map<uint64_t, int32_t> newest_child_;  // by serial number of the parent
  uint64_t last_serial_ = kRoot;
  int32_t oldest_ = -1, newest_ = -1;  // ends of the list of kept pages: published, without users
  int n_kept_ = 0;
};

}  // namespace tandem
