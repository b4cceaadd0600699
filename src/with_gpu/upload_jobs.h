// Uploading stored matrices to GPU memory, in jobs that any thread may run.
#pragma once
#include <string>
#include <vector>

#include "io/load_jobs.h"
#include "ops/cuda_weights.h"

namespace tandem {

// A stored matrix, the part of it that a GPU keeps, and where.
struct Upload {
  std::string name;
  QuantView whole, part;
  int64_t first_row;  // of the part
  QuantView to;       // reserved in the memory
};

// Appends jobs that upload the matrix. The memory outlives them; finish() waits for the copies. A
// job throws Error for scales that are NaN, infinite or negative.
void add_upload_jobs(CudaWeights& memory, const Upload& upload, std::vector<LoadJob>& jobs);

}  // namespace tandem
