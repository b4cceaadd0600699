// The numbers in which matrices are kept, and their names on the command line.
#pragma once
#include <string>

#include "core/tensor.h"

namespace tandem {

// INT8 has a scale a row, INT4 a scale a row and `group` columns: a multiple of the row's
// (kI4TwoLevel), or BF16 as in checkpoints that hold INT4 (kI4). FP8 has the scales of the
// checkpoint's blocks or, where it is made from other numbers, one a row and 128 columns.
struct WeightFormat {
  DType dtype;
  int group = 0;
  bool operator==(const WeightFormat&) const = default;
};

// The format called fp8, bf16, fp16, fp32, int8, int4 (groups of 64), int4-32, int4-128, or
// int4-32-bf16, -64-, -128-. Throws Error for another name.
WeightFormat weight_format(const std::string& name);
std::string format_name(WeightFormat format);

}  // namespace tandem
