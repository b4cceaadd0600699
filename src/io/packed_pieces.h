// Helpers shared by the reader and the writer of packed cache files.
#pragma once
#include <algorithm>
#include <atomic>
#include <string>

#include "core/rounding.h"
#include "io/load_jobs.h"
#include "io/packed_header.h"
#include "io/workers.h"

namespace tandem {

// Whether `path` still refers to the open file `fd`; another process may have renamed or removed
// it.
bool still_names(const std::string& path, int fd);

// Calls work(begin, bytes) for pieces of whole blocks that cover [0, total_bytes), several at once.
template <class Work>
void for_each_packed_piece(int64_t total_bytes, const LoadOptions& options, const Work& work) {
  const int n_workers = load_workers(options.n_threads);
  const int64_t piece = load_read_bytes(n_workers) / kPackedBlockBytes * kPackedBlockBytes;
  std::atomic<int64_t> done = 0;
  Workers().run(
      n_workers, ceil_div(total_bytes, piece),
      [&](int64_t i, int) {
        const int64_t bytes = std::min(piece, total_bytes - i * piece);
        work(i * piece, bytes);
        done += bytes;
      },
      [&](double seconds) {
        if (options.progress) options.progress(done, total_bytes, seconds);
      });
}

}  // namespace tandem
