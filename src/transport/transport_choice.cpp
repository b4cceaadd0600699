#include "transport/transport_choice.h"

#include "transport/tcp.h"
#include "transport/ucx.h"

namespace tandem {

ChosenTransport chosen_transport(TransportChoice choice, const Secret& secret,
                                 const std::string& option) {
  if (choice == TransportChoice::kTcp) return {tcp_transport()};
  const bool is_open = secret.protection() == Protection::kProof;
  try {
    return {ucx_transport(is_open ? UcxReach::kNetwork : UcxReach::kThisHost), true};
  } catch (const PathError& error) {
    require(choice == TransportChoice::kAuto, "{} ucx: {}: give {} auto or tcp, or install it",
            option, error.what(), option);
    return {tcp_transport(), false, error.what()};
  }
}

}  // namespace tandem
