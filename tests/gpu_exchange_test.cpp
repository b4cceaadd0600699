// Kernels of rows that ranks exchange, against the same decisions on the CPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <random>

#include "cpu_kernels/kernels.h"
#include "gpu_kernels/exchange/exchange.h"
#include "gpu_kernels/exchange/parcels.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu::test {
namespace {

// Rows with ids among others, as they come packed, of tokens that all ranks have or of each rank's.
TEST(GpuExchange, OwnIdsAreThoseThatTheCpuChooses) {
  constexpr int kExperts = 40, kRanks = 6, kActive = 5, kStride = 9;
  Stream stream;
  std::mt19937 rng(11);
  const auto below = [&](int n) { return static_cast<int>(rng() % unsigned(n)); };
  for (int round = 0; round < 12; ++round) {
    const RankHosts hosts = {below(4), 1 + below(kRanks)};
    std::vector<std::vector<int32_t>> owners;
    std::vector<int32_t> table(kExperts * kRanks, -1);
    for (int e = 0; e < kExperts; ++e) {
      std::vector<int32_t> ranks(kRanks);
      for (int r = 0; r < kRanks; ++r) ranks[r] = r;
      std::shuffle(ranks.begin(), ranks.end(), rng);
      ranks.resize(below(3) == 0 ? below(kRanks + 1) : 1);
      std::sort(ranks.begin(), ranks.end());
      std::copy(ranks.begin(), ranks.end(), &table[e * kRanks]);
      owners.push_back(ranks);
    }
    const int of_source = round % 2 ? 1 + below(40) : 0;
    const int tokens = of_source > 0 ? of_source * kRanks : 1 + below(300);
    std::vector<int32_t> ids(tokens * kStride, 12345);
    for (int t = 0; t < tokens; ++t)
      for (int k = 0; k < kActive; ++k) ids[t * kStride + k] = below(9) == 0 ? -1 : below(kExperts);
    const OnGpuBuffer<int32_t> ids_there(stream, ids), table_there(stream, table);
    const int rank = below(kRanks);
    const OnGpuBuffer<int32_t> out(stream, std::vector<int32_t>(tokens * kActive, -77));
    own_ids(stream, {.ids = ids_there.data(),
                     .ids_stride = kStride,
                     .owners = table_there.data(),
                     .max_owners = kRanks,
                     .out = out.data(),
                     .tokens = tokens,
                     .n_active = kActive,
                     .rank = rank,
                     .tokens_of_source = of_source,
                     .hosts = hosts});
    const std::vector<int32_t> got = out.values(stream);
    for (int t = 0; t < tokens; ++t)
      for (int k = 0; k < kActive; ++k) {
        const int32_t id = ids[t * kStride + k];
        // What one rank has, or none, is told apart by the places of experts.
        const bool replicated = id >= 0 && owners[id].size() > 1;
        const bool own =
            !replicated || nearest_replica(owners[id].data(), static_cast<int>(owners[id].size()),
                                           of_source > 0 ? t / of_source : -1, hosts,
                                           hash_of_choice(&ids[t * kStride], kActive), id) == rank;
        EXPECT_EQ(got[t * kActive + k], own ? id : -1) << "token " << t << ", place " << k;
      }
  }
}

// The bytes of a row as CPUs send it (offload/ranks/row_format.cpp), 0 where no number is.
std::vector<std::byte> encoded_by_cpu(RowFormat format, std::span<const float> row) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const auto dim = static_cast<int64_t>(row.size());
  std::vector<std::byte> bytes(encoded_bytes(format, dim));
  if (format == RowFormat::kF32) std::memcpy(bytes.data(), row.data(), row.size_bytes());
  if (format == RowFormat::kBf16)
    kernels.encode_bf16({row.data(), reinterpret_cast<cpu::bf16*>(bytes.data()), dim});
  if (format == RowFormat::kFp8)
    kernels.encode_fp8({row.data(), reinterpret_cast<uint8_t*>(bytes.data()),
                        reinterpret_cast<float*>(bytes.data() + row_scales_begin(dim)), dim});
  return bytes;
}

// As the experts of another rank get it.
std::vector<float> sent_by_cpu(RowFormat format, std::span<const float> row) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const auto dim = static_cast<int64_t>(row.size());
  const std::vector<std::byte> bytes = encoded_by_cpu(format, row);
  std::vector<float> got(row.begin(), row.end());
  if (format == RowFormat::kBf16)
    kernels.decode({bytes.data(), cpu::WeightType::kBF16, got.data(), dim});
  if (format == RowFormat::kFp8)
    kernels.decode_fp8({reinterpret_cast<const uint8_t*>(bytes.data()),
                        reinterpret_cast<const float*>(bytes.data() + row_scales_begin(dim)),
                        got.data(), dim});
  return got;
}

// Rows of every kind of number: blocks of zeros, of largest numbers of all sizes, of numbers that
// are halfway between two codes, and columns behind the last whole block.
TEST(GpuRows, HaveTheBitsOfTheCpu) {
  constexpr int kRows = 24, kActive = 3;
  Stream stream;
  std::mt19937 rng(21);
  for (const int dim : {1, 33, 128, 130, 256, 643, 7168})
    for (const RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8}) {
      SCOPED_TRACE(fmt::format("{} columns, format {}", dim, static_cast<int>(format)));
      std::vector<float> x = random_floats(rng, int64_t{kRows} * dim, 1);
      for (int t = 0; t < kRows; ++t)
        for (int c = 0; c < dim; ++c) {
          float& v = x[t * dim + c];
          if (t % 4 == 1) v = std::ldexp(v, static_cast<int>(rng() % 200) - 100);
          if (t % 4 == 2) v = static_cast<float>(static_cast<int>(rng() % 897) - 448) / 16;
          if (t % 4 == 3 && c / kColumnsOfRowScale % 2 == t / 4 % 2) v = 0;
        }
      const ParcelShape shape = {dim, kActive, format};
      const std::vector<float> weights = random_floats(rng, kRows * kActive, 1);
      std::vector<int32_t> ids(kRows * kActive);
      std::iota(ids.begin(), ids.end(), 0);
      const OnGpuBuffer<float> x_there(stream, x), weights_there(stream, weights);
      const OnGpuBuffer<int32_t> ids_there(stream, ids);
      const OnGpuBuffer<std::byte> packed(stream, std::vector<std::byte>(kRows * shape.bytes()));
      pack_rows(stream, {.x = {x_there.data(), dim},
                         .ids = ids_there.data(),
                         .ids_stride = kActive,
                         .weights = {weights_there.data(), kActive},
                         .shape = shape,
                         .out = packed.data(),
                         .tokens = kRows,
                         .rows = kRows});
      const std::vector<std::byte> got = packed.values(stream);
      const OnGpuBuffer<float> decoded(kRows * dim), weights_back(kRows * kActive);
      const OnGpuBuffer<int32_t> ids_back(kRows * kActive);
      unpack_parcels(stream, {.parcels = packed.data(),
                              .rows = kRows,
                              .shape = shape,
                              .x = decoded.data(),
                              .ids = ids_back.data(),
                              .weights = weights_back.data()});
      const std::vector<float> back = decoded.values(stream);
      EXPECT_EQ(ids_back.values(stream), ids);
      EXPECT_EQ(weights_back.values(stream), weights);
      for (int t = 0; t < kRows; ++t) {
        const std::span<const float> row = std::span(x).subspan(t * dim, dim);
        const std::vector<std::byte> want = encoded_by_cpu(format, row);
        ASSERT_TRUE(std::equal(want.begin(), want.end(), got.begin() + t * shape.bytes())) << t;
        const std::vector<float> want_back = sent_by_cpu(format, row);
        ASSERT_TRUE(std::equal(want_back.begin(), want_back.end(), back.begin() + t * dim)) << t;
      }
    }
}

// E4M3 has three bits of fraction, so a number from the block's largest / 448 * 2^-6 on is at most
// 2^-4 of itself away; numbers below that are multiples of 2^-9 scales. A number that is not finite
// makes no other number of its block finite and wrong.
TEST(GpuRows, OfFp8AreNearAndNotFiniteWhereTheyWereNot) {
  constexpr int kDim = 384;
  Stream stream;
  std::mt19937 rng(22);
  std::vector<float> x = random_floats(rng, 3 * kDim, 5);
  x[kDim + 200] = std::numeric_limits<float>::infinity();
  x[2 * kDim + 5] = std::numeric_limits<float>::quiet_NaN();
  const ParcelShape shape = {kDim, 1, RowFormat::kFp8};
  const OnGpuBuffer<float> x_there(stream, x), weights(stream, std::vector<float>(3)),
      back(3 * kDim), weights_back(3);
  const OnGpuBuffer<int32_t> ids(stream, std::vector<int32_t>(3)), ids_back(3);
  const OnGpuBuffer<std::byte> packed(3 * shape.bytes());
  pack_rows(stream, {.x = {x_there.data(), kDim},
                     .ids = ids.data(),
                     .ids_stride = 1,
                     .weights = {weights.data(), 1},
                     .shape = shape,
                     .out = packed.data(),
                     .tokens = 3,
                     .rows = 3});
  unpack_parcels(stream, {.parcels = packed.data(),
                          .rows = 3,
                          .shape = shape,
                          .x = back.data(),
                          .ids = ids_back.data(),
                          .weights = weights_back.data()});
  const std::vector<float> got = back.values(stream);
  for (int i = 0; i < 3 * kDim; i += kColumnsOfRowScale) {
    float most = 0;
    bool finite = true;
    for (int c = i; c < i + kColumnsOfRowScale; ++c) {
      most = std::max(most, std::fabs(x[c]));
      finite = finite && std::isfinite(x[c]);
    }
    for (int c = i; c < i + kColumnsOfRowScale; ++c) {
      if (finite)
        EXPECT_LE(std::fabs(got[c] - x[c]),
                  1.0001 * std::max(std::fabs(x[c]) * 0x1p-4f, most / 448 * 0x1p-10f));
      else
        EXPECT_FALSE(std::isfinite(got[c])) << c;
    }
  }
}

// Parcels of random tokens of rank `rank`, on the GPU, and what the CPU says of them.
struct Parcels {
  static constexpr int kExperts = 24, kActive = 5;
  Parcels(Stream& stream, std::mt19937& rng, int n_ranks_, RowFormat format, int tokens_, int dim)
      : n_ranks(n_ranks_),
        rank(static_cast<int>(rng() % unsigned(n_ranks_))),
        tokens(tokens_),
        shape{dim, kActive, format},
        hosts{static_cast<int>(rng() % 3), 1 + static_cast<int>(rng() % 4)},
        owners(kExperts),
        ids(tokens * kActive),
        x(random_floats(rng, int64_t{tokens} * dim, 1)),
        weights(random_floats(rng, tokens * kActive, 1)) {
    for (int t = 0; t < tokens; ++t) {
      const std::vector<float> row =
          sent_by_cpu(format, std::span(x).subspan(int64_t{t} * dim, dim));
      sent.insert(sent.end(), row.begin(), row.end());
    }
    std::vector<int32_t> table(kExperts * n_ranks, -1);
    for (int e = 0; e < kExperts; ++e) {
      for (int r = 0; r < n_ranks; ++r)
        if (rng() % 3 == 0) owners[e].push_back(r);  // also none
      std::copy(owners[e].begin(), owners[e].end(), &table[e * n_ranks]);
    }
    for (int32_t& id : ids)
      id = rng() % 8 == 0 ? -1 : static_cast<int32_t>(rng() % unsigned(kExperts));
    // Ranks and slots, as the definition says.
    slots.assign(tokens * n_ranks, -1);
    counts.assign(n_ranks, 0);
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < n_ranks; ++r)
        for (int k = 0; k < kActive && slots[t * n_ranks + r] < 0; ++k)
          if (rank_of(t, k) == r) slots[t * n_ranks + r] = counts[r]++;
    owners_there = std::make_unique<OnGpuBuffer<int32_t>>(stream, table);
    ids_there = std::make_unique<OnGpuBuffer<int32_t>>(stream, ids);
    x_there = std::make_unique<OnGpuBuffer<float>>(stream, x);
    weights_there = std::make_unique<OnGpuBuffer<float>>(stream, weights);
    slots_there = std::make_unique<OnGpuBuffer<int32_t>>(std::max(1, tokens * n_ranks));
    counts_there = std::make_unique<OnGpuBuffer<int32_t>>(n_ranks);
  }
  int rank_of(int t, int k) const {
    const int32_t id = ids[t * kActive + k];
    if (id < 0 || owners[id].empty()) return -1;
    return nearest_replica(owners[id].data(), static_cast<int>(owners[id].size()), rank, hosts,
                           hash_of_choice(&ids[t * kActive], kActive), id);
  }
  ChooseRanksArgs choice() const {
    return {.ids = ids_there->data(),
            .ids_stride = kActive,
            .owners = owners_there->data(),
            .tokens = tokens,
            .n_active = kActive,
            .n_ranks = n_ranks,
            .rank = rank,
            .hosts = hosts,
            .slots = slots_there->data(),
            .counts = counts_there->data()};
  }
  // The place of a token's parcel for a rank where parcels follow each other.
  int place(int t, int r) const {
    int first = 0;
    for (int before = 0; before < r; ++before) first += counts[before];
    return first + slots[t * n_ranks + r];
  }
  int n_all() const { return std::accumulate(counts.begin(), counts.end(), 0); }
  float x_of(int t, int c) const { return sent[int64_t{t} * shape.dim + c]; }

  const int n_ranks, rank, tokens;
  const ParcelShape shape;
  const RankHosts hosts;
  std::vector<std::vector<int32_t>> owners;
  std::vector<int32_t> ids;
  std::vector<float> x, weights, sent;  // sent: x as other ranks get it
  std::vector<int32_t> slots, counts;
  std::unique_ptr<OnGpuBuffer<int32_t>> owners_there, ids_there, slots_there, counts_there;
  std::unique_ptr<OnGpuBuffer<float>> x_there, weights_there;
};

// Packed where ranks follow each other, unpacked as rows, and y from sums in any places.
TEST(GpuParcels, GoToTheRanksThatComputeThem) {
  Stream stream;
  std::mt19937 rng(5);
  for (int round = 0; round < 10; ++round) {
    const int dim = round == 0 ? 33 : 64 + static_cast<int>(rng() % 40);
    const int tokens = round == 1 ? 300 : static_cast<int>(rng() % 40);
    constexpr RowFormat kFormats[] = {RowFormat::kBf16, RowFormat::kF32, RowFormat::kFp8};
    const Parcels p(stream, rng, 1 + static_cast<int>(rng() % 6), kFormats[round % 3], tokens, dim);
    SCOPED_TRACE(fmt::format("round {}, {} tokens, {} ranks", round, tokens, p.n_ranks));
    const int n = p.n_all(), n_active = Parcels::kActive;
    const ChooseRanksArgs choice = p.choice();
    choose_ranks(stream, choice);
    EXPECT_EQ(p.counts_there->values(stream), p.counts);
    const std::vector<int32_t> slots = p.slots_there->values(stream);
    EXPECT_TRUE(std::equal(p.slots.begin(), p.slots.end(), slots.begin()));

    const OnGpuBuffer<std::byte> packed((n + 1) * p.shape.bytes());
    pack_parcels(stream, {.chosen = choice,
                          .x = {p.x_there->data(), dim},
                          .weights = {p.weights_there->data(), n_active},
                          .shape = p.shape,
                          .out = packed.data()});
    const OnGpuBuffer<float> x((n + 1) * dim), weights((n + 1) * n_active);
    const OnGpuBuffer<int32_t> ids((n + 1) * n_active);
    unpack_parcels(stream, {.parcels = packed.data(),
                            .rows = n,
                            .shape = p.shape,
                            .x = x.data(),
                            .ids = ids.data(),
                            .weights = weights.data()});
    const auto got_x = x.values(stream), got_weights = weights.values(stream);
    const auto got_ids = ids.values(stream);
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < p.n_ranks; ++r) {
        if (p.slots[t * p.n_ranks + r] < 0) continue;
        const int row = p.place(t, r);
        for (int c = 0; c < dim; ++c) ASSERT_EQ(got_x[row * dim + c], p.x_of(t, c)) << c;
        for (int k = 0; k < n_active; ++k) {
          const bool here = p.rank_of(t, k) == r;
          EXPECT_EQ(got_ids[row * n_active + k], here ? p.ids[t * n_active + k] : -1);
          EXPECT_EQ(got_weights[row * n_active + k], here ? p.weights[t * n_active + k] : 0);
        }
      }
    EXPECT_EQ(got_ids[n * n_active], -1) << "as it was: nothing is written behind the rows";

    // Sums that follow each other, or are n_each apart; the order decides the bits.
    for (const int n_each : {0, tokens + 2}) {
      const auto n_sums = int64_t{n + tokens + 2} * p.n_ranks;
      std::vector<float> sums = random_floats(rng, n_sums * dim, 9);
      const OnGpuBuffer<float> computed(stream, sums);
      const RowFormat back = round % 4 < 2 ? RowFormat::kBf16 : RowFormat::kF32;
      if (back == RowFormat::kBf16)
        for (float& sum : sums) sum = static_cast<float>(rounded(sum));
      const OnGpuBuffer<std::byte> sums_there(n_sums * encoded_bytes(back, dim));
      send_sums(stream, {.sums = {computed.data(), dim},
                         .format = back,
                         .out = sums_there.data(),
                         .rows = static_cast<int>(n_sums),
                         .dim = dim});
      std::vector<float> y = random_floats(rng, tokens * dim + 1, 1);
      const OnGpuBuffer<float> y_there(stream, y);
      add_sums(stream, {.sums = sums_there.data(),
                        .format = back,
                        .slots = p.slots_there->data(),
                        .counts = p.counts_there->data(),
                        .y = {y_there.data(), dim},
                        .n_each = n_each,
                        .tokens = tokens,
                        .n_ranks = p.n_ranks,
                        .dim = dim});
      for (int t = 0; t < tokens; ++t)
        for (int c = 0; c < dim; ++c) {
          float sum = 0;
          for (int r = 0; r < p.n_ranks; ++r)
            if (const int slot = p.slots[t * p.n_ranks + r]; slot >= 0)
              sum += sums[int64_t{n_each > 0 ? r * n_each + slot : p.place(t, r)} * dim + c];
          y[t * dim + c] += sum;
        }
      EXPECT_EQ(y_there.values(stream), y);
    }
  }
}

// A GPU that is its only peer: rows and sums through the window, in recorded steps, in which fewer
// rows come than there is room for.
TEST(GpuParcels, CrossWindows) {
  constexpr int kRooms = 7, kWords = 64;  // rows; bytes of words before them
  constexpr RowFormat kBack = RowFormat::kBf16;
  Stream stream;
  std::mt19937 rng(6);
  const Parcels p(stream, rng, 1, RowFormat::kFp8, 5, 41);
  const int dim = p.shape.dim, n_active = Parcels::kActive;
  const int64_t sums_at = kWords + kRooms * p.shape.bytes();
  PeerWindows window(sums_at + kRooms * encoded_bytes(kBack, dim));
  const PeerWindows::Handle handle = window.handle();
  window.open(std::span(&handle, 1), 0);
  const OnGpuBuffer<uint32_t> signals(4);
  const Buffer passed(8, Site::kMapped);
  const OnGpuBuffer<float> x(kRooms * dim), weights(kRooms * n_active), sums(kRooms * dim);
  const OnGpuBuffer<int32_t> ids(kRooms * n_active);
  const std::vector<float> zeros(p.tokens * dim);
  const OnGpuBuffer<float> y(stream, zeros);
  const auto* const words = reinterpret_cast<const uint32_t*>(window.own());
  const auto* const count = reinterpret_cast<const int32_t*>(window.own());
  const auto signal = [&](int number, const int32_t* counts) {
    signal_peers(stream, {.peers = window.addresses(),
                          .word = 4 * (1 + number),
                          .counts = counts,
                          .count = 0,
                          .n_raised = signals.data() + number,
                          .n_ranks = 1});
    await_peers(stream, {.words = words + 1 + number,
                         .n_awaited = signals.data() + 2 + number,
                         .passed = passed.as<uint32_t>() + number,
                         .n_ranks = 1});
  };
  const auto enqueue = [&](int tokens) {
    ChooseRanksArgs choice = p.choice();
    choice.tokens = tokens;
    choose_ranks(stream, choice);
    pack_parcels(stream, {.chosen = choice,
                          .x = {p.x_there->data(), dim},
                          .weights = {p.weights_there->data(), n_active},
                          .shape = p.shape,
                          .peers = window.addresses(),
                          .offset = kWords});
    signal(0, p.counts_there->data());
    unpack_parcels(stream, {.parcels = window.own() + kWords,
                            .counts = count,
                            .n_each = kRooms,
                            .rows = kRooms,
                            .shape = p.shape,
                            .x = x.data(),
                            .ids = ids.data(),
                            .weights = weights.data()});
    send_sums(stream, {.sums = {x.data(), dim},
                       .format = kBack,
                       .counts = count,
                       .n_each = kRooms,
                       .rows = kRooms,
                       .dim = dim,
                       .peers = window.addresses(),
                       .offset = sums_at});
    signal(1, nullptr);
    add_sums(stream, {.sums = window.own() + sums_at,
                      .format = kBack,
                      .slots = p.slots_there->data(),
                      .counts = p.counts_there->data(),
                      .y = {y.data(), dim},
                      .n_each = kRooms,
                      .tokens = tokens,
                      .n_ranks = 1,
                      .dim = dim});
  };
  const Graph graph = stream.capture([&] { enqueue(p.tokens); });
  for (int replay = 1; replay <= 3; ++replay) {
    stream.replay(graph);
    stream.wait();
    EXPECT_EQ(passed.as<uint32_t>()[0], uint32_t(replay - 1));
    EXPECT_EQ(passed.as<uint32_t>()[1], uint32_t(replay - 1));
  }
  const std::vector<float> got = y.values(stream);
  for (int t = 0; t < p.tokens; ++t)
    for (int c = 0; c < dim; ++c)
      EXPECT_EQ(got[t * dim + c],
                p.slots[t] >= 0 ? 3 * static_cast<float>(rounded(p.x_of(t, c))) : 0);
  // Then less comes, and what came before is still in the window.
  enqueue(2);
  const std::vector<int32_t> got_ids = ids.values(stream);
  const auto n = static_cast<int>(
      std::count_if(p.slots.begin(), p.slots.begin() + 2, [](int slot) { return slot >= 0; }));
  ASSERT_LT(n, p.counts[0]);
  for (int i = n * n_active; i < kRooms * n_active; ++i) EXPECT_EQ(got_ids[i], -1);
}

}  // namespace
}  // namespace tandem::gpu::test
