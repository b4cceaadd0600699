// How close products and attention come to what their device could do: the time of reading and
// arithmetic together (rates.h), over the time they take, by number of rows. A CPU that hides some
// of one behind the other comes above 1. A machine's own curves first, then one table of defaults,
// each curve with its origin.
#pragma once
#include <span>
#include <string_view>

#include "core/machine.h"
#include "core/tensor.h"

namespace tandem {

enum class Product { kExperts, kDense };
using Curves = std::span<const EfficiencyCurve>;

// Of products with matrices kept as `format`, on a device of `kind`: an instruction set, or "gpu".
// `rows`: of activations, an expert or altogether.
double product_ratio(std::string_view kind, Product product, DType format, double rows,
                     Curves measured = {});

// Of attention over the cache, in absorbed form by the tokens in the cache, or restored.
double attention_ratio(std::string_view kind, bool absorbed, double context, Curves measured = {});

}  // namespace tandem
