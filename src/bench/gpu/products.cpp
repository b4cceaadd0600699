// `tandem bench products`: a GPU's products of many rows, compared with cuBLAS. Without a GPU, the
// CPU's (bench/parts/products.h).
#include "bench/parts/products.h"

#include <fmt/format.h>

#include "bench/gpu/gpu_benches.h"
#include "io/json.h"

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

void bench_products(const BenchInput& bench, const ProductTimer& timer, const std::string& cublas,
                    const OnRow& on_row) {
  for (const ManyRowsProduct& product : products_of(bench.config))
    for (const int n : bench.options.tokens) {
      const int64_t ops = 2 * n * product.n_weights();
      const ProductTimes times = timer(product, n, bench.options.seconds);
      const auto per_second = [&](double seconds) { return static_cast<double>(ops) / seconds; };
      Json row = {{"bench", "products"},
                  {"config", bench.options.config},
                  {"card", bench.gpu->name},
                  {"format", format_name(bench.formats.backbone)},
                  {"what", product.what},
                  {"n_experts", product.n_experts},
                  {"tokens", n},
                  {"ops", ops},
                  {"gpu_seconds", or_null(times.ours)}};
      row["ops_per_second"] = times.ours ? Json(per_second(*times.ours)) : Json();
      row["peak_ops_per_second"] = bench.gpu->peak.bf16;
      if (const double datasheet = bench.gpu->datasheet_bf16_ops_per_second; datasheet > 0) {
        row["datasheet_bf16_ops_per_second"] = datasheet;
        row["datasheet_ratio"] = times.ours ? Json(per_second(*times.ours) / datasheet) : Json();
      }
      row["cublas"] = cublas;
      row["cublas_seconds"] = or_null(times.cublas);
      const auto share = [&](const std::optional<double>& cublas_seconds) {
        return times.ours && cublas_seconds ? Json(*cublas_seconds / *times.ours) : Json();
      };
      row["cublas_ratio"] = share(times.cublas);
      if (product.kind != ManyRowsProduct::Kind::kDense) {
        row["cublas_grouped_seconds"] = or_null(times.cublas_grouped);
        row["cublas_grouped_ratio"] = share(times.cublas_grouped);
        row["cublas_grouped_why_not"] = times.why_not_grouped;
      }
      on_row(row);
    }
}

namespace {

std::string products_header(const Json& row) {
  if (row.contains("onednn")) return cpu_products_header(row);
  const double datasheet = row.value("datasheet_bf16_ops_per_second", 0.0);
  const bool known = datasheet > 0;
  return fmt::format(
             "products of {}, weights {} on {}, which multiplies {:.0f} Top/s by mma{}; cuBLAS "
             "{}\n\n",
             row["config"].get<std::string>(), row["format"].get<std::string>(),
             row["card"].get<std::string>(), row["peak_ops_per_second"].get<double>() * 1e-12,
             known ? fmt::format(" (data sheet: {:.0f})", datasheet * 1e-12) : "",
             row["cublas"].get<std::string>()) +
         fmt::format("| product           | rows |     Gop |    GPU ms |   Top/s |{}",
                     known ? " of data sheet |" : "") +
         " cuBLAS BF16 ms | of cuBLAS | cuBLAS grouped ms | of grouped |\n" +
         fmt::format("|:------------------|-----:|--------:|----------:|--------:|{}",
                     known ? "--------------:|" : "") +
         "---------------:|----------:|------------------:|-----------:|\n";
}

std::string products_text(const Json& row) {
  if (row.contains("onednn")) return cpu_products_text(row);
  const auto number = [&](const char* key, double unit, const std::string& otherwise = "no room") {
    return row[key].is_number() ? fmt::format("{:.4g}", row[key].get<double>() * unit) : otherwise;
  };
  const auto percent = [&](const char* key) {
    return row[key].is_number() ? fmt::format("{:.0f} %", row[key].get<double>() * 100) : "";
  };
  std::string text =
      fmt::format("| {:<17} | {:>4} | {:>7} | {:>9} | {:>7} |", row["what"].get<std::string>(),
                  row["tokens"].get<int>(), number("ops", 1e-9), number("gpu_seconds", 1e3),
                  number("ops_per_second", 1e-12));
  if (row.contains("datasheet_ratio")) text += fmt::format(" {:>13} |", percent("datasheet_ratio"));
  text += fmt::format(" {:>14} | {:>9} |", number("cublas_seconds", 1e3, "none"),
                      percent("cublas_ratio"));
  if (!row.contains("cublas_grouped_seconds"))
    return text + fmt::format(" {:>17} | {:>10} |\n", "", "");
  const std::string why_not = row["cublas_grouped_why_not"];
  return text +
         fmt::format(" {:>17} | {:>10} |\n",
                     number("cublas_grouped_seconds", 1e3, why_not.empty() ? "no room" : why_not),
                     percent("cublas_grouped_ratio"));
}

void check_rows(const BenchInput& bench) {
  constexpr int kMinRows = 17;  // a GPU computes fewer with another kernel
  for (const int n : bench.options.tokens)
    require(!bench.gpus || n >= kMinRows,
            "--tokens {}: at least {} on a GPU; `bench mlp` has fewer", n, kMinRows);
}

void bench_beside_cublas(const BenchInput& bench, const OnRow& on_row) {
  std::string cublas;
  const ProductTimer timer = product_timer(bench.config, bench.formats.backbone, cublas);
  bench_products(bench, timer, cublas, on_row);
}

}  // namespace

Benchmark products_benchmark() {
  using enum BenchFlag;
  return {.name = "products",
          .help =
              "a GPU's products of many rows beside cuBLAS, or a CPU's beside oneDNN, where "
              "these are installed",
          .examples =
              "  tandem bench products --config r1 --tokens 512,4096\n"
              "  tandem bench products --config v2-lite --device cpu --tokens 1,16,256\n",
          .flags = {kConfig, kDevice, kIsa, kTokens, kFormat},
          .tokens_help = "rows of a product, an expert's too, a list",
          .tokens = {512, 2048},
          .cpu_tokens = {1, 4, 16, 64, 256},
          .check_input = check_rows,
          .on_cpu = bench_products_on_cpu,
          .alone = bench_beside_cublas,
          .header = products_header,
          .text = products_text};
}

}  // namespace tandem
