// Whether an MPI launcher started this process as one of several ranks, and which.
#pragma once
#include <functional>
#include <optional>
#include <span>

namespace tandem {

// What the environment says before MPI is opened.
struct Launch {
  int rank, size;
  // Names under which the launcher's MPI is opened, in this order.
  std::span<const char* const> libraries;
};

// Ranks of mpirun (Open MPI, MPICH, Intel MPI) and of srun with PMI-2 or PMIx. Nothing: the process
// was started alone. Throws Error for numbers that make no sense.
std::optional<Launch> launch_of(const std::function<const char*(const char* name)>& environment);

}  // namespace tandem
