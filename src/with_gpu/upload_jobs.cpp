#include "with_gpu/upload_jobs.h"

#include <algorithm>

#include "model/checkpoint.h"

namespace tandem {

void add_upload_jobs(CudaWeights& memory, const Upload& upload, std::vector<LoadJob>& jobs) {
  const auto& [name, whole, part, first_row, to] = upload;
  const int64_t row_bytes = whole.q.row_bytes(), at_once = rows_per_load_job(row_bytes);
  const int64_t before = part.q.row_data(0) - whole.q.row_data(first_row);
  for (int64_t first = 0; first < part.q.rows; first += at_once) {
    const int64_t n = std::min(at_once, part.q.rows - first);
    jobs.push_back({whole.q.row_data(first_row + first), n * row_bytes,
                    [&memory, part = part, to = to, first, n, before](const std::byte* data) {
                      memory.upload_rows(data + before, part, to, first, n);
                    }});
  }
  if (to.scale.empty()) return;
  jobs.push_back(
      {whole.scale.row_data(0), whole.scale.rows * whole.scale.row_bytes(),
       [&memory, whole = whole, part = part, to = to, name = name](const std::byte* data) {
         TensorView scales = whole.scale;
         scales.data = const_cast<std::byte*>(data);
         check_scales(name + "_scale_inv", scales);
         const int64_t before_part = part.scale.row_data(0) - whole.scale.row_data(0);
         memory.upload_scales(data + before_part, part, to);
       }});
}

}  // namespace tandem
