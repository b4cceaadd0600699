// What the executor obeys of a placement: all of it, as long as everything is on the CPUs of one
// host, or the backbone on its first GPU and experts on both.
#pragma once
#include <optional>

#include "offload/plan/placement.h"
#include "ops/experts_layout.h"

namespace tandem {

// Of a GPU that has the backbone.
struct CardParts {
  bool embedding_on_cpu = false;
  // Steps this long bring the CPU's experts to the card; 0: none, kMeasuredCrossover: as measured
  // once they are loaded.
  int stream_from_tokens = 0;
  // Sequences of a decode step that has two micro-batches; 0: none has.
  int micro_batches_from_sequences = 0;
  // [layers][n_experts], nothing for a dense layer: these experts are on the card.
  std::vector<std::vector<bool>> experts;
};

constexpr int kMeasuredCrossover = -1;

struct ExecutedParts {
  ExpertsLayout experts;  // in host memory
  int64_t kv_tokens;
  DType kv_type;
  int chunk_tokens;               // of a prompt that one step computes
  std::optional<CardParts> card;  // nothing: CPUs compute everything
};

// Throws Error for a placement that is not sound (check_placement), and for what no part of this
// program runs yet, naming the layers or the layer and expert: GPUs that `machine` lacks or that
// are not its first, experts on a GPU without the backbone, other hosts, several formats within a
// layer's CPU experts.
ExecutedParts executed_parts(const ModelConfig& config, const Machine& machine,
                             const Placement& placement);

// So many experts on the card, as evenly many of each layer as possible, the first ones.
CardParts evenly_on_card(const ModelConfig& config, int64_t n_experts);

}  // namespace tandem
