// Collects the rows of a benchmark for tests.
#pragma once
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "bench/benchmark.h"

namespace tandem {

class BenchRows : public testing::Test {
 protected:
  OnRow collect() {
    return [this](const nlohmann::ordered_json& row) { rows_.push_back(row); };
  }
  void expect_times_on_gpu(size_t n) {
    EXPECT_EQ(rows_.size(), n);
    for (const nlohmann::ordered_json& row : rows_) {
      ASSERT_TRUE(row["gpu_seconds"].is_number()) << row.dump();
      EXPECT_GT(row["gpu_seconds"].get<double>(), 0);
    }
  }

  std::vector<nlohmann::ordered_json> rows_;
};

}  // namespace tandem
