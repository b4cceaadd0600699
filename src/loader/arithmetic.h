// What decides the bits of sums, as text that two processes compare: kernels, formats of experts,
// and how columns and experts are divided.
#pragma once
#include <string>

#include "cpu_kernels/kernels.h"
#include "loader/expert_workers.h"
#include "loader/weights/model_cache.h"
#include "model/backbone_share.h"
#include "model/weights.h"
#include "offload/ranks/expert_owners.h"

namespace tandem {

// How experts are computed on CPUs; the text of WorkerWelcome::arithmetic.
std::string arithmetic_text(const cpu::KernelTable& kernels, const ExpertsLayout& layout,
                            const ModelWeights& weights, const ModelConfig& config);

// How all expert workers of a backbone compute: their sums depend on their kernels and on how the
// experts are divided. Standbys are left out until they have experts.
std::string arithmetic_of_workers(const AskedWorkers& asked);

// What several ranks add up.
struct SumsOfRanks {
  BackboneGrid grid;
  const ExpertOwners& owners;  // of a stage
  bool has_slices = false;     // of every expert on every rank, instead of whole experts
  // How rows of replicas travel; empty: ranks add up the sums of the experts that they have.
  std::string ways = {};
  bool ways_decide = false;  // between hosts of several ranks, or with rows in FP8
};

// How the ranks of a stage divide sums. Stages of a pipeline divide none. Begins with a comma;
// empty for one rank.
std::string arithmetic_of_ranks(const SumsOfRanks& sums);

}  // namespace tandem
