// The MPI of this machine, opened at run time: the program links none, so the same file runs alone
// on a machine without MPI. Handles, constants and functions are those of one of the two binary
// interfaces in use (launch.cpp).
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "core/check.h"
#include "core/shared_library.h"

namespace tandem {

// A pointer in Open MPI's interface, an int in MPICH's, which is passed in the lower half.
using MpiHandle = intptr_t;

// Larger than the status of any interface.
struct alignas(8) MpiStatus {
  std::byte bytes[64];
};

class MpiLibrary {
 public:
  // Opens the first of `names` that exists. Throws Error when none does or functions are missing.
  // The library stays loaded: its threads and exit handlers do.
  explicit MpiLibrary(std::span<const char* const> names);
  const std::string& name() const { return name_; }
  // Sets `function` to the one of this name. Throws Error where there is none.
  template <class F>
  void find(F*& function, const char* name) const {
    require(library_.find(function, name), "{} has no {}", name_, name);
  }
  // Open MPI's handles are the addresses of objects, MPICH's are constants.
  MpiHandle handle(const char* object, MpiHandle of_mpich) const {
    void* const found = library_.object(object);
    return found ? reinterpret_cast<MpiHandle>(found) : of_mpich;
  }

  MpiHandle world, byte, errors_return;
  static constexpr int kSerialized = 2;  // MPI_THREAD_SERIALIZED: one thread at a time makes calls

  // Each returns MPI_SUCCESS, 0, or an error for error_text().
  int (*init_thread)(int* argc, char*** argv, int required, int* provided);
  int (*finalize)();
  int (*comm_rank)(MpiHandle comm, int* rank);
  int (*comm_size)(MpiHandle comm, int* size);
  int (*comm_set_errhandler)(MpiHandle comm, MpiHandle handler);
  int (*isend)(const void* data, int count, MpiHandle type, int to, int tag, MpiHandle comm,
               MpiHandle* request);
  int (*irecv)(void* data, int count, MpiHandle type, int from, int tag, MpiHandle comm,
               MpiHandle* request);
  int (*test)(MpiHandle* request, int* flag, MpiStatus* status);
  int (*iprobe)(int from, int tag, MpiHandle comm, int* flag, MpiStatus* status);
  int (*get_count)(const MpiStatus* status, MpiHandle type, int* count);
  std::string error_text(int error) const;

 private:
  SharedLibrary library_;
  int (*error_string_)(int error, char* text, int* length);
  std::string name_;
};

}  // namespace tandem
