#include "offload/routing_recorder.h"

namespace tandem {

void count_choices(const TensorView& ids, std::vector<int64_t>& counts) {
  for (int64_t t = 0; t < ids.rows; ++t)
    for (int64_t k = 0; k < ids.cols; ++k) ++counts[ids.row<int32_t>(t)[k]];
}

}  // namespace tandem
