#include "offload/expert_slice.h"

#include <algorithm>

#include "core/rounding.h"
#include "ops/cpu_weights.h"

namespace tandem {
namespace {

constexpr int kRows = 64;  // output rows per product
constexpr int kFloatsOfLine = 64 / sizeof(float);

// Rows per item of the second pass, which reads the activations of all groups for them: enough that
// this costs little beside the weights, yet few enough that threads end together.
int rows_of_second_pass(int64_t rows_of_group, int dim, int n_threads) {
  const int64_t enough = 8 * rows_of_group / kRows, most = dim / (8 * kRows * n_threads);
  return static_cast<int>(std::clamp<int64_t>(enough, 1, std::max<int64_t>(1, most))) * kRows;
}

// A single row is its own tile.
bool is_tiled(int n_rows, bool takes_tiles) { return takes_tiles && n_rows > 1; }

int width_of(const ModelWeights& weights, const ModelConfig& config, int node) {
  return static_cast<int>(weights.slices.empty() ? config.expert_dim : weights.slices[node].n);
}

}  // namespace

ExpertSlice::ExpertSlice(const cpu::KernelTable& kernels, const ModelConfig& config,
                         const ModelWeights& weights, int max_tokens, const Team& team, int node)
    : kernels_(kernels),
      c_(config),
      w_(weights),
      n_threads_(team.size_of_node(node)),
      node_(node),
      width_(width_of(weights, config, node)),
      x_scales_(max_tokens),
      act_scales_(int64_t{max_tokens} * config.router.n_active),
      untiled_(config.router.n_experts +
               int64_t{max_tokens} * config.router.n_active / kGroupTokens),
      unfinished_(untiled_.size()) {
  if (is_empty()) return;
  const int64_t pairs = int64_t{max_tokens} * config.router.n_active;
  const bool tiles = kernels.tile != nullptr;
  const int behind = tiles ? cpu::kTileRows : 0;  // rows: more than products read behind the last
  if (tiles) tiles_of_x_.reserve(untiled_.size() + pairs / cpu::kTileRows);
  arena_ = Arena::holding([&](auto visit) {
    visit(x_, max_tokens, cpu::encoded_columns(config.dim), DType::kBF16);
    visit(act_, pairs, width_, DType::kF32);
    visit(encoded_act_, pairs + behind, cpu::encoded_columns(width_), DType::kBF16);
    visit(tiles_, tiles ? pairs + behind : 0, cpu::encoded_columns(config.dim), DType::kBF16);
    visit(rows_, tiles ? int64_t{n_threads_} * cpu::kTileRows : 0, cpu::encoded_columns(width_),
          DType::kBF16);
    visit(sum_, max_tokens, config.dim, DType::kF32);
    visit(part_, int64_t{n_threads_} * kGroupTokens, kRows, DType::kF32);
  });
  // A refusal is not reported here: binding the weights has reported it.
  if (team.n_nodes() > 1) bind_to_node(team.topology(), arena_.memory(), node);
}

void ExpertSlice::begin(const ExpertBatch& batch, const ExpertPairs& pairs) {
  if (is_empty()) return;
  pairs_ = &pairs;
  experts_ = w_.layers[batch.layer].experts.data() + int64_t{node_} * c_.router.n_experts;
  tokens_ = batch.x;
  n_tokens_ = batch.x.rows;
  if (!pairs.groups.empty()) {
    const FfnWeights& some = experts_[pairs.groups[0].expert];
    x_type_ = activation_for(kernels_, some.gate.q.dtype);
    act_type_ = activation_for(kernels_, some.down.q.dtype);
    const auto takes_tiles = [&](const QuantView& w) {
      return kernels_.tile && kernels_.takes_tiles(kernel_weight(w));
    };
    tiles_x_ = takes_tiles(some.gate) && takes_tiles(some.up);
    tiles_act_ = takes_tiles(some.down);
  }
  encodes_ =
      !pairs.groups.empty() && x_type_ != cpu::ActivationType::kF32 && batch.x.dtype == DType::kF32;
  x_of_pass_ =
      encodes_
          ? cpu::Activations{x_.data, x_.row_bytes(), x_type_, nullptr, x_scales_.data()}
          : cpu::Activations{batch.x.data, batch.x.row_bytes(), x_type_, nullptr, batch.x_scales};
}

int64_t ExpertSlice::take(std::span<const ExpertPairs::Group> groups) {
  if (is_empty()) return 0;
  is_first_ = groups.data() == pairs_->groups.data();
  groups_ = groups;
  n_encoded_tokens_ = encodes_ && is_first_ ? n_tokens_ : 0;
  tokens_left_ = n_encoded_tokens_;
  pieces_ = ceil_div(width_, kRows);
  const int64_t n_groups = std::ssize(groups);
  int64_t n_pairs = 0;
  for (const ExpertPairs::Group& group : groups) n_pairs += group.n;
  second_rows_ = rows_of_second_pass(n_pairs / std::max<int64_t>(1, n_groups), c_.dim, n_threads_);
  n_pieces_ = n_groups * pieces_;
  tiles_of_x_.clear();
  for (int64_t g = 0; g < n_groups; ++g) {
    unfinished_[g] = pieces_ + 1;
    untiled_[g] = 0;
    if (!is_tiled(groups[g].n, tiles_x_)) continue;
    for (int i = 0; i < groups[g].n; i += cpu::kTileRows) {
      tiles_of_x_.push_back({g, groups[g].first + i, std::min(cpu::kTileRows, groups[g].n - i)});
      ++untiled_[g];
    }
  }
  return n_encoded_tokens_ + std::ssize(tiles_of_x_) + n_pieces_ + ceil_div(c_.dim, second_rows_);
}

// Items are tokens to encode, then rows to tile, then some rows of one group (first pass), then
// some rows of every expert (second pass). No two threads write the same number, and each sum runs
// over the experts in ascending order. The thread that finishes a group's last piece encodes its
// rows for the second pass, which waits for one group after the other.
void ExpertSlice::run(int64_t item, int thread) {
  if (item < n_encoded_tokens_) return encode_token(item);
  float* const room = part_.row<float>(int64_t{thread} * kGroupTokens);
  const int64_t n_before = n_encoded_tokens_ + std::ssize(tiles_of_x_);
  wait_until([&] { return tokens_left_.load(std::memory_order_acquire) == 0; });
  if (item < n_before) return tile_rows(tiles_of_x_[item - n_encoded_tokens_]);
  const int64_t i = item - n_before;
  if (i >= n_pieces_) return project(static_cast<int>(i - n_pieces_) * second_rows_, room);
  const Piece piece = piece_at(i);
  wait_until([&] { return untiled_[piece.group].load(std::memory_order_acquire) == 0; });
  // The thread's probable next piece: the node's number of threads further.
  activate(piece, piece_at(std::min(i + n_threads_, n_pieces_ - 1)), room);
  std::atomic<int>& unfinished = unfinished_[piece.group];
  if (unfinished.fetch_sub(1, std::memory_order_acq_rel) > 2) return;
  encode_activated(groups_[piece.group], thread);
  unfinished.store(0, std::memory_order_release);
}

ExpertSlice::Piece ExpertSlice::piece_at(int64_t item) const {
  return {item / pieces_, static_cast<int>(item % pieces_) * kRows};
}

const FfnWeights& ExpertSlice::expert(int64_t group) const {
  return experts_[groups_[group].expert];
}

void ExpertSlice::encode_token(int64_t token) {
  kernels_.encode(
      {tokens_.row<float>(token), c_.dim, x_type_, x_.row_data(token), &x_scales_[token]});
  tokens_left_.fetch_sub(1, std::memory_order_release);
}

void ExpertSlice::tile_rows(Tile tile) {
  cpu::Activations x = x_of_pass_;
  x.rows = pairs_->tokens.data();
  kernels_.tile({x, tile.first, tile.n, c_.dim, tiles_.row_data(tile.first)});
  untiled_[tile.group].fetch_sub(1, std::memory_order_release);
}

// act = silu(gate x) * (up x) for some rows of one group's expert and for its tokens.
void ExpertSlice::activate(Piece piece, Piece next, float* up) {
  const ExpertPairs::Group& group = groups_[piece.group];
  const FfnWeights& weights = expert(piece.group);
  const int first_row = piece.first_row;
  const int n_rows = std::min(kRows, width_ - first_row);
  cpu::GemmArgs product = {.x = x_of_pass_,
                           .w = kernel_weight(weights.gate),
                           .first_row = first_row,
                           .out = act_.row<float>(group.first) + first_row,
                           .out_stride = act_.stride,
                           .m = group.n,
                           .n = n_rows,
                           .k = c_.dim};
  const cpu::Weight up_weight = kernel_weight(weights.up);
  product.x.rows = pairs_->tokens.data() + group.first;
  if (is_tiled(group.n, tiles_x_)) {
    product.x.data = tiles_.row_data(group.first);
    product.x.stride = tiles_.row_bytes();
    product.x.tiled = true;
  }
  product.next = &up_weight;
  product.next_row = first_row;
  kernels_.gemm(product);
  const cpu::Weight next_gate = kernel_weight(expert(next.group).gate);
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

void ExpertSlice::encode_activated(const ExpertPairs::Group& group, int thread) {
  if (act_type_ == cpu::ActivationType::kF32) return;
  const bool tiled = is_tiled(group.n, tiles_act_);
  const TensorView rows =
      rows_.rows_from(tiled ? int64_t{thread} * cpu::kTileRows : 0, tiled ? cpu::kTileRows : 0);
  for (int first = group.first, n; first < group.first + group.n; first += n) {
    n = std::min(cpu::kTileRows, group.first + group.n - first);
    for (int i = 0; i < n; ++i)
      kernels_.encode({act_.row<float>(first + i), width_, act_type_,
                       tiled ? rows.row_data(i) : encoded_act_.row_data(first + i),
                       &act_scales_[first + i]});
    if (tiled)
      kernels_.tile(
          {{rows.data, rows.row_bytes(), act_type_}, 0, n, width_, encoded_act_.row_data(first)});
  }
}

// sum[t] = sum over experts of weight * (down act) for some rows of every expert's output.
void ExpertSlice::project(int first_row, float* part) {
  const int end = std::min(first_row + second_rows_, c_.dim);
  for (int t = 0; is_first_ && t < n_tokens_; ++t)
    std::fill_n(sum_.row<float>(t) + first_row, end - first_row, 0.f);
  const int64_t n_groups = std::ssize(groups_);
  for (int64_t g = 0; g < n_groups; ++g) {
    wait_until([&] { return unfinished_[g].load(std::memory_order_acquire) == 0; });
    for (int row = first_row; row < end; row += kRows) {
      const bool last_row = row + kRows >= end, last = last_row && g + 1 == n_groups;
      // The thread's probable next item: the node's number of threads further.
      const int next_row = last       ? first_row + second_rows_ * n_threads_
                           : last_row ? first_row
                                      : row + kRows;
      add_output(g, row, last ? 0 : g + last_row, std::min(next_row, c_.dim - 1), part);
    }
  }
}

// Adds up to kRows rows of one group's output. The arguments with `next` say what to prefetch.
void ExpertSlice::add_output(int64_t g, int first_row, int64_t next_group, int next_row,
                             float* part) {
  const ExpertPairs::Group& group = groups_[g];
  const int n_rows = std::min(kRows, c_.dim - first_row);
  const TensorView& act = act_type_ == cpu::ActivationType::kF32 ? act_ : encoded_act_;
  const cpu::Weight next = kernel_weight(expert(next_group).down);
  // Hardware prefetching cannot predict the addresses of the tokens' sums, and the weights have
  // displaced them from the cache.
  for (int i = 0; i < group.n; ++i)
    for (int r = 0; r < n_rows; r += kFloatsOfLine)
      __builtin_prefetch(sum_.row<float>(pairs_->tokens[group.first + i]) + first_row + r, 1);
  kernels_.gemm({.x = {act.row_data(group.first), act.row_bytes(), act_type_, nullptr,
                       act_scales_.data() + group.first, is_tiled(group.n, tiles_act_)},
                 .w = kernel_weight(expert(g).down),
                 .first_row = first_row,
                 .out = part,
                 .out_stride = kRows,
                 .m = group.n,
                 .n = n_rows,
                 .k = width_,
                 .next = &next,
                 .next_row = next_row});
  for (int i = 0; i < group.n; ++i) {
    const cpu::WeightedRow row = {part + i * kRows, pairs_->weights[group.first + i]};
    float* const to = sum_.row<float>(pairs_->tokens[group.first + i]) + first_row;
    kernels_.add_rows({&row, 1, cpu::ActivationType::kF32, to, n_rows});
  }
}

}  // namespace tandem
