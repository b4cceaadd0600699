#include "comm/local_ranks.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <thread>

#include "comm/copy.h"
#include "comm/local_world.h"
#include "comm/mapped_window.h"
#include "comm/waiting.h"
#include "core/memory.h"

namespace tandem {
namespace {

// Where the ranks of one group meet. Each publishes where its part of a call lies, and the others
// copy from there between two meetings.
struct LocalMeeting {
  explicit LocalMeeting(std::vector<int> ranks) : world_ranks(std::move(ranks)), slots(size()) {}
  int size() const { return static_cast<int>(world_ranks.size()); }

  struct Call {
    const char* name;
    int root = 0;
    ConstBytes bytes = {};
    std::span<const int64_t> to = {}, from = {};  // sizes of pieces in bytes
  };
  struct alignas(64) Slot {
    Call call;                              // under way
    std::shared_ptr<Buffer> window;         // under construction
    std::shared_ptr<LocalMeeting> meeting;  // of a part of the group, under construction
    std::atomic<int64_t> n_arrived{0};      // times that the rank came here
  };
  const std::vector<int> world_ranks;  // [ranks]
  std::vector<Slot> slots;             // [ranks]
};

int64_t before(std::span<const int64_t> sizes, int rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
}

class LocalGroup final : public Group {
 public:
  LocalGroup(std::shared_ptr<LocalWorld> world, std::shared_ptr<LocalMeeting> meeting, int rank,
             Patience patience)
      : world_(std::move(world)), meeting_(std::move(meeting)), rank_(rank), patience_(patience) {}
  int rank() const override { return rank_; }
  int size() const override { return meeting_->size(); }
  int world_rank(int rank) const override { return meeting_->world_ranks[rank]; }
  void set_patience(Patience patience) override { patience_ = patience; }

  void barrier() override {
    exchange({.name = "barrier"}, [](int, auto&) {});
  }
  void broadcast(Bytes x, int root) override;
  void all_gather(ConstBytes mine, Pieces<std::byte> out) override;
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override;
  std::unique_ptr<Group> split(int color) override;
  std::unique_ptr<Window> allocate_window(int64_t bytes) override;
  void wait_for_rank(int rank, const std::function<bool()>& done) override {
    world_->wait(world_rank(rank_), world_rank(rank), done, patience_);
  }

 private:
  using Call = LocalMeeting::Call;
  LocalMeeting::Slot& mine() { return meeting_->slots[rank_]; }

  // Calls take(rank, its call) for every rank while the memory of all calls stays.
  template <class Take>
  void exchange(const Call& call, const Take& take) {
    world_->count_call(world_rank(rank_));
    mine().call = call;
    meet();
    std::string difference;
    {
      const LocalWorld::Copying copying(*world_, world_rank(rank_));
      for (int r = 0; r < size() && difference.empty(); ++r) {
        difference = difference_between(call, r, meeting_->slots[r].call);
        if (difference.empty()) take(r, meeting_->slots[r].call);
      }
    }
    if (!difference.empty()) world_->give_up(-1, difference);
    meet();
  }
  void meet();
  std::string difference_between(const Call& call, int rank, const Call& other) const;

  const std::shared_ptr<LocalWorld> world_;
  const std::shared_ptr<LocalMeeting> meeting_;
  const int rank_;
  Patience patience_;
};

void LocalGroup::broadcast(Bytes x, int root) {
  const std::vector<int64_t> sizes(size(), static_cast<int64_t>(x.size()));
  const Call call{.name = "broadcast", .root = root, .bytes = x, .to = sizes, .from = sizes};
  exchange(call, [&](int r, const Call& from) {
    if (r == root) copy_bytes(from.bytes, x.data());
  });
}

void LocalGroup::all_gather(ConstBytes mine, Pieces<std::byte> out) {
  const std::vector<int64_t> to(size(), static_cast<int64_t>(mine.size()));
  const Call call{.name = "all_gather", .bytes = mine, .to = to, .from = out.sizes};
  exchange(call, [&](int r, const Call& from) {
    copy_bytes(from.bytes, out.all.data() + before(out.sizes, r));
  });
}

void LocalGroup::all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) {
  const Call call{.name = "all_to_all", .bytes = in.all, .to = in.sizes, .from = out.sizes};
  exchange(call, [&](int r, const Call& from) {
    copy_bytes(from.bytes.subspan(before(from.to, rank_), from.to[rank_]),
               out.all.data() + before(out.sizes, r));
  });
}

// What ranks wrote before a meeting is seen after it.
void LocalGroup::meet() {
  const int64_t n = ++mine().n_arrived;
  for (int r = 0; r < size(); ++r)
    wait_for_rank(r, [&] { return meeting_->slots[r].n_arrived.load() >= n; });
}

std::string LocalGroup::difference_between(const Call& call, int rank, const Call& other) const {
  const auto size_of = [](std::span<const int64_t> sizes, int r) {
    return sizes.empty() ? 0 : sizes[r];
  };
  const int64_t sent = size_of(other.to, rank_), expected = size_of(call.from, rank);
  if (std::string_view(call.name) == other.name && call.root == other.root && sent == expected)
    return {};
  return fmt::format(
      "rank {} calls {} from {} and expects {} bytes of rank {}, which calls {} from {} with {}",
      world_rank(rank_), call.name, world_rank(call.root), expected, world_rank(rank), other.name,
      world_rank(other.root), sent);
}

std::unique_ptr<Group> LocalGroup::split(int color) {
  std::vector<int> colors(size()), ranks;
  all_gather_values(color, std::span(colors));
  int leader = -1, rank_there = -1;
  for (int r = 0; r < size(); ++r) {
    if (colors[r] != color) continue;
    if (leader < 0) leader = r;
    if (r == rank_) rank_there = static_cast<int>(ranks.size());
    ranks.push_back(world_rank(r));
  }
  if (leader == rank_) mine().meeting = std::make_shared<LocalMeeting>(std::move(ranks));
  barrier();
  std::shared_ptr<LocalMeeting> meeting = meeting_->slots[leader].meeting;
  barrier();
  if (leader == rank_) mine().meeting.reset();
  if (color < 0) return nullptr;
  return std::make_unique<LocalGroup>(world_, std::move(meeting), rank_there, patience_);
}

std::unique_ptr<Window> LocalGroup::allocate_window(int64_t bytes) {
  std::vector<int64_t> sizes(size());
  all_gather_values(bytes, std::span(sizes));
  if (std::count(sizes.begin(), sizes.end(), bytes) != size())
    world_->give_up(-1, "the ranks allocate windows of different sizes");
  mine().window = std::make_shared<Buffer>(MappedWindow::memory_bytes(bytes, size()));
  barrier();
  // The last rank that may write frees the memory.
  const auto owners = std::make_shared<std::vector<std::shared_ptr<Buffer>>>();
  for (const LocalMeeting::Slot& slot : meeting_->slots) owners->push_back(slot.window);
  barrier();
  mine().window.reset();
  std::vector<std::byte*> memory;
  for (const auto& owner : *owners) memory.push_back(owner->data());
  return std::make_unique<MappedWindow>(*this, bytes, std::move(memory), owners);
}

}  // namespace

void run_local_ranks(const LocalRanks& ranks, const std::function<void(Group&)>& work) {
  std::vector<int> all(ranks.n);
  std::iota(all.begin(), all.end(), 0);
  const auto world = std::make_shared<LocalWorld>(ranks);
  const auto meeting = std::make_shared<LocalMeeting>(std::move(all));
  std::mutex mutex;  // of `first`
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks.n; ++rank)
    threads.emplace_back([&, rank] {
      try {
        LocalGroup group(world, meeting, rank, ranks.patience);
        work(group);
      } catch (const LocalWorld::Lost&) {
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
      world->end(rank);
    });
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace tandem
