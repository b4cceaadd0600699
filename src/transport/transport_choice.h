// Which transport a process uses, as its user has chosen.
#pragma once
#include <string>

#include "transport/secret.h"
#include "transport/transport.h"

namespace tandem {

enum class TransportChoice : uint8_t {
  kTcp,
  kUcx,   // shared memory, or RDMA, for what follows the handshake
  kAuto,  // the same where it can be had, and else TCP
};

struct ChosenTransport {
  std::unique_ptr<Transport> transport;
  bool has_paths = false;    // its connections have a path beside the socket
  std::string why_not = {};  // kAuto has found none
};
// Throws Error where UCX is chosen and not to be had; `option` names what chose it. UCX does not
// encrypt, so it has shared memory alone, unless the secret stands for proofs without encryption.
ChosenTransport chosen_transport(TransportChoice choice, const Secret& secret,
                                 const std::string& option);

}  // namespace tandem
