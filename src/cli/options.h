// Command-line options as data. main.cpp fills them in; each command reads those that concern it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bench/benchmark.h"
#include "bench/serving/serving_bench.h"
#include "loader/loaded_model.h"
#include "offload/plan/workload.h"
#include "offload/servers/server_speed.h"
#include "offload/simulation/worker_faults.h"
#include "scheduling/sampler.h"
#include "transport/secret.h"
#include "transport/transport_choice.h"

namespace tandem {

struct GenerateOptions {
  std::string prompt, prompt_file;
  std::string system;
  int max_new_tokens = 4096;
  bool raw = false;  // no chat template
  bool ignore_eos = false;
  std::vector<std::string> stops;
  SamplingParams sampling;
  std::vector<std::string> logit_bias;  // ID=VALUE
};

struct PlanOptions {
  std::string model;                  // directory, file or name; empty: the embedded model
  std::string machine;                // file or name; empty: this machine
  std::string placement;              // file to assess; empty: decide
  std::string statistics, out, plot;  // files
  std::optional<WeightFormat> experts;
  std::optional<DType> kv;
  std::optional<ExpertRows> expert_rows;
  int64_t context = 8192;
  int concurrency = 1, prompt_tokens = 1024, output_tokens = 1024;
  Objective objective = Objective::kLatency;
  double user_speed = 0, first_token_seconds = 0;
  std::optional<int> redundant_experts, draft_tokens;
  bool experts_move = false;
  double acceptance = Workload{}.acceptance;
  std::string preset;  // empty, or the name of a workload_preset()
  bool batch_table = false;
  bool simulate = false;
  double skew = 0.5;  // of the simulated routing
  FaultOptions faults = {.n_faults = 0};
  int n_standbys = 0;              // hosts that replace lost workers
  bool servers = false;            // which hosts become which servers
  double requests_per_second = 0;  // to them; 0: as many as `concurrency` says
  double gap_seconds = 0;          // between tokens, maximum; 0: any
};

// Whether experts move between ranks while a server answers; on request: POST /rebalance.
enum class Rebalance { kOff, kOnRequest, kAuto };

// Options of the commands that listen.
struct ListenOptions {
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string api_key;
  std::string certificate, key;  // PEM files; empty: no TLS
  std::vector<std::string> cors_origins;
  int drain_seconds = 30;
};

struct ServeOptions : ListenOptions {
  std::string served_model_name;    // empty: the model as given
  std::string proxy_url, node_url;  // of a router, and of this server there; empty: none
  std::string proxy_api_key;        // empty: api_key
  std::string proxy_ca;             // PEM file; empty: what this system trusts
  int max_batch = 256;              // concurrent sequences
  std::optional<int> chunk;         // tokens per step; nothing: as placed, or kStepTokens
  int64_t kv_tokens = 0;            // for all sequences; 0: set by kv_fraction
  double kv_fraction = 0.8;         // of the memory that is free after loading
  ServerRole role = ServerRole::kBoth;
  std::string kv_listen = "127.0.0.1:9100";  // of the prefill role
  std::vector<std::string> prefill;          // addresses of prefill servers
  SecretOptions kv_secret;
  int prefill_from = 256;  // tokens; shorter prompts are computed here
  Rebalance rebalance = Rebalance::kOff;
  bool live_hot_experts = false;
  double rebalance_below = 0.8;  // balancedness
  double rebalance_period = 60;  // seconds
  int balance_window = 1000;     // steps whose uses of experts are counted; 0: none
  bool no_prefix_cache = false, no_async_output = false, log_requests = false;
};

struct ExpertWorkerOptions {
  std::string experts = "auto";  // experts_from_text(), or "standby"
  std::string placement, host;   // file, and which of its workers; empty: as `experts` says
  std::string listen = "127.0.0.1:9000";
  SecretOptions secret;
  TransportChoice transport = TransportChoice::kTcp;
  std::optional<WeightFormat> format;
  int chunk = kStepTokens;                 // most rows of a request
  DraftChoice draft = DraftChoice::kAuto;  // LoadedExpertsOptions::draft
  bool experts_move = false;
};

struct RouteOptions : ListenOptions {
  std::string backends;       // addresses, separated by commas
  std::string backends_file;  // with an address a line
  bool accepts_registration = false;
  std::string backend_api_key;  // empty: backends get what clients send
  std::string backend_ca;       // PEM file; empty: what this system trusts
  double check_interval = 1, check_timeout = 2, connect_timeout = 5;  // seconds
  double first_byte_timeout = 0;                                      // 0: none
};

struct SelfTestOptions {
  std::vector<std::string> models = {"v2-lite"};
  int layers = 2;
  int n_threads = 0;  // 0: one per core
  bool json = false;
};

struct PullCommandOptions {
  std::string repository, revision = "main";
  std::string directory;  // empty: the repository's name, in the current folder
  std::vector<std::string> include;
  int n_connections = 8, n_tries = 12;
  double idle_seconds = 30;
};

struct Options {
  ModelOptions model;
  std::optional<int> n_ranks;  // of this host, which the program starts; empty: not given
  GenerateOptions generate;
  bool json = false;
  bool quiet = false;  // no progress, no timings

  bool list_tensors = false;  // inspect

  std::string text;  // tokenize; logits: the ids
  bool decode = false, chat = false, stats = false;

  std::string record_routing;  // run: file of statistics
  std::string timeline;        // run: file

  std::string out;  // logits
  bool all = false;

  std::string file, against;                    // eval
  bool compares_experts = false;                // with the same model
  std::optional<WeightFormat> against_experts;  // whose experts have this format

  BenchOptions bench;
  const Benchmark* benchmark = nullptr;  // the chosen one
  PlanOptions plan;
  ServeOptions serve;
  ExpertWorkerOptions worker;
  RouteOptions route;
  ServingBenchOptions serving;
  std::string serving_preset;  // empty, or the name of a workload_preset()
  SelfTestOptions self_test;
  PullCommandOptions pull;
};

using Command = int (*)(const Options&);
int run_command(const Options& options);
int chat_command(const Options& options);
int serve_command(const Options& options);
int worker_command(const Options& options);
int route_command(const Options& options);
int inspect_command(const Options& options);
int tokenize_command(const Options& options);
int logits_command(const Options& options);
int eval_command(const Options& options);
int pack_command(const Options& options);
int plan_command(const Options& options);
int pull_command(const Options& options);

}  // namespace tandem
