#include "offload/cpu_experts.h"

#include <algorithm>

#include "ops/cpu_weights.h"

namespace tandem {
namespace {

constexpr int kRows = 64;          // output rows that a thread takes at a time
constexpr int kGroupTokens = 256;  // tokens of one expert that are a piece of work of their own

}  // namespace

CpuExperts::CpuExperts(const cpu::KernelTable& kernels, const ModelConfig& config,
                       const ModelWeights& weights, int max_tokens, Team& team)
    : kernels_(kernels),
      c_(config),
      w_(weights),
      team_(team),
      unfinished_(config.router.n_experts +
                  int64_t{max_tokens} * config.router.n_active / kGroupTokens),
      first_of_(config.router.n_experts + 1),
      tokens_(int64_t{max_tokens} * config.router.n_active),
      pair_weights_(int64_t{max_tokens} * config.router.n_active),
      x_scales_(max_tokens),
      act_scales_(int64_t{max_tokens} * config.router.n_active) {
  groups_.reserve(unfinished_.size());
  const int64_t pairs = int64_t{max_tokens} * config.router.n_active;
  arena_ = Arena::holding([&](auto visit) {
    visit(x_, max_tokens, cpu::encoded_columns(config.dim), DType::kBF16);
    visit(act_, pairs, config.expert_dim, DType::kF32);
    visit(encoded_act_, pairs, cpu::encoded_columns(config.expert_dim), DType::kBF16);
    visit(sum_, max_tokens, config.dim, DType::kF32);
    visit(part_, int64_t{team.size()} * kGroupTokens, kRows, DType::kF32);
  });
}

// Pieces of work are some rows of one group (first pass) or some rows of every expert (second
// pass): no two threads write the same number, and each sum runs over the experts in ascending
// order. Whoever finishes a group's last piece encodes its rows for the second pass.
void CpuExperts::submit(const ExpertBatch& batch) {
  n_tokens_ = static_cast<int>(batch.x.rows);
  group_by_expert(batch);
  const FfnWeights& any = *groups_.front().weights;
  x_type_ = activation_for(kernels_, any.gate.q.dtype);
  act_type_ = activation_for(kernels_, any.down.q.dtype);
  const cpu::Activations x = encode_tokens(batch.x);

  const int pieces = (c_.expert_dim + kRows - 1) / kRows;
  for (size_t g = 0; g < groups_.size(); ++g) unfinished_[g].store(pieces);
  const int64_t n_pieces = static_cast<int64_t>(groups_.size()) * pieces;
  team_.run(n_pieces, [&](int64_t i, int thread) {
    const int64_t g = i / pieces;
    // What this thread will probably do next: every team.size()-th piece.
    const int64_t next = std::min(i + team_.size(), n_pieces - 1);
    activate(x, {groups_[g], static_cast<int>(i % pieces) * kRows},
             {groups_[next / pieces], static_cast<int>(next % pieces) * kRows},
             part_.row<float>(int64_t{thread} * kGroupTokens));
    if (unfinished_[g].fetch_sub(1) == 1) encode_activated(groups_[g]);
  });
  team_.run((c_.dim + kRows - 1) / kRows, [&](int64_t i, int thread) {
    project(static_cast<int>(i) * kRows, part_.row<float>(int64_t{thread} * kGroupTokens));
  });
}

void CpuExperts::add_to(TensorView y) {
  for (int t = 0; t < n_tokens_; ++t) {
    float* to = y.row<float>(t);
    const float* from = sum_.row<float>(t);
    for (int64_t i = 0; i < y.cols; ++i) to[i] += from[i];
  }
}

// Counting sort of the pairs by expert; tokens stay in order.
void CpuExperts::group_by_expert(const ExpertBatch& batch) {
  const int n_active = c_.router.n_active;
  std::fill(first_of_.begin(), first_of_.end(), 0);
  for (int t = 0; t < n_tokens_; ++t)
    for (int k = 0; k < n_active; ++k) ++first_of_[batch.routing.ids.row<int32_t>(t)[k] + 1];
  for (size_t e = 1; e < first_of_.size(); ++e) first_of_[e] += first_of_[e - 1];

  groups_.clear();
  for (int e = 0; e < c_.router.n_experts; ++e)
    for (int first = first_of_[e]; first < first_of_[e + 1]; first += kGroupTokens)
      groups_.push_back({&w_.layers[batch.layer].experts[e], first,
                         std::min(kGroupTokens, first_of_[e + 1] - first)});

  for (int t = 0; t < n_tokens_; ++t)
    for (int k = 0; k < n_active; ++k) {
      const int at = first_of_[batch.routing.ids.row<int32_t>(t)[k]]++;
      tokens_[at] = t;
      pair_weights_[at] = batch.routing.weights.row<float>(t)[k];
    }
}

// The tokens as the first pass multiplies them; rows are chosen group by group.
cpu::Activations CpuExperts::encode_tokens(TensorView x) {
  if (x_type_ == cpu::ActivationType::kF32) return {x.data, x.row_bytes(), x_type_};
  const auto encode = [&](int64_t t, int) {
    kernels_.encode({x.row<float>(t), c_.dim, x_type_, x_.row_data(t), &x_scales_[t]});
  };
  if (n_tokens_ == 1) {
    encode(0, 0);
  } else {
    team_.run(n_tokens_, encode);
  }
  return {x_.data, x_.row_bytes(), x_type_, nullptr, x_scales_.data()};
}

// act = silu(gate x) * (up x) on some rows of one group's expert, for its tokens.
void CpuExperts::activate(const cpu::Activations& x, Piece piece, Piece next, float* up) {
  const Group& group = piece.group;
  const int first_row = piece.first_row;
  const int n_rows = std::min(kRows, c_.expert_dim - first_row);
  cpu::GemmArgs product = {.x = x,
                           .w = kernel_weight(group.weights->gate),
                           .first_row = first_row,
                           .out = act_.row<float>(group.first) + first_row,
                           .out_stride = act_.stride,
                           .m = group.n,
                           .n = n_rows,
                           .k = c_.dim};
  const cpu::Weight up_weight = kernel_weight(group.weights->up);
  product.x.rows = tokens_.data() + group.first;
  product.next = &up_weight;
  product.next_row = first_row;
  kernels_.gemm(product);
  const cpu::Weight next_gate = kernel_weight(next.group.weights->gate);
  product.w = up_weight;
  product.next = &next_gate;
  product.next_row = next.first_row;
  product.out = up;
  product.out_stride = kRows;
  kernels_.gemm(product);
  for (int i = 0; i < group.n; ++i) {
    float* gate = act_.row<float>(group.first + i) + first_row;
    kernels_.silu_mul({gate, up + i * kRows, gate, n_rows});
  }
}

void CpuExperts::encode_activated(const Group& group) {
  if (act_type_ == cpu::ActivationType::kF32) return;
  for (int i = group.first; i < group.first + group.n; ++i)
    kernels_.encode(
        {act_.row<float>(i), c_.expert_dim, act_type_, encoded_act_.row_data(i), &act_scales_[i]});
}

// sum[t] = sum over experts of weight * (down act) on some rows of every expert's output.
void CpuExperts::project(int first_row, float* part) {
  const int n_rows = std::min(kRows, c_.dim - first_row);
  const TensorView& act = act_type_ == cpu::ActivationType::kF32 ? act_ : encoded_act_;
  for (int t = 0; t < n_tokens_; ++t) std::fill_n(sum_.row<float>(t) + first_row, n_rows, 0.f);
  for (const Group& group : groups_) {
    const bool last = &group == &groups_.back();
    const cpu::Weight next = kernel_weight((last ? groups_.front() : *(&group + 1)).weights->down);
    kernels_.gemm(
        {.x = {act.row_data(group.first), act.row_bytes(), act_type_, nullptr,
               act_scales_.data() + group.first},
         .w = kernel_weight(group.weights->down),
         .first_row = first_row,
         .out = part,
         .out_stride = kRows,
         .m = group.n,
         .n = n_rows,
         .k = c_.expert_dim,
         .next = &next,
         .next_row = last ? std::min(first_row + kRows * team_.size(), c_.dim - 1) : first_row});
    for (int i = 0; i < group.n; ++i) {
      float* to = sum_.row<float>(tokens_[group.first + i]) + first_row;
      const float weight = pair_weights_[group.first + i];
      for (int r = 0; r < n_rows; ++r) to[r] += weight * part[i * kRows + r];
    }
  }
}

}  // namespace tandem
