// Blocks of keys that share a softmax, and which of their keys a query sees; for the attention of
// each instruction set.
#pragma once
#include "cpu_kernels/panels.h"

namespace tandem::cpu {
namespace {

constexpr int kBlocks = 2;                  // key blocks that share a softmax
constexpr int kSlots = kBlocks * kMaxKeys;  // key i of block b has slot b * kMaxKeys + i

// Up to kBlocks blocks of keys, the blocks that follow them, and the number of packed queries.
struct Blocks {
  const KeyBlock *blocks, *next;  // next: equally many, or null
  int n;
  int n_queries;
};

// The blocks from block i of a call on, for n_queries queries.
Blocks blocks_at(const AttendArgs& a, int i, int n_queries) {
  const KeyBlock* const next = i + 2 * kBlocks <= a.n_blocks ? a.blocks + i + kBlocks : nullptr;
  return {a.blocks + i, next, min(kBlocks, a.n_blocks - i), n_queries};
}

// Number of keys of a block that a query sees; the query sees visible + token keys.
int keys_seen(const KeyBlock& block, int token) {
  const int seen = min(block.visible + token, block.n_keys);
  return seen < 0 ? 0 : seen;
}

// Number of slots up to the last one that a query sees.
int slots_seen(const Blocks& b, int token) {
  for (int i = b.n - 1; i >= 0; --i)
    if (const int seen = keys_seen(b.blocks[i], token)) return i * kMaxKeys + seen;
  return 0;
}

}  // namespace
}  // namespace tandem::cpu
