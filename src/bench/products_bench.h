// `tandem bench products`: a card's products of many rows, beside the library that its maker has.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/experts_bench.h"
#include "model/config.h"

namespace tandem {

// x w^T for a matrix of a model; of n_experts matrices, each with as many rows of x.
struct ManyRowsProduct {
  enum class Kind : uint8_t { kDense, kGateUp, kDown };
  const char* what;
  Kind kind;
  int rows, cols;  // of w; of kGateUp gate's, as many are up's
  int n_experts = 1;
  int64_t n_weights() const {
    return int64_t{rows} * cols * n_experts * (kind == Kind::kGateUp ? 2 : 1);
  }
};
std::vector<ManyRowsProduct> products_of(const ModelConfig& config);

struct ProductTimes {
  std::optional<double> ours;    // nothing: no room on the card
  std::optional<double> cublas;  // nothing: not there, or no room
};
// Of so many rows of x for each matrix, measured for about `seconds` each.
using ProductTimer =
    std::function<ProductTimes(const ManyRowsProduct& product, int n, double seconds)>;

struct ProductsBench {
  std::string config_name;
  ModelConfig config;
  WeightFormat format;
  std::vector<int> tokens;
  double seconds;
  // Empty, and what else is of a card: no GPU.
  ProductTimer timer = {};
  std::string card = "";
  std::string cublas = "";  // its version, or why it is not there
  double peak_ops_per_second = 0;
};

// Rows as docs/benchmarks.md has them.
void bench_products(const ProductsBench& bench, const OnRow& on_row);
std::string products_header(const nlohmann::ordered_json& row);
std::string products_text(const nlohmann::ordered_json& row);

}  // namespace tandem
