#include "comm/launch.h"

#include <charconv>
#include <cstring>

#include "core/check.h"

namespace tandem {
namespace {

// MPI has two binary interfaces that matter: Open MPI's, and MPICH's, which Intel MPI, MVAPICH and
// Cray MPICH share.
constexpr const char* kOpenMpi[] = {"libmpi.so.40"};
constexpr const char* kMpichFirst[] = {"libmpich.so.12", "libmpi.so.12", "libmpi.so.40"};
constexpr const char* kOpenMpiFirst[] = {"libmpi.so.40", "libmpich.so.12", "libmpi.so.12"};

struct Variables {
  const char *rank, *size;
  std::span<const char* const> libraries;
};
// The first whose rank and size are set. Slurm's PMI-2 and PMIx serve both interfaces; variables
// that Slurm sets without srun are not asked for.
constexpr Variables kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", kOpenMpi},
    {"PMIX_RANK", "SLURM_STEP_NUM_TASKS", kOpenMpiFirst},
    {"PMI_RANK", "PMI_SIZE", kMpichFirst},
};

}  // namespace

std::optional<Launch> launch_of(const std::function<const char*(const char* name)>& environment) {
  const auto number = [&](const char* name) {
    const char* const text = environment(name);
    int value = -1;
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
    require(error == std::errc() && *end == '\0' && value >= 0,
            "the environment variable {}={} of the MPI launcher is not a number", name, text);
    return value;
  };
  for (const Variables& names : kLaunchers) {
    if (!environment(names.rank) || !environment(names.size)) continue;
    const Launch launch{number(names.rank), number(names.size), names.libraries};
    require(launch.rank < launch.size, "{}={}, but {}={}", names.rank, launch.rank, names.size,
            launch.size);
    return launch;
  }
  return std::nullopt;
}

}  // namespace tandem
