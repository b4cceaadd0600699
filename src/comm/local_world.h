// What ranks that are threads (local_ranks.h) share beside their calls: which of them have ended,
// whom each waits for, and the failure, which is the same for all.
#pragma once
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "comm/local_ranks.h"

namespace tandem {

class LocalWorld {
 public:
  struct Lost {};  // thrown by the rank that LocalRanks::loss names

  explicit LocalWorld(const LocalRanks& ranks) : ranks_(ranks.n), loss_(ranks.loss) {}
  void end(int rank) { ranks_[rank].ended = true; }

  // Counts the calls of a rank, and loses the rank where LocalRanks::loss says so.
  void count_call(int rank);
  // Returns when done() holds, which `other` has to bring about for `rank`. Throws GroupError.
  void wait(int rank, int other, const std::function<bool()>& done, Patience patience);
  // Throws GroupError, with the first failure of all, when no rank copies from another one.
  [[noreturn]] void give_up(int lost, const std::string& why);

  // No rank gives up, which would free its memory, while `rank` copies. Throws GroupError when one
  // has done so already.
  class Copying {
   public:
    Copying(LocalWorld& world, int rank);
    ~Copying() { --n_copies_; }

   private:
    std::atomic<int>& n_copies_;
  };

 private:
  static constexpr int kThreads = 8;  // of a rank that wait for others at the same time
  struct alignas(64) Rank {
    std::atomic<bool> ended{false};
    std::atomic<int> n_copies{0};  // threads that copy
    std::array<std::atomic<int>, kThreads> waits_for;
    std::atomic<int64_t> n_calls{0};
    Rank() {
      for (std::atomic<int>& w : waits_for) w = -1;
    }
  };
  static std::atomic<int>& claimed(Rank& rank, int other);
  int lost_rank(int waited_for) const;

  std::vector<Rank> ranks_;
  const std::optional<RankLoss> loss_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // of the failure
  int lost_ = -1;
  std::string why_;
};

}  // namespace tandem
