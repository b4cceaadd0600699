// Whether tests can use UCX.
#pragma once
#include <string>

#include "transport/ucx.h"

namespace tandem {

// Why they cannot; empty: they can.
inline std::string why_no_ucx() {
  if (TANDEM_SANITIZED) return "sanitizers do not know what UCX does";
  try {
    ucx_transport(UcxReach::kThisHost);
    return {};
  } catch (const PathError& error) {
    return error.what();
  }
}

}  // namespace tandem
