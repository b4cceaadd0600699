// `tandem bench products` on a CPU. The benchmark's description is beside its GPU form
// (bench/gpu/products.cpp).
#pragma once
#include "bench/benchmark.h"
#include "ops/dense_products.h"

namespace tandem {

struct OneDnnHere {
  ProductProvider* provider;  // null: none
  std::string name;           // or why there is none
};

// A row for each dense product of the model and number of rows of x. oneDNN has matrices of its
// own, in BF16 where it lacks the format. Throws Error where a layer does not fit.
void bench_dense_products(const BenchInput& bench, const cpu::KernelTable& kernels,
                          MachineSpeed& speed, const OneDnnHere& onednn, const OnRow& on_row);
// The same with oneDNN where it is installed.
void bench_products_on_cpu(const BenchInput& bench, const cpu::KernelTable& kernels,
                           MachineSpeed& speed, const OnRow& on_row);
std::string cpu_products_header(const nlohmann::ordered_json& row);
std::string cpu_products_text(const nlohmann::ordered_json& row);

}  // namespace tandem
