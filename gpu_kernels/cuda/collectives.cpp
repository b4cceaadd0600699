// Implements collectives.h with NCCL 2.9 or newer. Its interface has not changed since, so the
// declarations below stand for nccl.h, and a program that was built without NCCL uses any.
#include "gpu_kernels/exchange/collectives.h"

#include <cstring>

#include "core/run_error.h"
#include "core/shared_library.h"
#include "gpu_kernels/stamp.h"

namespace tandem::gpu {
namespace {

struct NcclId {
  char bytes[128];
};
using NcclComm = void*;
constexpr int kSuccess = 0, kSum = 0;  // of ncclResult_t, ncclRedOp_t
constexpr int kInt32 = 2, kFloat = 7;  // of ncclDataType_t

struct Nccl {
  int (*get_unique_id)(NcclId* id);
  int (*comm_init_rank)(NcclComm* comm, int n_ranks, NcclId id, int rank);
  int (*comm_abort)(NcclComm comm);
  int (*all_reduce)(const void* in, void* out, size_t n, int type, int op, NcclComm comm,
                    void* stream);
  int (*all_gather)(const void* in, void* out, size_t n_in, int type, NcclComm comm, void* stream);
  int (*broadcast)(const void* in, void* out, size_t n, int type, int root, NcclComm comm,
                   void* stream);
  int (*reduce_scatter)(const void* in, void* out, size_t n_out, int type, int op, NcclComm comm,
                        void* stream);
  int (*send)(const void* in, size_t n, int type, int to, NcclComm comm, void* stream);
  int (*receive)(void* out, size_t n, int type, int from, NcclComm comm, void* stream);
  int (*group_start)();
  int (*group_end)();
  const char* (*get_error_string)(int result);

  void expect(int result, const char* call) const {
    require_run(result == kSuccess, "{}: {}: set NCCL_DEBUG=INFO to see why", call,
                get_error_string(result));
  }
};

const Nccl& nccl() {
  static const Nccl functions = [] {
    static constexpr const char* kNames[] = {"libnccl.so.2", "libnccl.so"};
    const SharedLibrary library(kNames);
    require(bool{library},
            "the GPUs of several ranks compute together by NCCL, and libnccl.so.2 is not "
            "installed: install NVIDIA's libnccl2, or use --device cpu");
    Nccl n = {};
    const bool complete = library.find(n.get_unique_id, "ncclGetUniqueId") &&
                          library.find(n.comm_init_rank, "ncclCommInitRank") &&
                          library.find(n.comm_abort, "ncclCommAbort") &&
                          library.find(n.all_reduce, "ncclAllReduce") &&
                          library.find(n.all_gather, "ncclAllGather") &&
                          library.find(n.reduce_scatter, "ncclReduceScatter") &&
                          library.find(n.broadcast, "ncclBroadcast") &&
                          library.find(n.send, "ncclSend") && library.find(n.receive, "ncclRecv") &&
                          library.find(n.group_start, "ncclGroupStart") &&
                          library.find(n.group_end, "ncclGroupEnd") &&
                          library.find(n.get_error_string, "ncclGetErrorString");
    require(complete, "{} lacks functions of NCCL: install NVIDIA's libnccl2", library.name());
    return n;
  }();
  return functions;
}

}  // namespace

struct Collectives::Impl {
  // The GPU writes the time after every few calls.
  static constexpr int kCallsBetweenStamps = 16;
  int rank, n_ranks;
  NcclComm comm = nullptr;
  Buffer stamped{sizeof(uint64_t), Site::kMapped};
  int n_calls = 0;

  void called(Stream& stream, int result, const char* call) {
    nccl().expect(result, call);
    if (++n_calls % kCallsBetweenStamps == 0) stamp(stream, stamped.as<uint64_t>());
  }
};

Collectives::Id Collectives::make_id() {
  NcclId id;
  nccl().expect(nccl().get_unique_id(&id), "ncclGetUniqueId");
  Id bytes;
  std::memcpy(bytes.data(), id.bytes, sizeof id.bytes);
  return bytes;
}

Collectives::Collectives(const Id& bytes, int rank, int n_ranks)
    : impl_(new Impl{.rank = rank, .n_ranks = n_ranks}) {
  NcclId id;
  std::memcpy(id.bytes, bytes.data(), sizeof id.bytes);
  nccl().expect(nccl().comm_init_rank(&impl_->comm, n_ranks, id, rank), "ncclCommInitRank");
}

// Work that is under way is ended: ncclCommDestroy() would wait for ranks that are lost.
Collectives::~Collectives() {
  if (impl_->comm) nccl().comm_abort(impl_->comm);
}

int Collectives::rank() const { return impl_->rank; }
int Collectives::n_ranks() const { return impl_->n_ranks; }

void Collectives::all_reduce(Stream& stream, float* x, int64_t n) {
  impl_->called(
      stream,
      nccl().all_reduce(x, x, static_cast<size_t>(n), kFloat, kSum, impl_->comm, stream.handle()),
      "ncclAllReduce");
}

void Collectives::broadcast(Stream& stream, float* x, int64_t n, int root) {
  impl_->called(
      stream,
      nccl().broadcast(x, x, static_cast<size_t>(n), kFloat, root, impl_->comm, stream.handle()),
      "ncclBroadcast");
}

void Collectives::all_gather(Stream& stream, void* all, int64_t n) {
  const int32_t* const own = static_cast<int32_t*>(all) + impl_->rank * n;
  impl_->called(
      stream,
      nccl().all_gather(own, all, static_cast<size_t>(n), kInt32, impl_->comm, stream.handle()),
      "ncclAllGather");
}

void Collectives::reduce_scatter(Stream& stream, float* all, int64_t n) {
  impl_->called(stream,
                nccl().reduce_scatter(all, all + impl_->rank * n, static_cast<size_t>(n), kFloat,
                                      kSum, impl_->comm, stream.handle()),
                "ncclReduceScatter");
}

// The calls of a group are one operation, so ranks need not send and receive in one order.
void Collectives::all_to_all(Stream& stream, const Parcels& p) {
  const auto* sent = static_cast<const int32_t*>(p.sent);
  auto* received = static_cast<int32_t*>(p.received);
  nccl().expect(nccl().group_start(), "ncclGroupStart");
  for (int r = 0; r < impl_->n_ranks; ++r) {
    const auto n_sent = static_cast<size_t>(p.n_sent[r]);
    const auto n_received = static_cast<size_t>(p.n_received[r]);
    if (n_sent > 0)
      nccl().expect(nccl().send(sent, n_sent, kInt32, r, impl_->comm, stream.handle()), "ncclSend");
    if (n_received > 0)
      nccl().expect(nccl().receive(received, n_received, kInt32, r, impl_->comm, stream.handle()),
                    "ncclRecv");
    sent += n_sent;
    received += n_received;
  }
  impl_->called(stream, nccl().group_end(), "ncclGroupEnd");
}

uint64_t Collectives::progress() const {
  return *static_cast<const volatile uint64_t*>(impl_->stamped.as<uint64_t>());
}

}  // namespace tandem::gpu
