// Messages by UCX: shared memory on one host, and RDMA between hosts. A connection begins as one of
// TCP, with the handshake and its proofs, and takes UCX as its path (transport.h) once both sides
// ask for it.
#pragma once
#include "transport/transport.h"

namespace tandem {

// What UCX may use. It does not encrypt, so what others could read is to stay on this host.
enum class UcxReach : uint8_t {
  kThisHost,  // shared memory
  kNetwork,   // InfiniBand and RoCE too, or what the variable UCX_TLS names
};

// Throws PathError with the reason where UCX is not to be had. Its connections' path_address()
// is never empty.
std::unique_ptr<Transport> ucx_transport(UcxReach reach);

// For benchmarks: messages of one size, each answered by one of another size on another thread of
// this process, by UCX's shared memory alone. Both sides sleep while they wait.
class PlainRoundTrips {
 public:
  virtual ~PlainRoundTrips() = default;
  virtual void round_trip() = 0;
};
// Sizes in bytes. Throws PathError as ucx_transport().
std::unique_ptr<PlainRoundTrips> plain_ucx(int64_t there, int64_t back);

}  // namespace tandem
