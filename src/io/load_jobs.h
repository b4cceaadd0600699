// Reads the weights of a checkpoint with all threads and hands them, piece by piece, to whoever
// packs them. Through system calls, not through the mapping: its page faults cost as much as
// copying what is cached, and reads of 4 MiB past the page cache fill the disk's queue without
// read-ahead (benchmarks/load_bench.cpp).
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

// A range of a file and what to do with it.
struct LoadJob {
  const std::byte* source;  // in the mapping of one of the files; only its place matters
  int64_t bytes;
  // Called once, on any thread, with a copy of the range that is gone when it returns (64-byte
  // aligned if `source` is).
  std::function<void(const std::byte* data)> run;
};

// Of this size a job's bytes are still in the core's own cache when it runs.
constexpr int64_t kLoadJobBytes = 512 << 10;

// How many whole rows fit a job; at least 1.
constexpr int64_t rows_per_load_job(int64_t row_bytes) {
  return row_bytes >= kLoadJobBytes ? 1 : kLoadJobBytes / row_bytes;
}

// Called on the calling thread, about ten times a second and once at the end. May throw: that
// stops loading.
using LoadProgress = std::function<void(int64_t bytes_done, int64_t bytes_total, double seconds)>;

struct LoadOptions {
  int n_threads = 1;
  LoadProgress progress = {};
};

// How many threads read for n_threads that compute: some wait for the disk while others copy; and
// how much each should ask of a disk at once.
int load_workers(int n_threads);
int64_t load_read_bytes(int n_workers);

// Runs every job, in the order of the files' bytes, several at once, and returns when all are done.
// What lies in the page cache is copied from there; the rest is read past it (O_DIRECT), so that
// memory holds the weights once. Neither makes pages of the mapping resident. The first exception
// of a job, of reading (Error: a file cut short, a broken disk) or of `progress` stops the rest and
// is thrown again.
void run_load_jobs(std::span<const MappedFile> files, std::vector<LoadJob> jobs,
                   const LoadOptions& options);

// One line of at most 79 columns for a terminal: bar, percent, GB, GB/s, time left.
std::string progress_line(int64_t bytes_done, int64_t bytes_total, double seconds,
                          std::string_view what = "loading");

}  // namespace tandem
