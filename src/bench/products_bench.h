// `tandem bench products`: a GPU's products of many rows, compared with cuBLAS.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/experts_bench.h"
#include "model/config.h"

namespace tandem {

// x w^T for one matrix of a model, or for n_experts matrices with equally many rows of x each.
struct ManyRowsProduct {
  enum class Kind : uint8_t { kDense, kGateUp, kDown };
  const char* what;
  Kind kind;
  int rows, cols;  // of w; for kGateUp of gate, and up has as many
  int n_experts = 1;
  int64_t n_weights() const {
    return int64_t{rows} * cols * n_experts * (kind == Kind::kGateUp ? 2 : 1);
  }
};
std::vector<ManyRowsProduct> products_of(const ModelConfig& config);

struct ProductTimes {
  std::optional<double> ours;    // empty: too little GPU memory
  std::optional<double> cublas;  // empty: not available, or too little memory
};
// Times for n rows of x per matrix, measured for about `seconds` each.
using ProductTimer =
    std::function<ProductTimes(const ManyRowsProduct& product, int n, double seconds)>;

struct ProductsBench {
  std::string config_name;
  ModelConfig config;
  WeightFormat format;
  std::vector<int> tokens;
  double seconds;
  // Without a GPU, timer and all other fields below are empty.
  ProductTimer timer = {};
  std::string gpu_name = "";
  std::string cublas = "";  // its version, or why it is not available
  double peak_ops_per_second = 0;
};

// Rows are described in docs/benchmarks.md.
void bench_products(const ProductsBench& bench, const OnRow& on_row);
std::string products_header(const nlohmann::ordered_json& row);
std::string products_text(const nlohmann::ordered_json& row);

}  // namespace tandem
