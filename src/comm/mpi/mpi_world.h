// The ranks that an MPI launcher started, as a group for memory of the host.
#pragma once
#include <memory>

#include "comm/group.h"
#include "comm/launch.h"

namespace tandem {

// The group of all ranks; once in a process, and its groups are used by one thread at a time. MPI
// ends with the last of them, when all ranks come to that within `patience`. It does not end after
// a GroupError or while another exception ends this rank alone, which would wait for the others:
// then the process leaves by std::_Exit, and the launcher ends the others. Throws Error when there
// is no MPI, or another number of ranks than the launcher says.
std::unique_ptr<Group> open_mpi_world(const Launch& launch, Patience patience = {});

}  // namespace tandem
