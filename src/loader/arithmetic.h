// What decides the bits of sums, as text that two processes compare: kernels, formats of experts,
// and how columns and experts are divided.
#pragma once
#include <string>

#include "cpu_kernels/kernels.h"
#include "loader/expert_workers.h"
#include "loader/weights/model_cache.h"
#include "model/weights.h"

namespace tandem {

// How experts are computed on CPUs; the text of WorkerWelcome::arithmetic.
std::string arithmetic_text(const cpu::KernelTable& kernels, const ExpertsLayout& layout,
                            const ModelWeights& weights, const ModelConfig& config);

// How all expert workers of a backbone compute: their sums depend on their kernels and on how the
// experts are divided. Standbys are left out until they have experts.
std::string arithmetic_of_workers(const AskedWorkers& asked);

}  // namespace tandem
