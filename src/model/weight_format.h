// The number formats of matrices, and their names on the command line.
#pragma once
#include <optional>
#include <string>

#include "core/tensor.h"

namespace tandem {

// INT8 has a scale per row. INT4 has a scale per row and `group` columns: a multiple of the row's
// scale (kI4TwoLevel), or BF16 as in checkpoints with INT4 (kI4). FP8 has the scales of the
// checkpoint's blocks or, where it is converted from other numbers, one per row and 128 columns.
struct WeightFormat {
  DType dtype;
  int group = 0;
  bool operator==(const WeightFormat&) const = default;
};

// The format named fp8, bf16, fp16, fp32, int8, int4 (groups of 64), int4-32, int4-128, or
// int4-32-bf16, -64-, -128-; empty for another name, for which weight_format() throws Error.
std::optional<WeightFormat> find_weight_format(const std::string& name);
WeightFormat weight_format(const std::string& name);
std::string weight_format_names();  // separated by commas
std::string format_name(WeightFormat format);

}  // namespace tandem
