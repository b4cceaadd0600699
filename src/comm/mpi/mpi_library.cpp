#include "comm/mpi/mpi_library.h"

#include <fmt/ranges.h>

namespace tandem {
namespace {

// Constants of MPICH's mpi.h, the same since version 3.1, by the agreement on its binary interface.
constexpr MpiHandle kMpichWorld = 0x44000000, kMpichByte = 0x4c00010d,
                    kMpichErrorsReturn = 0x54000001;
constexpr int kMaxErrorString = 1024;  // above that of both interfaces

}  // namespace

// MPI opens plug-ins of its own that may look for its symbols.
MpiLibrary::MpiLibrary(std::span<const char* const> names)
    : library_(names, SharedLibrary::Symbols::kGlobal), name_(library_.name()) {
  require(bool{library_}, "this process is a rank of an MPI launcher, but no MPI is installed ({})",
          fmt::join(names, ", "));
  find(init_thread, "MPI_Init_thread");
  find(finalize, "MPI_Finalize");
  find(comm_rank, "MPI_Comm_rank");
  find(comm_size, "MPI_Comm_size");
  find(comm_set_errhandler, "MPI_Comm_set_errhandler");
  find(isend, "MPI_Isend");
  find(irecv, "MPI_Irecv");
  find(test, "MPI_Test");
  find(iprobe, "MPI_Iprobe");
  find(get_count, "MPI_Get_count");
  find(error_string_, "MPI_Error_string");
  world = handle("ompi_mpi_comm_world", kMpichWorld);
  byte = handle("ompi_mpi_byte", kMpichByte);
  errors_return = handle("ompi_mpi_errors_return", kMpichErrorsReturn);
}

std::string MpiLibrary::error_text(int error) const {
  char text[kMaxErrorString];
  int length = 0;
  error_string_(error, text, &length);
  return {text, static_cast<size_t>(length)};
}

}  // namespace tandem
