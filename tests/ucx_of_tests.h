// Whether tests can use UCX.
#pragma once
#include <string>

#include "transport/ucx.h"

namespace tandem {

// Why they cannot; empty: they can. Sanitizers, which do not know what UCX does, are not
// considered.
inline std::string why_no_ucx() {
  try {
    ucx_transport(UcxReach::kThisHost);
    return {};
  } catch (const PathError& error) {
    return error.what();
  }
}

}  // namespace tandem
