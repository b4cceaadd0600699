// How close products and attention come to the roofline of their device: the part of the time that
// is not lost, by number of rows. A machine's own curves first, then one table of defaults, each
// curve with its origin.
#pragma once
#include <span>
#include <string_view>

#include "core/machine.h"
#include "core/tensor.h"

namespace tandem {

enum class Product { kExperts, kDense };
using Curves = std::span<const EfficiencyCurve>;

// Of products with matrices kept as `format`, on a device of `kind`: an instruction set, or "gpu".
// `rows`: of activations, an expert or altogether. The roofline is the larger of bytes / read
// bandwidth and operations / peak of the arithmetic in which the format is multiplied.
double product_ratio(std::string_view kind, Product product, DType format, double rows,
                     Curves measured = {});

// Of attention over the cache, in absorbed form by the tokens in the cache, or restored.
double attention_ratio(std::string_view kind, bool absorbed, double context, Curves measured = {});

}  // namespace tandem
