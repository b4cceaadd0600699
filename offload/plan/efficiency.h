// Efficiency of products and attention: ideal time of reading and arithmetic (together(), rates.h)
// over measured time, by number of rows. A CPU that overlaps part of the two exceeds 1. The
// machine's own curves take precedence over a table of defaults; each default states its origin.
#pragma once
#include <span>
#include <string_view>

#include "core/machine.h"
#include "core/tensor.h"

namespace tandem {

enum class Product { kExperts, kDense };
using Curves = std::span<const EfficiencyCurve>;

// Efficiency of products with matrices stored as `format` on a device of `kind`, an instruction set
// or "gpu". `rows` are activation rows: per expert for kExperts, of the whole batch for kDense.
double product_ratio(std::string_view kind, Product product, DType format, double rows,
                     Curves measured = {});

// Efficiency of attention over a cache of `context` tokens, in absorbed form or with restored keys
// and values.
double attention_ratio(std::string_view kind, bool absorbed, double context, Curves measured = {});

}  // namespace tandem
