// Shards: sets of experts that always answer together, whichever of their owners computes them. A
// token's sum is added up within a shard first and then over the shards, so its bits depend on
// which experts the workers have, and not on which worker answers.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct Shard {
  std::vector<int> experts;  // ascending
  std::vector<int> owners;   // numbers of workers, ascending; empty: the backbone has them
};

// Divides n_experts experts into the fewest shards whose experts have the same owners, in ascending
// order of their first expert. owned: [workers][n_experts].
std::vector<Shard> shards_of(const std::vector<std::vector<bool>>& owned, int n_experts);

// The numbers of those that are true, ascending.
std::vector<int> listed(const std::vector<bool>& experts);

// "0-3,8" for {0, 1, 2, 3, 8}; the inverse throws Error, naming `option`, for text that is no list
// of numbers and ranges below n_experts. "auto" is all experts.
std::string text_of_experts(const std::vector<int>& experts);
std::vector<bool> experts_from_text(const std::string& text, int n_experts,
                                    const std::string& option);

}  // namespace tandem
