#include "tests/changing_batches.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/conversation.h"
#include "tests/check_close.h"
#include "tests/whole_models.h"

namespace tandem::test {

Followed follow(Conversations& cpu, Conversations& gpu, const ChangingBatches& of, double bound) {
  std::mt19937 rng(of.seed);
  std::vector<int32_t> next(of.n_sequences);
  Followed seen;
  const auto forget = [&](int s) {
    cpu.forget(s);
    gpu.forget(s);
  };
  for (int step = 0; step < of.n_steps; ++step) {
    std::vector<Conversations::Part> parts;
    for (int s = 0; s < of.n_sequences; ++s) {
      if (rng() % of.out_of == 0 && !(parts.empty() && s == of.n_sequences - 1)) continue;
      if (cpu.length(s) > of.end) forget(s);
      if (cpu.length(s) == 0)
        parts.push_back({s, of.prompt(rng)});
      else
        parts.push_back({s, {next[s]}});
    }
    const auto want = cpu.step(parts), got = gpu.step(parts);
    for (size_t p = 0; p < parts.size(); ++p) {
      const int s = parts[p].sequence;
      const int32_t wanted = greedy(want[p]), chosen = greedy(got[p]);
      const double near = bound * largest(want[p]);
      const bool far = !(largest_difference(got[p], want[p]) < near);
      ++seen.n_rows;
      seen.n_decoded += parts[p].tokens.size() == 1;
      seen.n_far += far;
      next[s] = wanted;
      if (!far && chosen != wanted) {
        ++seen.n_near;
        EXPECT_LE(want[p][wanted] - want[p][chosen], near)
            << "step " << step << ": token " << chosen << " instead of " << wanted;
      }
      const bool ended =
          std::find(of.last_tokens.begin(), of.last_tokens.end(), wanted) != of.last_tokens.end();
      if (far || chosen != wanted || ended) forget(s);
    }
  }
  std::printf("%d rows, %d of them decoded: %d far from each other, %d near ties\n", seen.n_rows,
              seen.n_decoded, seen.n_far, seen.n_near);
  return seen;
}

std::vector<int32_t> random_prompt(std::mt19937& rng, int vocab) {
  std::vector<int32_t> tokens(1 + rng() % 20);
  for (int32_t& token : tokens) token = static_cast<int32_t>(rng() % vocab);
  return tokens;
}

Sums::Sums(const std::string& directory)
    : tokenizer_(Tokenizer::from_directory(directory)), format_(directory, tokenizer_) {}

std::vector<int32_t> Sums::operator()(std::mt19937& rng) const {
  const unsigned a = rng() % 500, b = rng() % 500;
  return format_.prompt(first_messages("", fmt::format("What is {} + {}?", a, b)));
}

void expect_same_bits(const std::vector<std::vector<float>>& a,
                      const std::vector<std::vector<float>>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)), 0) << "row " << i;
    ASSERT_TRUE(std::isfinite(a[i][0]));
  }
}

std::set<size_t> expect_same_steps(Conversations& a, Conversations& b, int n_sequences, int n_steps,
                                   unsigned seed) {
  constexpr int kEnd = 70;
  std::mt19937 rng(seed);
  std::set<size_t> sizes;
  int n_decodes = 0;
  for (int i = 0; i < n_steps; ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    std::vector<Conversations::Part> parts;
    bool decodes = true;
    for (int s = 0; s < n_sequences; ++s) {
      if (rng() % 3 == 0 && !(parts.empty() && s == n_sequences - 1)) continue;
      if (a.length(s) > kEnd) {
        a.forget(s);
        b.forget(s);
      }
      std::vector<int32_t> tokens(a.length(s) == 0 && rng() % 4 > 0 ? 40 + rng() % 20 : 1);
      for (int32_t& token : tokens) token = static_cast<int32_t>(rng() % a.vocab());
      decodes &= tokens.size() == 1;
      parts.push_back({s, tokens});
    }
    expect_same_bits(a.step(parts), b.step(parts));
    if (!decodes) continue;
    sizes.insert(parts.size());
    ++n_decodes;
  }
  EXPECT_GE(n_decodes, n_steps / 2);
  return sizes;
}

}  // namespace tandem::test
