#include "scheduling/page_pool.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

// One step of a multiplicative hash with the finaliser of SplitMix64 (Steele et al. 2014).
uint64_t combined(uint64_t hash, uint64_t value) {
  uint64_t x = (hash ^ value) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  return x ^ x >> 27;
}

uint64_t key_of(uint64_t parent, std::span<const int32_t> tokens) {
  uint64_t hash = combined(0, parent);
  for (const int32_t token : tokens) hash = combined(hash, static_cast<uint32_t>(token));
  return hash;
}

}  // namespace

PagePool::PagePool(int n_pages, bool keeps) : keeps_(keeps), pages_(n_pages) {
  free_.reserve(n_pages);
  for (int page = n_pages - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagePool::take() {
  check(n_available() > 0, "a page is taken only when one is available");
  if (free_.empty()) {
    const int32_t page = oldest_;
    unlink(page);
    unpublish(page);
    free_.push_back(page);
  }
  const int32_t page = free_.back();
  free_.pop_back();
  pages_[page].n_users = 1;
  return page;
}

std::vector<int32_t> PagePool::find(std::span<const int32_t> tokens, int max_pages) const {
  std::vector<int32_t> found;
  if (!keeps_) return found;
  uint64_t parent = kRoot;
  for (int i = 0; i < max_pages; ++i) {
    const auto part = tokens.subspan(size_t{kPageSize} * i, kPageSize);
    const int32_t page = find_page(key_of(parent, part), parent, part);
    if (page < 0) break;
    parent = pages_[page].serial;
    found.push_back(page);
  }
  return found;
}

std::vector<int32_t> PagePool::match(std::span<const int32_t> tokens, int max_pages) {
  std::vector<int32_t> found = find(tokens, max_pages);
  for (const int32_t page : found) add_user(page);
  return found;
}

void PagePool::publish(std::vector<int32_t>& pages, int index, std::span<const int32_t> tokens) {
  if (!keeps_) return;
  const uint64_t parent = serial_before(pages, index);
  if (parent == kUnpublished || pages_[pages[index]].serial != kUnpublished) return;
  const uint64_t key = key_of(parent, tokens);
  if (const int32_t same = find_page(key, parent, tokens); same >= 0) {
    add_user(same);
    remove_user(pages[index]);
    pages[index] = same;
    return;
  }
  // A different prefix with the same hash keeps its entry.
  if (!index_.emplace(key, pages[index]).second) return;
  pages_[pages[index]].key = key;
  enter(pages[index], parent, tokens);
}

std::pair<int32_t, int> PagePool::match_begun(const std::vector<int32_t>& pages, int n_found,
                                              std::span<const int32_t> tokens) const {
  constexpr int kMaxVisitedPages = 64;
  std::pair<int32_t, int> best = {-1, 0};
  const auto newest = newest_child_.find(serial_before(pages, n_found));
  int32_t number = newest == newest_child_.end() ? -1 : newest->second;
  for (int i = 0; number >= 0 && i < kMaxVisitedPages; ++i) {
    const Page& page = pages_[number];
    const auto end = page.tokens.begin() + page.n_tokens;
    const auto differs = std::mismatch(tokens.begin(), tokens.end(), page.tokens.begin(), end);
    const auto n = static_cast<int>(differs.first - tokens.begin());
    if (n > best.second) best = {number, n};
    number = page.older_sibling;
  }
  return best;
}

void PagePool::publish_begun(const std::vector<int32_t>& pages, int index,
                             std::span<const int32_t> tokens) {
  if (!keeps_ || tokens.empty()) return;
  const uint64_t parent = serial_before(pages, index);
  if (parent == kUnpublished || pages_[pages[index]].serial != kUnpublished) return;
  if (match_begun(pages, index, tokens).second == std::ssize(tokens)) return;
  enter(pages[index], parent, tokens);
}

void PagePool::release(std::vector<int32_t>& pages) {
  for (size_t i = pages.size(); i-- > 0;) remove_user(pages[i]);
  pages.clear();
}

void PagePool::forget() {
  while (oldest_ >= 0) {
    const int32_t page = oldest_;
    unlink(page);
    free_.push_back(page);
  }
  for (int32_t page = 0; page < n_pages(); ++page) unpublish(page);
}

int32_t PagePool::find_page(uint64_t key, uint64_t parent, std::span<const int32_t> tokens) const {
  const auto entry = index_.find(key);
  if (entry == index_.end()) return -1;
  const Page& page = pages_[entry->second];
  const bool same =
      page.parent == parent && std::equal(tokens.begin(), tokens.end(), page.tokens.begin());
  return same ? entry->second : -1;
}

void PagePool::add_user(int32_t page) {
  if (pages_[page].n_users++ == 0) unlink(page);
}

void PagePool::remove_user(int32_t number) {
  Page& page = pages_[number];
  check(page.n_users > 0, "a page that is given back has a user");
  if (--page.n_users > 0) return;
  if (page.serial == kUnpublished) return free_.push_back(number);
  page.older = newest_;
  page.newer = -1;
  (newest_ < 0 ? oldest_ : pages_[newest_].newer) = number;
  newest_ = number;
  ++n_kept_;
}

// Returns kUnpublished when the preceding page is not published.
uint64_t PagePool::serial_before(const std::vector<int32_t>& pages, int index) const {
  return index == 0 ? kRoot : pages_[pages[index - 1]].serial;
}

void PagePool::enter(int32_t number, uint64_t parent, std::span<const int32_t> tokens) {
  Page& page = pages_[number];
  page.serial = ++last_serial_;
  page.parent = parent;
  page.n_tokens = static_cast<int>(tokens.size());
  std::copy(tokens.begin(), tokens.end(), page.tokens.begin());
  const auto [newest, is_first] = newest_child_.emplace(parent, number);
  if (is_first) return;
  page.older_sibling = std::exchange(newest->second, number);
  pages_[page.older_sibling].newer_sibling = number;
}

void PagePool::unpublish(int32_t number) {
  Page& page = pages_[number];
  if (page.serial == kUnpublished) return;
  if (page.n_tokens == kPageSize) index_.erase(page.key);
  if (page.newer_sibling >= 0)
    pages_[page.newer_sibling].older_sibling = page.older_sibling;
  else if (page.older_sibling >= 0)
    newest_child_[page.parent] = page.older_sibling;
  else
    newest_child_.erase(page.parent);
  if (page.older_sibling >= 0) pages_[page.older_sibling].newer_sibling = page.newer_sibling;
  page.older_sibling = page.newer_sibling = -1;
  page.serial = page.parent = kUnpublished;
}

void PagePool::unlink(int32_t number) {
  Page& page = pages_[number];
  (page.older < 0 ? oldest_ : pages_[page.older].newer) = page.newer;
  (page.newer < 0 ? newest_ : pages_[page.newer].older) = page.older;
  page.older = page.newer = -1;
  --n_kept_;
}

}  // namespace tandem
