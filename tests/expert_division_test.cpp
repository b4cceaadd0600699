// Which experts a long step streams to the GPU: cases computed by hand, and a comparison with every
// possible division.
#include "offload/expert_division.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace tandem {
namespace {

SecondsByRows rising(double first, double each) {
  return {{{1, first}, {101, first + 100 * each}}};
}

// Streaming an expert takes 10 s on the link and 1 s of copying by the team. Computing it on the
// CPU takes 4 s and 1 s for each row beyond the first.
const ExpertRates kRates = {10, 1, rising(1, 0.05), rising(4, 1)};

Division divided(const std::vector<int>& rows, const std::vector<int>& ahead = {},
                 const ExpertRates& rates = kRates) {
  Division d;
  divide_experts(rows, ahead, rates, d);
  return d;
}
std::vector<int> on_gpu(const Division& d) {
  return {d.order.begin(), d.order.begin() + d.n_on_gpu};
}

TEST(ExpertDivision, SecondsFollowTheirPoints) {
  const SecondsByRows s = {{{2, 4.}, {6, 8.}, {8, 16.}}};
  EXPECT_EQ(s.at(0), 0);
  EXPECT_EQ(s.at(1), 4);
  EXPECT_EQ(s.at(2), 4);
  EXPECT_EQ(s.at(3), 5);
  EXPECT_EQ(s.at(6), 8);
  EXPECT_EQ(s.at(7), 12);
  EXPECT_EQ(s.at(8), 16);
  EXPECT_EQ(s.at(16), 32) << "in proportion";
}

TEST(ExpertDivision, TheGpuGetsThoseWithTheMostRows) {
  // The CPU alone takes 4 + 23 + 5 + 43 = 75 s; 33 s with one expert streamed; 11 s with two, and
  // the link 20 s.
  EXPECT_EQ(on_gpu(divided({1, 20, 2, 40})), (std::vector<int>{3, 1}));
  EXPECT_EQ(on_gpu(divided({1, 1, 1})), (std::vector<int>{0})) << "10 s beside 9, where 12 were";
  EXPECT_EQ(on_gpu(divided({1, 1})), std::vector<int>()) << "8 s are less than the link's 10";
  EXPECT_EQ(on_gpu(divided({0, 0, 0})), std::vector<int>()) << "no token chose them";
  EXPECT_EQ(on_gpu(divided({})), std::vector<int>());
}

TEST(ExpertDivision, ExpertsInFlightStayOnTheGpu) {
  EXPECT_EQ(on_gpu(divided({0, 9, 1}, {0})), (std::vector<int>{0, 1}))
      << "10 s of the link beside 5 of the CPU, which would take 16 alone";
  EXPECT_EQ(on_gpu(divided({30, 9, 0}, {2, 1})), (std::vector<int>{2, 1, 0}));
  EXPECT_EQ(divided({30, 9, 0, 2}, {2, 1}).order, (std::vector<int>{2, 1, 0, 3}));
}

// With a very slow link the CPU computes all experts, with a very fast one the GPU does.
TEST(ExpertDivision, OneDeviceMayGetAll) {
  ExpertRates rates = kRates;
  rates.link_seconds = 1e6;
  EXPECT_EQ(on_gpu(divided({5, 6, 7}, {}, rates)), std::vector<int>());
  rates.link_seconds = 1e-6;
  rates.gpu = {{{1, 1e-6}}};
  rates.copy_seconds = 0;
  EXPECT_EQ(on_gpu(divided({5, 6, 7}, {}, rates)).size(), 3u);
}

// Copying takes CPU time: the longer it takes, the fewer experts are streamed.
TEST(ExpertDivision, CopyingTakesCpuTime) {
  const std::vector<int> rows(10, 30);
  ExpertRates rates = kRates;
  EXPECT_EQ(divided(rows, {}, rates).n_on_gpu, 8);
  rates.copy_seconds = 30;
  EXPECT_EQ(divided(rows, {}, rates).n_on_gpu, 10);
  rates.copy_seconds = 33;
  EXPECT_EQ(divided(rows, {}, rates).n_on_gpu, 0) << "as much as to compute them";
}

double seconds_of(unsigned chosen, const std::vector<int>& rows, unsigned ahead,
                  const ExpertRates& r) {
  double link = 0, gpu = 0, cpu = 0;
  for (size_t e = 0; e < rows.size(); ++e) {
    const bool here = chosen >> e & 1, free = ahead >> e & 1;
    if (here && !free) link += r.link_seconds;
    if (here && !free) cpu += r.copy_seconds;
    (here ? gpu : cpu) += (here ? r.gpu : r.cpu).at(rows[e]);
  }
  return std::max({link, gpu, cpu});
}

// Compares with all subsets, at rates where the GPU computes an expert faster than the link sends
// it.
TEST(ExpertDivision, NoOtherDivisionIsFaster) {
  constexpr int kExperts = 10;
  std::mt19937 rng(1);
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(rng);
  };
  std::vector<int> n_on_gpu(kExperts + 1);
  for (int round = 0; round < 400; ++round) {
    const double link = uniform(1, 20);
    const ExpertRates rates = {link, uniform(0, 2), rising(link / 20, link / 500),
                               rising(uniform(0.1, 10), uniform(0.01, 1))};
    std::vector<int> rows(kExperts), ahead;
    for (int& n : rows) n = static_cast<int>(rng() % 4 == 0 ? 0 : rng() % 100);
    for (unsigned i = 0; i < rng() % 3; ++i) ahead.push_back(static_cast<int>(i * 5 + rng() % 5));
    unsigned set = 0;
    for (const int e : ahead) set |= 1u << e;
    double least = 1e9;
    for (unsigned chosen = 0; chosen < 1u << kExperts; ++chosen)
      if ((chosen & set) == set) least = std::min(least, seconds_of(chosen, rows, set, rates));
    const Division got = divided(rows, ahead, rates);
    unsigned chosen = 0;
    for (const int e : on_gpu(got)) chosen |= 1u << e;
    EXPECT_EQ(chosen & set, set);
    EXPECT_NEAR(seconds_of(chosen, rows, set, rates), least, 1e-9) << "round " << round;
    std::vector<int> all = got.order;
    std::sort(all.begin(), all.end());
    for (int e = 0; e < kExperts; ++e) EXPECT_EQ(all[e], e);
    ++n_on_gpu[got.n_on_gpu];
  }
  EXPECT_GE(std::count_if(n_on_gpu.begin(), n_on_gpu.end(), [](int n) { return n > 10; }), 5)
      << "many kinds of divisions";
}

}  // namespace
}  // namespace tandem
