// Serving benchmarks over lengths and numbers of prompts: a file each in one folder, and a summary.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bench/serving/serving_bench.h"

namespace tandem {

struct SweepLength {
  int input_tokens, output_tokens;
};

// Reads "1024:2048". Throws Error naming the option.
SweepLength parse_sweep_length(const std::string& text);

struct SweepRun {
  SweepLength length;
  int n_prompts;
  ServingMetrics metrics;
};

// Runs every number of prompts at every length, each against the server of `options`. Each run
// leaves speed_inI_outO_nN.jsonl and .log in `directory`, which is made if it does not exist, and
// summary.csv there has a line for each run so far. Ends early after an interrupted run. `say`
// receives progress messages.
std::vector<SweepRun> sweep_lengths(const ServingBenchOptions& options,
                                    const std::string& directory,
                                    const std::function<void(const std::string&)>& say);

// Today as YYYYMMDD, the usual folder.
std::string dated_folder();

// `n_gpus` of the server; 0: unknown, and no rate per GPU is given.
std::string sweep_summary(const std::vector<SweepRun>& runs, int n_gpus);  // a table
std::string sweep_csv(const std::vector<SweepRun>& runs, int n_gpus);

}  // namespace tandem
