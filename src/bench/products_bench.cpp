#include "bench/products_bench.h"

#include <fmt/format.h>

#include "bench/roofline.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kGroupedExperts = 8;

}  // namespace

std::vector<ManyRowsProduct> products_of(const ModelConfig& c) {
  using Kind = ManyRowsProduct::Kind;
  std::vector<ManyRowsProduct> all = {
      {"gate", Kind::kDense, c.dense_dim, c.dim},
      {"attention output", Kind::kDense, c.dim, c.mla.n_heads * c.mla.v_dim}};
  if (c.mla.q_rank > 0)
    all.push_back({"queries", Kind::kDense, c.mla.n_heads * c.mla.qk_dim(), c.mla.q_rank});
  if (c.router.n_experts > 0) {
    const int n = std::min(kGroupedExperts, c.router.n_experts);
    all.push_back({"experts' gate, up", Kind::kGateUp, c.expert_dim, c.dim, n});
    all.push_back({"experts' down", Kind::kDown, c.dim, c.expert_dim, n});
  }
  return all;
}

void bench_products(const ProductsBench& bench, const OnRow& on_row) {
  for (const ManyRowsProduct& product : products_of(bench.config))
    for (const int n : bench.tokens) {
      const int64_t ops = 2 * n * product.n_weights();
      const ProductTimes times =
          bench.timer ? bench.timer(product, n, bench.seconds) : ProductTimes{};
      Json row = {{"bench", "products"},
                  {"config", bench.config_name},
                  {"card", bench.gpu_name},
                  {"format", format_name(bench.format)},
                  {"what", product.what},
                  {"n_experts", product.n_experts},
                  {"tokens", n},
                  {"ops", ops},
                  {"gpu_seconds", or_null(times.ours)}};
      if (bench.timer) {
        const auto per_second = [&](double seconds) { return static_cast<double>(ops) / seconds; };
        row["ops_per_second"] = times.ours ? Json(per_second(*times.ours)) : Json();
        row["peak_ops_per_second"] = bench.peak_ops_per_second;
        row["cublas"] = bench.cublas;
        row["cublas_seconds"] = or_null(times.cublas);
        row["cublas_ratio"] =
            times.ours && times.cublas ? Json(*times.cublas / *times.ours) : Json();
      }
      on_row(row);
    }
}

std::string products_header(const Json& row) {
  const std::string of = fmt::format("products of {}, weights {}", row["config"].get<std::string>(),
                                     row["format"].get<std::string>());
  if (!row.contains("cublas"))
    return of +
           ": no GPU\n\n| product           | rows |     Gop "
           "|\n|:------------------|-----:|--------:|\n";
  return fmt::format(
      "{} on {}, which multiplies {:.0f} Top/s; cuBLAS {}\n\n"
      "| product           | rows |     Gop |    GPU ms |   Top/s | cuBLAS BF16 ms | of cuBLAS |\n"
      "|:------------------|-----:|--------:|----------:|--------:|---------------:|----------:|\n",
      of, row["card"].get<std::string>(), row["peak_ops_per_second"].get<double>() * 1e-12,
      row["cublas"].get<std::string>());
}

std::string products_text(const Json& row) {
  const auto number = [&](const char* key, double unit) {
    return row[key].is_number() ? fmt::format("{:.4g}", row[key].get<double>() * unit) : "no room";
  };
  std::string text = fmt::format("| {:<17} | {:>4} | {:>7} |", row["what"].get<std::string>(),
                                 row["tokens"].get<int>(), number("ops", 1e-9));
  if (!row.contains("cublas")) return text + "\n";
  const bool compared = row["cublas_seconds"].is_number();
  return text + fmt::format(" {:>9} | {:>7} | {:>14} | {:>9} |\n", number("gpu_seconds", 1e3),
                            number("ops_per_second", 1e-12),
                            compared ? number("cublas_seconds", 1e3) : "none",
                            row["cublas_ratio"].is_number()
                                ? fmt::format("{:.0f} %", row["cublas_ratio"].get<double>() * 100)
                                : "");
}

}  // namespace tandem
