// A window in memory that all ranks of a group can address: of one process, or shared by several.
#pragma once
#include <memory>
#include <vector>

#include "comm/group.h"

namespace tandem {

class MappedWindow final : public Window {
 public:
  // Bytes of zeros that each rank needs for a window of `bytes` in a group of n_ranks: the window,
  // then a cache line for the number of each rank.
  static int64_t memory_bytes(int64_t bytes, int n_ranks);

  // memory: [ranks], where the memory of each rank is mapped here; `owner` keeps it mapped.
  MappedWindow(Group& group, int64_t bytes, std::vector<std::byte*> memory,
               std::shared_ptr<const void> owner);
  Bytes of(int rank) const override;
  void signal(int rank, uint64_t number) override;
  void wait(int rank, uint64_t number) override;

 private:
  uint64_t& number_at(int owner, int from) const;

  Group& group_;
  const int64_t bytes_;
  const std::vector<std::byte*> memory_;
  const std::shared_ptr<const void> owner_;
};

}  // namespace tandem
