// `tandem bench products` on a CPU: the dense products of a model, beside oneDNN's.
#include "bench/parts/products.h"

#include <nlohmann/json.hpp>

#include "core/rounding.h"
#include "model/cost.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// What is measured, by the end of a weight's name. Queries have one of two.
struct Product {
  const char *what, *weight;
};
constexpr Product kProducts[] = {{"gate", ".mlp.gate_proj.weight"},
                                 {"down", ".mlp.down_proj.weight"},
                                 {"attention output", ".self_attn.o_proj.weight"},
                                 {"queries", ".self_attn.q_b_proj.weight"},
                                 {"queries", ".self_attn.q_proj.weight"}};

bool is_multiplied(const WeightSpec& spec) {
  return std::any_of(std::begin(kProducts), std::end(kProducts),
                     [&](const Product& p) { return spec.name.ends_with(p.weight); });
}

// Dense layers with random weights in one format.
struct DenseLayers {
  CpuWeights home;
  ModelWeights weights;

  DenseLayers(const ModelConfig& config, WeightFormat format, const cpu::KernelTable& kernels,
              Team& team)
      : home(kernels),
        weights(random_weights(config, {format, format}, is_multiplied, home, team)) {}
  // The matrices of a product, one for each layer; none if the model has no such product.
  std::vector<QuantView> matrices(const Product& product, const ModelConfig& config) {
    std::vector<QuantView> found;
    for_each_weight(weights, config, [&](const WeightSpec& spec, const QuantView& w) {
      if (spec.name.ends_with(product.weight)) found.push_back(w);
    });
    return found;
  }
};

// The type that oneDNN multiplies instead of a format that it lacks.
WeightFormat provided_format(WeightFormat format) {
  return {format.dtype == DType::kF32 ? DType::kF32 : DType::kBF16};
}

int64_t layer_bytes(const ModelConfig& config, WeightFormat format) {
  ModelConfig one = config;
  one.n_layers = one.n_dense_layers = 1;
  ModelWeights weights;
  int64_t bytes = 0;
  for_each_weight(weights, one, [&](const WeightSpec& spec, const QuantView&) {
    if (is_multiplied(spec)) bytes += matrix_bytes(config, spec.rows, spec.cols, format);
  });
  return bytes;
}

// Enough dense layers that weights come from memory, and no MoE layers.
ModelConfig dense_config(const BenchInput& bench, int64_t bytes) {
  require(bytes <= bench.memory_bytes,
          "a layer does not fit: it needs {:.2f} GB and {:.2f} GB may be used; choose a smaller "
          "format or raise --memory",
          gigabytes(bytes), gigabytes(bench.memory_bytes));
  ModelConfig config = bench.config;
  config.n_layers =
      static_cast<int>(std::min(ceil_div(cold_bytes(), bytes), bench.memory_bytes / bytes));
  config.n_dense_layers = config.n_layers;
  return config;
}

struct Case {
  const char* what;
  std::vector<QuantView> ours, provided;  // matrices; the second empty if oneDNN does not take them
};

Json row_of(const Case& c, const Measured& ours, const Measured* provided) {
  Json row = {{"what", c.what}, {"outputs", c.ours[0].q.rows}, {"columns", c.ours[0].q.cols}};
  const double seconds = provided ? provided->seconds : 0;
  row["onednn_seconds"] = provided ? Json(seconds) : Json();
  row["onednn_ratio"] = provided ? Json(seconds / ours.seconds) : Json();
  return row;
}

}  // namespace

void bench_dense_products(const BenchInput& bench, const cpu::KernelTable& kernels,
                          MachineSpeed& speed, const OneDnnHere& onednn, const OnRow& on_row) {
  const WeightFormat format = bench.formats.backbone, other = provided_format(format);
  ProductProvider* const provider = onednn.provider;
  const ModelConfig config = dense_config(
      bench, layer_bytes(bench.config, format) + (provider ? layer_bytes(bench.config, other) : 0));
  Team& team = speed.team();
  DenseLayers layers(config, format, kernels, team);
  std::optional<DenseLayers> copies;
  if (provider) copies.emplace(config, other, kernels, team);

  std::vector<Case> cases;
  std::vector<const void*> provided;
  int64_t most_outputs = 0, most_columns = 0;
  for (const Product& product : kProducts) {
    Case c = {product.what, layers.matrices(product, config), {}};
    if (c.ours.empty()) continue;
    const TensorView& shape = c.ours[0].q;
    most_outputs = std::max(most_outputs, shape.rows);
    most_columns = std::max(most_columns, shape.cols);
    if (copies) c.provided = copies->matrices(product, config);
    if (copies &&
        !(can_interleave(kernels, c.provided[0].q) && provider->prepare(other.dtype, shape.cols)))
      c.provided.clear();
    for (const QuantView& w : c.provided) {
      interleave(w.q, team);
      provided.push_back(w.q.data);
    }
    cases.push_back(std::move(c));
  }

  const int most = most_of(bench.options.tokens);
  CpuOps ops(kernels, config, most, team), provided_ops(kernels, config, most, team);
  provided_ops.use(provider, std::move(provided));
  Buffer inputs(most * most_columns * size_of(DType::kF32)),
      outputs(most * most_outputs * size_of(DType::kF32));
  fill_with_normal({inputs.data(), most, most_columns, most_columns, DType::kF32});

  const cpu::PeakLoop peak = peak_of_products(speed, kernels, format.dtype);
  for (const int n : bench.options.tokens) {
    std::vector<Work> works;
    const auto add = [&](CpuOps& with, const std::vector<QuantView>& matrices, WeightFormat of) {
      const int64_t rows = matrices[0].q.rows, cols = matrices[0].q.cols;
      const TensorView x = {inputs.data(), n, cols, cols, DType::kF32},
                       out = {outputs.data(), n, rows, rows, DType::kF32};
      works.push_back({{matrix_bytes(config, rows, cols, of), 2 * rows * cols * n},
                       [&with, &matrices, x, out](int64_t run) {
                         with.linear(x, matrices[run % std::ssize(matrices)], out);
                       }});
    };
    for (const Case& c : cases) {
      add(ops, c.ours, format);
      if (!c.provided.empty()) add(provided_ops, c.provided, other);
    }
    const std::vector<Measured> measured =
        measure(speed, peak, works, bench.options.seconds, bench.options.progress);
    auto next = measured.begin();
    for (const Case& c : cases) {
      const Measured& ours = *next++;
      const Measured* const theirs = c.provided.empty() ? nullptr : &*next++;
      Json row = new_row("products", bench, format_name(format), kernels, speed);
      row["tokens"] = n;
      row["onednn"] = onednn.name;
      row["onednn_format"] = format_name(other);
      row.update(row_of(c, ours, theirs));
      add_fields(row, ours, peak);
      on_row(row);
    }
  }
}

void bench_products_on_cpu(const BenchInput& bench, const cpu::KernelTable& kernels,
                           MachineSpeed& speed, const OnRow& on_row) {
  std::string name;
  const std::unique_ptr<ProductProvider> provider =
      open_onednn(onednn_names(), speed.team().size(), name);
  if (provider) name = provider->name();
  bench_dense_products(bench, kernels, speed, {provider.get(), name}, on_row);
}

std::string cpu_products_header(const Json& row) {
  return fmt::format(
      "products of {}, weights {}, {}, {} threads: reading {:.1f} GB/s, {} {:.0f} Gop/s; {}\n\n"
      "| product          | outputs x columns | rows |        ms |  Gop/s | of the roofline | "
      "oneDNN {} ms | of oneDNN |\n"
      "|:-----------------|------------------:|-----:|----------:|-------:|----------------:|"
      "---------------:|----------:|\n",
      row["config"].get<std::string>(), row["format"].get<std::string>(),
      row["isa"].get<std::string>(), row["threads"].get<int>(),
      row["read_bytes_per_second"].get<double>() * 1e-9, row["instruction"].get<std::string>(),
      row["peak_ops_per_second"].get<double>() * 1e-9, row["onednn"].get<std::string>(),
      row["onednn_format"].get<std::string>());
}

std::string cpu_products_text(const Json& row) {
  const bool compared = row["onednn_seconds"].is_number();
  return fmt::format(
      "| {:<16} | {:>17} | {:>4} | {:>9.4g} | {:>6.4g} | {:>13.0f} % | {:>14} | {:>9} |\n",
      row["what"].get<std::string>(),
      fmt::format("{} x {}", row["outputs"].get<int64_t>(), row["columns"].get<int64_t>()),
      row["tokens"].get<int>(), row["seconds"].get<double>() * 1e3,
      row["ops_per_second"].get<double>() * 1e-9, row["roofline_ratio"].get<double>() * 100,
      compared ? fmt::format("{:.4g}", row["onednn_seconds"].get<double>() * 1e3) : "none",
      compared ? fmt::format("{:.0f} %", row["onednn_ratio"].get<double>() * 100) : "");
}

}  // namespace tandem
