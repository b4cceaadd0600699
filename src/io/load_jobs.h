// Reads the weights of a checkpoint with all threads and passes them piece by piece to callbacks
// that pack them. Reads use system calls instead of the mapping: page faults cost as much as
// copying cached data, and direct reads of 4 MiB keep the disk's queue full without read-ahead
// (benchmarks/load_bench.cpp).
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/mapped_file.h"

namespace tandem {

// A range of a file and the function that processes it.
struct LoadJob {
  const std::byte* source;  // address in the mapping of one of the files; never dereferenced
  int64_t bytes;
  // Called once, on any thread, with a copy of the range that is valid during the call only. The
  // copy is 64-byte aligned if `source` is.
  std::function<void(const std::byte* data)> run;
};

// Size of a job whose bytes are still in the core's own cache when it runs.
constexpr int64_t kLoadJobBytes = 512 << 10;

// Number of whole rows that fit into one job; at least 1.
constexpr int64_t rows_per_load_job(int64_t row_bytes) {
  return row_bytes >= kLoadJobBytes ? 1 : kLoadJobBytes / row_bytes;
}

// Called on the calling thread, about ten times a second and once at the end. May throw, which
// stops loading.
using LoadProgress = std::function<void(int64_t bytes_done, int64_t bytes_total, double seconds)>;

struct LoadOptions {
  int n_threads = 1;
  LoadProgress progress = {};
};

// Number of reading threads for n_threads compute threads: up to twice as many, since some wait for
// the disk while others copy.
int load_workers(int n_threads);
// Bytes that each of n_workers threads should read with one system call.
int64_t load_read_bytes(int n_workers);

// Runs every job, several at once, in the order of the files' bytes, and returns when all are done.
// Cached data is copied from the page cache; the rest is read with O_DIRECT, so that memory holds
// the weights once. Neither makes pages of the mapping resident. The first exception of a job, of
// reading (Error: a truncated file, a broken disk) or of `progress` stops the rest and is rethrown.
void run_load_jobs(std::span<const MappedFile> files, std::vector<LoadJob> jobs,
                   const LoadOptions& options);

// One line of at most 79 columns for a terminal: bar, percent, GB, rate, time left. The rate is
// that of the bytes after bytes_before, which were done before the clock began.
std::string progress_line(int64_t bytes_done, int64_t bytes_total, double seconds,
                          std::string_view what = "loading", int64_t bytes_before = 0);

}  // namespace tandem
