#include "offload/workers/sharded_batch.h"

#include <algorithm>
#include <array>

namespace tandem {
namespace {

constexpr std::array<std::byte, 64> kZeros{};

}  // namespace

ShardedBatch::ShardedBatch(const std::vector<Shard>& shards, const RequestShape& shape,
                           int max_rows)
    : shape_(shape), parts_(shards.size()), local_ids_(int64_t{max_rows} * shape.n_active) {
  const int64_t n_pairs = int64_t{max_rows} * shape_.n_active;
  for (size_t s = 0; s < shards.size(); ++s) {
    ShardPart& part = parts_[s];
    part.shard = &shards[s];
    const std::vector<std::vector<int>>& layers = shards[s].experts;
    shard_of_.resize(layers.size());
    for (size_t l = 0; l < layers.size(); ++l)
      for (const int expert : layers[l]) {
        shard_of_[l].resize(std::max<size_t>(shard_of_[l].size(), expert + 1));
        shard_of_[l][expert] = static_cast<int>(s);
      }
    if (shards[s].owners.empty()) {
      local_shard_ = static_cast<int>(s);
      continue;
    }
    part.rows.reserve(max_rows);
    part.ids.resize(n_pairs);
    part.weights.resize(n_pairs);
    part.body.reserve(max_rows + 4);
  }
}

void ShardedBatch::divide(const ExpertBatch& batch) {
  batch_ = batch;
  has_local_ = false;
  const int n_active = shape_.n_active;
  const std::vector<int>& shard_of = shard_of_[batch.layer];
  for (ShardPart& part : parts_) {
    part.rows.clear();
    part.state = ShardPart::State::kUnused;
    part.n_lost = 0;
  }
  std::fill_n(local_ids_.begin(), batch.x.rows * n_active, -1);
  for (int32_t t = 0; t < batch.x.rows; ++t)
    for (int k = 0; k < n_active; ++k) {
      const int32_t id = batch.routing.ids.row<int32_t>(t)[k];
      if (id < 0) continue;
      if (shard_of[id] == local_shard_) {
        local_ids_[t * n_active + k] = id;
        has_local_ = true;
        continue;
      }
      ShardPart& part = parts_[shard_of[id]];
      if (part.rows.empty() || part.rows.back() != t) {
        part.rows.push_back(t);
        const int64_t begin = (std::ssize(part.rows) - 1) * n_active;
        std::fill_n(part.ids.begin() + begin, n_active, -1);
        std::fill_n(part.weights.begin() + begin, n_active, 0.0f);
      }
      const int64_t at = (std::ssize(part.rows) - 1) * n_active + k;
      part.ids[at] = id;
      part.weights[at] = batch.routing.weights.row<float>(t)[k];
    }
  int64_t n_sums = 0;
  for (ShardPart& part : parts_) {
    part.first_sum = n_sums;
    n_sums += std::ssize(part.rows);
    if (!part.rows.empty()) part.state = ShardPart::State::kWaits;
  }
}

ExpertBatch ShardedBatch::local() const {
  ExpertBatch local = batch_;
  local.routing.ids = {const_cast<int32_t*>(local_ids_.data()), batch_.x.rows, shape_.n_active,
                       shape_.n_active, DType::kI32};
  return local;
}

void ShardedBatch::write_request(ShardPart& part, RowType type, const std::byte* rows,
                                 int64_t row_bytes) const {
  const int64_t n = std::ssize(part.rows), n_pairs = n * shape_.n_active;
  part.head = {.layer = batch_.layer, .n_rows = static_cast<int32_t>(n), .type = type};
  part.body.clear();
  part.body.push_back(std::as_bytes(std::span(&part.head, 1)));
  part.body.push_back(std::as_bytes(std::span(part.ids).first(n_pairs)));
  part.body.push_back(std::as_bytes(std::span(part.weights).first(n_pairs)));
  const int64_t padding = shape_.rows_at(n) - static_cast<int64_t>(sizeof part.head) - n_pairs * 8;
  part.body.push_back(std::span(kZeros).first(padding));
  for (const int32_t t : part.rows) {
    const std::byte* const from = rows + t * row_bytes;
    MessageBytes& last = part.body.back();
    // Rows that are adjacent and dense are one part.
    const int64_t dense = shape_.dim * bytes_of(type);
    if (last.data() + last.size() == from && part.body.size() > 4)
      last = {last.data(), last.size() + dense};
    else
      part.body.push_back({from, static_cast<size_t>(dense)});
  }
}

int64_t ShardedBatch::rows_of(int worker) const {
  int64_t n = 0;
  for (const ShardPart& part : parts_)
    if (part.worker == worker &&
        (part.state == ShardPart::State::kSent || part.state == ShardPart::State::kAnswered))
      n += std::ssize(part.rows);
  return n;
}

bool ShardedBatch::is_done() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const ShardPart& part) { return part.is_done(); });
}

}  // namespace tandem
