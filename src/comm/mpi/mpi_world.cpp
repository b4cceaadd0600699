// Every call is made of messages between two ranks, with MPI's own matching and transport: so a
// rank that does not come has a number, a message of another size than expected is seen, sizes have
// no limit, and no call of MPI waits. MPI's collective calls are as fast and do none of this.
// Threads of a rank make calls of MPI one at a time, under a lock that none of them holds while it
// waits.
#include "comm/mpi/mpi_world.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <type_traits>

#include "comm/copy.h"
#include "comm/launcher.h"
#include "comm/mpi/mpi_library.h"
#include "comm/shared_window.h"
#include "comm/waiting.h"
#include "core/progress_watch.h"

namespace tandem {
namespace {

constexpr int64_t kMaxMessage = int64_t{1} << 30;  // MPI counts in int
// Tags that are no group's: why a rank gives up, and that it leaves.
constexpr int kRollCall = 0, kLeaving = 1;
constexpr int kMaxTag = 32767;  // every MPI has as many
constexpr std::chrono::duration<double> kMaxRollCall{2};

// What all groups of the process share.
struct MpiWorld {
  MpiWorld(const Launch& launch, Patience patience);
  ~MpiWorld();
  // Calls a function of MPI, which returns an error, while no other thread does.
  template <class... Args>
  int call(int (*function)(Args...), std::type_identity_t<Args>... args) const {
    const std::lock_guard lock(mutex);
    return function(args...);
  }
  // Throws when MPI reports an error.
  void expect(int error) {
    if (error != 0) fail(-1, mpi.error_text(error));
  }
  // No group is of use afterwards.
  [[noreturn]] void fail(int lost, const std::string& why) {
    const std::lock_guard lock(mutex);
    if (!failure) failure.emplace(lost, why);
    throw GroupError(*failure);
  }
  // What has failed first is the reason of all later errors, whichever thread reports one.
  void throw_if_failed() const {
    const std::lock_guard lock(mutex);
    if (failure) throw GroupError(*failure);
  }
  [[noreturn]] void give_up(int waited_for, const char* call, Patience patience);
  // Tells all ranks a number and hears theirs; -1 of those who say none within the patience.
  std::vector<int> hear_all(int tag, int mine, Patience patience);

  const MpiLibrary mpi;
  const Patience leaving;
  int rank = 0, size = 0;
  int next_tag = kLeaving + 1;  // of a new group: no two groups of a rank have the same
  mutable std::mutex mutex;     // of calls of MPI, and of `failure`
  std::mutex roll_call;         // held by the thread that gives up
  std::optional<GroupError> failure = {};
};

class MpiGroup final : public Group {
 public:
  // members: [size] numbers in the world, ascending.
  MpiGroup(std::shared_ptr<MpiWorld> world, std::vector<int> members, int tag, Patience patience)
      : world_(std::move(world)), members_(std::move(members)), tag_(tag), patience_(patience) {
    rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), world_->rank) -
                             members_.begin());
  }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  int world_rank(int rank) const override { return members_[rank]; }
  void set_patience(Patience patience) override { patience_ = patience; }

  void barrier() override;
  void broadcast(Bytes x, int root) override;
  void all_gather(ConstBytes mine, Pieces<std::byte> out) override;
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override;
  std::unique_ptr<Group> split(int color) override;
  std::unique_ptr<Window> allocate_window(int64_t bytes) override {
    return map_shared_window(*this, bytes);
  }
  void wait_for_rank(int rank, const std::function<bool()>& done) override;

 private:
  // A message on its way.
  struct Message {
    int rank;
    int bytes;
    bool arrives;  // else it leaves
    MpiHandle request;
  };
  // Ranks begin with their neighbours, so that not all send to the same rank at once.
  int after(int steps) const { return (rank_ + steps) % size(); }
  int before(int steps) const { return (rank_ + size() - steps) % size(); }
  void receive(int rank, std::byte* to, int64_t bytes);
  void send(int rank, const std::byte* from, int64_t bytes);
  void finish(const char* call);

  const std::shared_ptr<MpiWorld> world_;
  const std::vector<int> members_;
  const int tag_;
  int rank_ = 0;
  Patience patience_;
  std::vector<Message> messages_;                // of the call under way
  std::vector<int64_t> in_places_, out_places_;  // [ranks] where pieces begin
};

void MpiGroup::barrier() {
  for (int i = 1; i < size(); ++i) receive(before(i), nullptr, 0);
  for (int i = 1; i < size(); ++i) send(after(i), nullptr, 0);
  finish("barrier");
}

void MpiGroup::broadcast(Bytes x, int root) {
  const auto bytes = static_cast<int64_t>(x.size());
  if (rank_ != root) receive(root, x.data(), bytes);
  for (int i = 1; rank_ == root && i < size(); ++i) send(after(i), x.data(), bytes);
  finish("broadcast");
}

void set_places(std::span<const int64_t> sizes, std::vector<int64_t>& places) {
  places.assign(sizes.size(), 0);
  for (size_t r = 1; r < sizes.size(); ++r) places[r] = places[r - 1] + sizes[r - 1];
}

void MpiGroup::all_gather(ConstBytes mine, Pieces<std::byte> out) {
  set_places(out.sizes, out_places_);
  const auto bytes = static_cast<int64_t>(mine.size());
  for (int i = 1; i < size(); ++i)
    receive(before(i), out.all.data() + out_places_[before(i)], out.sizes[before(i)]);
  for (int i = 1; i < size(); ++i) send(after(i), mine.data(), bytes);
  copy_bytes(mine, out.all.data() + out_places_[rank_]);
  finish("all_gather");
}

void MpiGroup::all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) {
  set_places(in.sizes, in_places_);
  set_places(out.sizes, out_places_);
  for (int i = 1; i < size(); ++i)
    receive(before(i), out.all.data() + out_places_[before(i)], out.sizes[before(i)]);
  for (int i = 1; i < size(); ++i)
    send(after(i), in.all.data() + in_places_[after(i)], in.sizes[after(i)]);
  copy_bytes(in.all.subspan(in_places_[rank_], in.sizes[rank_]),
             out.all.data() + out_places_[rank_]);
  finish("all_to_all");
}

std::unique_ptr<Group> MpiGroup::split(int color) {
  struct Choice {
    int color, next_tag;
  };
  std::vector<Choice> all(size());
  all_gather_values(Choice{color, world_->next_tag}, std::span(all));
  std::vector<int> colors, members;
  for (int r = 0; r < size(); ++r) {
    world_->next_tag = std::max(world_->next_tag, all[r].next_tag);
    if (all[r].color == color) members.push_back(world_rank(r));
    if (all[r].color >= 0) colors.push_back(all[r].color);
  }
  std::sort(colors.begin(), colors.end());
  colors.erase(std::unique(colors.begin(), colors.end()), colors.end());
  const auto at = std::lower_bound(colors.begin(), colors.end(), color) - colors.begin();
  const int tag = world_->next_tag + static_cast<int>(at);
  world_->next_tag += static_cast<int>(colors.size());
  require(world_->next_tag < kMaxTag, "more than {} groups of ranks", kMaxTag);
  if (color < 0) return nullptr;
  return std::make_unique<MpiGroup>(world_, std::move(members), tag, patience_);
}

void MpiGroup::receive(int rank, std::byte* to, int64_t bytes) {
  world_->throw_if_failed();
  do {
    const int n = static_cast<int>(std::min(bytes, kMaxMessage));
    Message& message = messages_.emplace_back(Message{rank, n, true, 0});
    world_->expect(world_->call(world_->mpi.irecv, to, n, world_->mpi.byte, world_rank(rank), tag_,
                                world_->mpi.world, &message.request));
    to += n;
    bytes -= n;
  } while (bytes > 0);
}

void MpiGroup::send(int rank, const std::byte* from, int64_t bytes) {
  world_->throw_if_failed();
  do {
    const int n = static_cast<int>(std::min(bytes, kMaxMessage));
    Message& message = messages_.emplace_back(Message{rank, n, false, 0});
    world_->expect(world_->call(world_->mpi.isend, from, n, world_->mpi.byte, world_rank(rank),
                                tag_, world_->mpi.world, &message.request));
    from += n;
    bytes -= n;
  } while (bytes > 0);
}

// Asking for one message moves all.
void MpiGroup::finish(const char* call) {
  for (Message& message : messages_) {
    MpiStatus status;
    const auto done = [&] {
      world_->throw_if_failed();  // another thread's call may have
      int flag = 0;
      const int error = world_->call(world_->mpi.test, &message.request, &flag, &status);
      if (error != 0)
        world_->fail(-1, fmt::format("{} with rank {}: {}", call, world_rank(message.rank),
                                     world_->mpi.error_text(error)));
      return flag != 0;
    };
    if (!wait_for(done, patience_)) world_->give_up(world_rank(message.rank), call, patience_);
    int n = message.bytes;
    if (message.arrives)
      world_->expect(world_->call(world_->mpi.get_count, &status, world_->mpi.byte, &n));
    if (n != message.bytes)
      world_->fail(-1, fmt::format("{}: rank {} sent {} bytes where {} were expected: the calls of "
                                   "the ranks differ",
                                   call, world_rank(message.rank), n, message.bytes));
  }
  messages_.clear();
}

// MPI goes on with messages of earlier calls, which may not have left this rank.
void MpiGroup::wait_for_rank(int rank, const std::function<bool()>& done) {
  int n_polls = 0;
  const auto done_or_next = [&] {
    if (done()) return true;
    int flag = 0;
    MpiStatus status;
    world_->throw_if_failed();
    if (++n_polls > 1000)
      world_->expect(
          world_->call(world_->mpi.iprobe, world_->rank, tag_, world_->mpi.world, &flag, &status));
    return false;
  };
  if (!wait_for(done_or_next, patience_)) world_->give_up(world_rank(rank), "a window", patience_);
}

MpiWorld::MpiWorld(const Launch& launch, Patience patience)
    : mpi(launch.libraries), leaving(patience) {
  int provided = 0;
  expect(mpi.init_thread(nullptr, nullptr, MpiLibrary::kSerialized, &provided));
  require(provided >= MpiLibrary::kSerialized, "{} cannot be used by several threads", mpi.name());
  expect(mpi.comm_set_errhandler(mpi.world, mpi.errors_return));
  expect(mpi.comm_rank(mpi.world, &rank));
  expect(mpi.comm_size(mpi.world, &size));
  require(rank == launch.rank && size == launch.size,
          "{} makes this process rank {} of {}, but its launcher says {} of {}: they belong to "
          "different MPIs",
          mpi.name(), rank, size, launch.rank, launch.size);
}

// MPI's own end waits for all ranks for ever, also for one that is stopped after it has said that
// it leaves: then everything is done, and the process may end without it.
MpiWorld::~MpiWorld() {
  constexpr std::chrono::seconds kMostSeconds(10);
  if (failure || std::uncaught_exceptions() > 0) return;
  const std::vector<int> heard = hear_all(kLeaving, rank, leaving);
  if (std::count(heard.begin(), heard.end(), -1) > 0) return;
  const ProgressWatch watch(
      [] {
        return WorkProgress{true, 0};
      },
      kMostSeconds, [] { end_rank(0); });
  mpi.finalize();
}

std::vector<int> MpiWorld::hear_all(int tag, int mine, Patience patience) {
  std::vector<int> heard(size, -1), done(2 * size, 1);
  std::vector<MpiHandle> requests(2 * size);
  heard[rank] = mine;
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    done[r] = done[size + r] = 0;
    call(mpi.irecv, &heard[r], int{sizeof(int)}, mpi.byte, r, tag, mpi.world, &requests[r]);
    call(mpi.isend, &mine, int{sizeof(int)}, mpi.byte, r, tag, mpi.world, &requests[size + r]);
  }
  const auto all_done = [&] {
    MpiStatus status;
    for (size_t i = 0; i < done.size(); ++i)
      if (!done[i]) call(mpi.test, &requests[i], &done[i], &status);
    return std::count(done.begin(), done.end(), 0) == 0;
  };
  wait_for(all_done, patience);
  return heard;
}

// All ranks that wait in vain say for whom. The lost rank is the one that says nothing, at the end
// of the chain. The first thread that gives up asks for all threads of its rank.
void MpiWorld::give_up(int waited_for, const char* call, Patience patience) {
  const std::lock_guard asking(roll_call);
  throw_if_failed();
  const std::chrono::duration<double> limit = std::min(patience.limit / 2, kMaxRollCall);
  const std::vector<int> waits_for = hear_all(kRollCall, waited_for, {limit});
  int lost = waited_for;
  for (int steps = 0; steps < size && waits_for[lost] >= 0; ++steps) lost = waits_for[lost];
  if (waits_for[lost] >= 0)
    fail(-1, fmt::format("ranks wait for each other, rank {} in {} for rank {}: their calls differ",
                         rank, call, waited_for));
  fail(lost, fmt::format("rank {} does not answer ({})", lost, call));
}

}  // namespace

std::unique_ptr<Group> open_mpi_world(const Launch& launch, Patience patience) {
  const auto world = std::make_shared<MpiWorld>(launch, patience);
  std::vector<int> all(world->size);
  for (int r = 0; r < world->size; ++r) all[r] = r;
  return std::make_unique<MpiGroup>(world, std::move(all), world->next_tag++, patience);
}

}  // namespace tandem
