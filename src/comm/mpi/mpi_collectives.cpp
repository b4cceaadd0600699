#include "comm/mpi/mpi_collectives.h"

#include <vector>

#include "comm/mpi/mpi_library.h"

namespace tandem {
namespace {

// As those of mpi_library.cpp.
constexpr MpiHandle kMpichFloat = 0x4c00040a, kMpichSum = 0x58000003;

class MpiCollectives final : public RawCollectives {
 public:
  explicit MpiCollectives(std::span<const char* const> names) : mpi_(names) {
    mpi_.find(barrier_, "MPI_Barrier");
    mpi_.find(bcast_, "MPI_Bcast");
    mpi_.find(allgather_, "MPI_Allgather");
    mpi_.find(alltoallv_, "MPI_Alltoallv");
    mpi_.find(reduce_scatter_block_, "MPI_Reduce_scatter_block");
    mpi_.find(allreduce_, "MPI_Allreduce");
    float_ = mpi_.handle("ompi_mpi_float", kMpichFloat);
    sum_ = mpi_.handle("ompi_mpi_op_sum", kMpichSum);
  }
  std::string name() const override { return mpi_.name(); }

  void barrier() override { expect(barrier_(mpi_.world)); }
  void broadcast(Bytes x, int root) override {
    expect(bcast_(x.data(), count(x.size()), mpi_.byte, root, mpi_.world));
  }
  void all_gather(ConstBytes mine, Bytes out) override {
    const int n = count(mine.size());
    expect(allgather_(mine.data(), n, mpi_.byte, out.data(), n, mpi_.byte, mpi_.world));
  }
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override {
    set(in.sizes, in_);
    set(out.sizes, out_);
    expect(alltoallv_(in.all.data(), in_.counts.data(), in_.places.data(), mpi_.byte,
                      out.all.data(), out_.counts.data(), out_.places.data(), mpi_.byte,
                      mpi_.world));
  }
  void reduce_scatter(std::span<const float> in, std::span<float> out) override {
    expect(
        reduce_scatter_block_(in.data(), out.data(), count(out.size()), float_, sum_, mpi_.world));
  }
  void all_reduce(std::span<const float> in, std::span<float> out) override {
    expect(allreduce_(in.data(), out.data(), count(in.size()), float_, sum_, mpi_.world));
  }

 private:
  struct IntPieces {
    std::vector<int> counts, places;  // [ranks]
  };
  void expect(int error) const {
    if (error != 0) throw RunError(mpi_.error_text(error));
  }
  static int count(size_t n) {
    check(n <= INT32_MAX, "MPI counts in int");
    return static_cast<int>(n);
  }
  static void set(std::span<const int64_t> sizes, IntPieces& pieces) {
    pieces.counts.clear();
    pieces.places.clear();
    size_t place = 0;
    for (const int64_t size : sizes) {
      pieces.counts.push_back(count(size));
      pieces.places.push_back(count(place));
      place += size;
    }
  }

  const MpiLibrary mpi_;
  MpiHandle float_, sum_;
  IntPieces in_, out_;
  int (*barrier_)(MpiHandle comm);
  int (*bcast_)(void* data, int count, MpiHandle type, int root, MpiHandle comm);
  int (*allgather_)(const void* in, int in_count, MpiHandle in_type, void* out, int out_count,
                    MpiHandle out_type, MpiHandle comm);
  int (*alltoallv_)(const void* in, const int* in_counts, const int* in_places, MpiHandle in_type,
                    void* out, const int* out_counts, const int* out_places, MpiHandle out_type,
                    MpiHandle comm);
  int (*reduce_scatter_block_)(const void* in, void* out, int out_count, MpiHandle type,
                               MpiHandle sum, MpiHandle comm);
  int (*allreduce_)(const void* in, void* out, int count, MpiHandle type, MpiHandle sum,
                    MpiHandle comm);
};

}  // namespace

std::unique_ptr<RawCollectives> open_mpi_collectives(std::span<const char* const> names) {
  return std::make_unique<MpiCollectives>(names);
}

}  // namespace tandem
