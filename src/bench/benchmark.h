// What `tandem bench` measures. A benchmark is a description: its options, their defaults, the
// function that measures and the text of its rows. The command line, reports and charts follow from
// it. A new benchmark is a file with its description, declared below and listed in
// all_benchmarks().
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu_bench_model.h"
#include "bench/roofline.h"
#include "comm/mpi/mpi_collectives.h"
#include "core/machine.h"
#include "loader/model_options.h"
#include "offload/simulation/simulated_routing.h"

namespace tandem {

// The ranks that run a benchmark together, and MPI's own calls between them.
struct BenchRanks {
  Group& group;
  RawCollectives& raw;
  Ranks ranks = {};  // as models are loaded on them
};

// The command line of `tandem bench WHAT`.
struct BenchOptions {
  std::string config = "r1";                  // a name of models/configs, or a file or directory
  std::optional<WeightFormat> experts = {};   // of routed experts; empty: the checkpoint's
  std::optional<WeightFormat> format = {};    // of all other matrices; empty: the checkpoint's
  std::optional<cpu::Isa> isa = {};           // of the CPU's kernels; empty: default_isa()
  DeviceChoice device = DeviceChoice::kAuto;  // products: what is measured; kAuto: a GPU if any
  bool fp8_activations = false;               // in the GPU's products of many tokens
  std::vector<int> tokens = {};               // rows of a product, or lengths of prompts
  std::vector<int> contexts = {};             // tokens in the cache
  std::vector<int> batches = {};              // sequences per step
  int context_limit = 0;  // tokens that the cache holds of a sequence; 0: the longest context
  int layers = 5;
  int new_tokens = 8;                    // decoded at each context
  std::vector<int> draft_tokens = {};    // drafts of a sequence per step; empty: none
  std::vector<double> acceptances = {};  // parts of the drafts that are right, if all before are
  int decided_steps = 0;                 // steps for which the engine decides what is drafted
  bool skew = false;
  bool variants = false;  // of attention
  double seconds = 0.3;   // of measuring, per row
  double memory_gb = 0;   // for weights; 0: a fraction of the free memory
  int n_threads = 0;      // 0: one per core
  bool json = false, csv = false;
  bool as_network = false;  // comm: ranks of one host are taken for hosts
  std::string plot = {};    // SVG file; empty: none
  std::string curves = {};  // machine: file of rows
  SimulatedRouting simulated_routing = {};
  ExpertDispatch dispatch = ExpertDispatch::kAuto;  // overlap: how rows travel
  std::optional<ExpertRows> rows = {};              // overlap: their formats; nothing: exact
  std::string baseline = {};                        // embed, mlp: "torch", or empty
  std::string disk = {};                            // machine: file or directory to read
  std::vector<int64_t> bytes = {};  // comm: of a collective call; empty: from 1 KB to 64 MB
  std::string out = {};             // comm: machine file to write; empty: none
  std::string timeline = {};        // overlap: file; empty: none
  std::string model = {};           // overlap: model directory; empty: the embedded model
  // comm, overlap: rows travel so much longer between hosts, and not faster; no limit: 0.
  std::chrono::duration<double> simulated_delay{0};
  double simulated_rate = 0;              // bytes/s of a rank
  std::vector<int> simulated_hosts = {};  // ranks on each; empty: hosts are those that there are
  WorkerOptions workers = {};             // overlap: instead of ranks
  const BenchRanks* ranks = nullptr;      // null: one process alone
  MeasuringProgress progress = {};
  std::function<void(const std::string& line)> warn = [](const std::string&) {};
};

// The options that not every benchmark has. All have --seconds and --json, those of one process
// --threads and --memory, those of several --ranks.
enum class BenchFlag {
  kConfig,
  kDevice,
  kIsa,
  kTokens,
  kCsv,
  kPlot,
  kContexts,
  kContextLimit,
  kBatches,
  kLayers,
  kExperts,
  kFormat,
  kActivations,
  kNewTokens,
  kDraftTokens,
  kDrafts,
  kSkew,
  kVariants,
  kDisk,
  kCurves,
  kBaseline,
  kSimulateRouting,
  kBytes,
  kNetwork,
  kOverlap
};

// What a benchmark measures: the options, and what follows from them and from the machine.
struct BenchInput {
  BenchOptions options;  // lists that were not given have the benchmark's defaults
  ModelConfig config = {};
  WeightFormats formats = {};
  int64_t memory_bytes = 0;  // that weights and caches may take
  int step_tokens = 0;       // prompt tokens per step
  GpuBenchModels gpus = {};  // empty: no GPU
  // The GPU's rates: memory bandwidth and BF16 peak, or all of them; empty: no GPU.
  std::optional<Gpu> gpu = {};
  // This machine's curves for predictions; empty: defaults of its instruction set.
  std::vector<EfficiencyCurve> curves = {};
};

using OnRow = std::function<void(const nlohmann::ordered_json& row)>;

// Rows as text (row_text.cpp). What was measured with which machine rates, then the header of a
// Markdown table with the columns of this row; and a line of it.
std::string row_header(const nlohmann::ordered_json& row);
std::string row_text(const nlohmann::ordered_json& row);
// ", routing simulated: balanced-ranks:32", or "" where the router chose.
std::string simulated_routing_text(const nlohmann::ordered_json& row);
// Every field that is not a list; empty where it is null.
std::string csv_header(const nlohmann::ordered_json& row);
std::string csv_text(const nlohmann::ordered_json& row);
// SVG chart of times by tokens, with a line per format, part and context.
std::string rows_chart(std::span<const nlohmann::ordered_json> rows);

struct Benchmark {
  const char* name;
  const char* help;
  const char* examples;
  std::vector<BenchFlag> flags;  // in the order of --help
  const char* tokens_help = "tokens per step, a list";
  const char* layers_help = "number of layers: the first is dense, the others have experts";
  // Used where the command line has no list.
  std::vector<int> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048};
  std::vector<int> cpu_tokens = {};  // likewise, of a benchmark that measures either device
  std::vector<int> contexts = {}, batches = {};
  double memory_part = 0.4;    // part of the free memory that weights may take
  bool all_gpu_rates = false;  // BenchInput::gpu has all rates, as predictions need them
  // Throws Error for options that this benchmark cannot measure with.
  void (*check)(const BenchOptions& options) = nullptr;
  void (*check_input)(const BenchInput& bench) = nullptr;
  // `on_cpu` needs the CPU's kernels and its speed; `alone` measures a GPU's kernels or the machine
  // itself. A benchmark with both measures a GPU if there is one, else the CPU.
  void (*on_cpu)(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row) = nullptr;
  void (*alone)(const BenchInput& bench, const OnRow& on_row) = nullptr;
  // Measures several ranks, BenchOptions::ranks, all of which make the same rows.
  void (*on_ranks)(const BenchInput& bench, const OnRow& on_row) = nullptr;
  // The text before the first row, and that of every row.
  std::string (*header)(const nlohmann::ordered_json& row) = row_header;
  std::string (*text)(const nlohmann::ordered_json& row) = row_text;
};

std::span<const Benchmark> all_benchmarks();  // in the order of --help

// `cut`, a part of the model of `bench`, with the routing that the options ask for.
ModelConfig with_simulated_routing(const BenchInput& bench, ModelConfig cut);

// Checks all options and completes them; measures nothing. Throws Error for options that cannot be
// measured with.
BenchInput checked_input(const Benchmark& benchmark, BenchOptions options);

// `input`: checked_input().
void run_benchmark(const Benchmark& benchmark, BenchInput input, const OnRow& on_row);

// Throws Error unless all values are between 1 and `most`.
void require_list(const char* option, const std::vector<int>& values, int most);

// The fields with which a row of a benchmark on the CPU begins.
nlohmann::ordered_json new_row(const char* name, const BenchInput& bench, std::string_view format,
                               const cpu::KernelTable& kernels, MachineSpeed& speed);

constexpr int kMaxTokens = 1 << 16;
constexpr double kGpuSeconds = 0.05;  // time to measure one rate of a GPU

// The descriptions, in parts/, gpu/, machine/ and comm/.
Benchmark machine_benchmark();
Benchmark embed_benchmark();
Benchmark experts_benchmark();
Benchmark mlp_benchmark();
Benchmark head_benchmark();
Benchmark attention_benchmark();
Benchmark moe_benchmark();
Benchmark layer_benchmark();
Benchmark generate_benchmark();
Benchmark kernels_benchmark();
Benchmark products_benchmark();
Benchmark hybrid_benchmark();
Benchmark comm_benchmark();
Benchmark overlap_benchmark();

}  // namespace tandem
