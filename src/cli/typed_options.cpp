#include "cli/typed_options.h"

#include "core/check.h"

namespace tandem {
namespace {

constexpr const char* kHidden = "Hidden";  // a group of options

class HelpWithoutHidden final : public CLI::Formatter {
 public:
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    if (group == kHidden) return "";
    return Formatter::make_group(std::move(group), is_positional, std::move(options));
  }
};

}  // namespace

void hide(CLI::Option& option) { option.group(kHidden); }
std::shared_ptr<CLI::FormatterBase> help_without_hidden() {
  return std::make_shared<HelpWithoutHidden>();
}

void add_threads(CLI::App& command, int& value) {
  add_value(command, "--threads", value,
            "number of threads, one pinned to each core; 0: all cores");
}

void add_device(CLI::App& command, DeviceChoice& value, const std::string& help) {
  std::vector<std::pair<std::string, DeviceChoice>> choices;
  for (const auto device : {DeviceChoice::kAuto, DeviceChoice::kCpu, DeviceChoice::kCuda})
    choices.emplace_back(name_of(device), device);
  add_choice(command, "--device", value, choices, help);
}

void add_isa(CLI::App& command, std::optional<cpu::Isa>& value, const std::string& help) {
  const auto set = [&value](const std::string& text) {
    value = text == "auto" ? std::optional<cpu::Isa>() : isa_called(text);
  };
  command.add_option_function<std::string>("--isa", set, help)->default_str("auto");
}

CLI::Option* add_format(CLI::App& command, const std::string& option,
                        std::optional<WeightFormat>& value, const std::string& help) {
  const auto set = [&value, option](const std::string& text) {
    value = find_weight_format(text);
    require(value || text == "auto", "{} {}: choose auto, {}", option, text, weight_format_names());
  };
  return command.add_option_function<std::string>(option, set, help)->default_str("auto");
}

void add_kv_type(CLI::App& command, std::optional<DType>& value, const std::string& help) {
  add_choice<std::optional<DType>>(command, "--kv", value,
                                   {{"auto", {}}, {"bf16", DType::kBF16}, {"fp8", DType::kF8E4M3}},
                                   help);
}

void add_dense_products(CLI::App& command, DenseProducts& value, const std::string& help) {
  std::vector<std::pair<std::string, DenseProducts>> choices;
  for (const auto products :
       {DenseProducts::kTandem, DenseProducts::kOneDnn, DenseProducts::kFastest})
    choices.emplace_back(name_of(products), products);
  add_choice(command, "--dense-products", value, choices, help);
}

void add_attention(CLI::App& command, AttentionForm& value, const std::string& help) {
  add_choice<AttentionForm>(command, "--attention", value,
                            {{"auto", AttentionForm::kAuto},
                             {"naive", AttentionForm::kNaive},
                             {"absorb", AttentionForm::kAbsorbed}},
                            help);
}

void add_objective(CLI::App& command, Objective& value, const std::string& help) {
  add_choice<Objective>(command, "--objective", value,
                        {{"latency", Objective::kLatency}, {"throughput", Objective::kThroughput}},
                        help);
}

void add_draft(CLI::App& command, DraftChoice& draft, int& n_tokens) {
  draft = DraftChoice::kAuto;
  std::vector<std::pair<std::string, DraftChoice>> choices;
  for (const auto choice :
       {DraftChoice::kOff, DraftChoice::kAuto, DraftChoice::kMtp, DraftChoice::kLookup})
    choices.emplace_back(name_of(choice), choice);
  add_choice(command, "--draft", draft, choices,
             "draft tokens, by the model's layer for multi-token prediction or what followed the "
             "same words earlier in the text, and compute them in one step with the next token; "
             "auto: where that is measured to be faster; the answer stays the same");
  auto n = std::make_shared<int>(kUsualDraftTokens);
  add_value(command, "--draft-tokens", *n, "most drafts of a sequence per step");
  command.parse_complete_callback([&n_tokens, n] {
    require(*n >= 1 && *n <= kMaxDraftTokens, "--draft-tokens {}: must be between 1 and {}", *n,
            kMaxDraftTokens);
    n_tokens = *n;
  });
}

void add_ranks(CLI::App& command, std::optional<int>& value) {
  command.add_option_function<int>(
      "--ranks",
      [&value](int n) {
        require(n >= 1, "--ranks {}: must be 1 or more", n);
        value = n;
      },
      "processes on this host that run it together, started by the MPI that is installed; across "
      "hosts mpirun or srun starts them");
}

void add_ranks(CLI::App& command, std::optional<int>& n_ranks, ModelOptions& model) {
  add_ranks(command, n_ranks);
  const auto add_number = [&](const std::string& names, int& value, const std::string& help) {
    const auto set = [&value, name = names.substr(0, names.find(','))](int n) {
      require(n >= 1, "{} {}: must be 1 or more", name, n);
      value = n;
    };
    command.add_option_function<int>(names, set, help);
  };
  // Names of SGLang and vLLM are accepted too.
  add_number("--dp,--dp-size,--data-parallel-size", model.n_replicas,
             "replicas of the backbone, each with requests and a KV cache of its own; the ranks of "
             "each divide it, and all ranks divide the experts");
  add_number("--tp,--tp-size,--tensor-parallel-size", model.tp, "ranks that divide a replica");
  add_number("--ep,--ep-size", model.ep, "ranks that divide the experts: all of them");
  add_number("--pp,--pp-size,--pipeline-parallel-size", model.n_stages,
             "pipeline stages, each with some of the layers");
  add_divided(command, model.by_replicas);
  add_dispatch(command, model.dispatch);
  add_expert_rows(command, model.rows);
  add_choice(command, "--replica-choice", model.replica_choice,
             {{name_of(ReplicaChoice::kNearest), ReplicaChoice::kNearest},
              {name_of(ReplicaChoice::kLeastLoaded), ReplicaChoice::kLeastLoaded}},
             "which rank computes a token's expert that several have: the nearest one, which "
             "depends on the token alone, or the one with the least work in the step");
  add_choice(
      command, "--micro-batches", model.micro_batches,
      {{"auto", 0}, {"1", 1}, {"2", 2}, {"3", 3}, {"4", 4}},
      "parts of a step of ranks with replicas, or with workers, of which one computes while the "
      "rows of others travel; auto: what is measured to be faster");
  hide(*command.add_flag_callback("--enable-microbatch",
                                  [&model] { model.micro_batches = 0; }));  // LMDeploy's
  add_simulated_network(
      command, {model.simulated_hosts, model.simulated_delay, model.simulated_rate}, false);
  // What LMDeploy and SGLang say of one host is true here too.
  for (const auto& [name, of_one_host] : {std::pair("--nnodes", 1), std::pair("--node-rank", 0)})
    hide(*command.add_option_function<int>(
        name, [name = name, of_one_host = of_one_host](int number) {
          require(number == of_one_host,
                  "{} {}: mpirun or srun starts the ranks of several hosts "
                  "(docs/scale_out.md): leave it out",
                  name, number);
        }));
}

void add_divided(CLI::App& command, std::optional<SharedByReplicas>& value) {
  using Divided = std::optional<SharedByReplicas>;
  add_choice<Divided>(
      command, "--dp-divide", value,
      {{"none", Divided({})},
       {"dense", Divided({.dense = true})},
       {"head", Divided({.head = true})},
       {"both", Divided({.dense = true, .head = true})}},
      "what the ranks of all replicas divide, so that each has less of it, and rows "
      "travel for it: dense layers, the head, both or none of them");
  command.get_option("--dp-divide")->default_str("none");
  hide(*command.add_flag_callback("--enable-dp-lm-head", [&value] {  // SGLang's
    require(!value || !value->head,
            "--enable-dp-lm-head: replicas with heads of their own contradict "
            "--dp-divide: leave one of them out");
  }));
}

void add_dispatch(CLI::App& command, ExpertDispatch& value) {
  std::vector<std::pair<std::string, ExpertDispatch>> choices;
  for (const auto dispatch :
       {ExpertDispatch::kAuto, ExpertDispatch::kAllReduce, ExpertDispatch::kGather,
        ExpertDispatch::kAllToAll, ExpertDispatch::kLowLatency})
    choices.emplace_back(name_of(dispatch), dispatch);
  add_choice(command, "--ep-dispatch", value, choices,
             "how rows come to the ranks that have their experts; auto: the sums of all ranks are "
             "added, or with --dp what is measured to be faster");
}

void add_expert_rows(CLI::App& command, std::optional<ExpertRows>& value) {
  using Rows = std::optional<ExpertRows>;
  add_choice<Rows>(command, "--ep-rows", value,
                   {{name_of(ExpertRows::kExact), Rows(ExpertRows::kExact)},
                    {name_of(ExpertRows::kFp8), Rows(ExpertRows::kFp8)}},
                   "how rows travel to the ranks that have their experts: exact, as BF16 where "
                   "experts round to that anyway, else as floats, and sums as floats; fp8: rows as "
                   "FP8 with scales, sums as BF16");
  command.get_option("--ep-rows")->default_str(name_of(ExpertRows::kExact));
}

void add_simulated_routing(CLI::App& command, SimulatedRouting& value) {
  command
      .add_option_function<std::string>(
          "--simulate-routing",
          [&value](const std::string& text) { value = simulated_routing(text); },
          "experts for a measurement, whatever the router chooses, so that texts are meaningless: "
          "balanced-ranks (in one process balanced-ranks:N), balanced-experts, grouped-random, or "
          "a "
          "file of routing statistics; model: as it chooses")
      ->default_str("model");
}

void add_simulated_network(CLI::App& command, SimulatedOptions values, bool shown) {
  const std::initializer_list<CLI::Option*> options = {
      command.add_option_function<double>(
          "--simulate-delay",
          [&delay = values.delay](double ms) {
            require(ms >= 0 && ms <= 1000, "--simulate-delay {:g}: must be between 0 and 1000", ms);
            delay = std::chrono::duration<double>(ms * 1e-3);
          },
          "ms that rows and sums of CPU ranks travel longer, to measure on one host"),
      command.add_option_function<double>(
          "--simulate-rate",
          [&rate = values.bytes_per_second](double gb) {
            require(gb > 0 && gb <= 1000,
                    "--simulate-rate {:g}: must be above 0 and at most 1000 GB/s", gb);
            rate = gb * 1e9;
          },
          "GB/s that a CPU rank sends to other hosts, and gets from them, at most"),
      command
          .add_option("--simulate-hosts", values.hosts,
                      "take ranks for those of several hosts, so many on each, a list")
          ->delimiter(',')};
  if (shown) return;
  for (CLI::Option* const option : options) hide(*option);
}

void add_activations(CLI::App& command, bool& fp8, const std::string& help) {
  add_choice<bool>(command, "--activations", fp8, {{"bf16", false}, {"fp8", true}}, help);
}

void add_transport(CLI::App& command, const std::string& name, TransportChoice& value) {
  add_choice<TransportChoice>(
      command, name + "-transport", value,
      {{"tcp", TransportChoice::kTcp},
       {"ucx", TransportChoice::kUcx},
       {"auto", TransportChoice::kAuto}},
      "what rows travel by: tcp; ucx: shared memory on one host, and RDMA between hosts where "
      "encryption is off; or auto: ucx where both sides have it; a connection begins by TCP");
}

void add_secret(CLI::App& command, const std::string& name, SecretOptions& value,
                const std::string& help) {
  command.add_option(name + "-secret", value.file, help);
  add_choice(command, name + "-encryption", value.encrypts, {{"on", true}, {"off", false}},
             "whether what is sent is encrypted too, by TLS 1.3 with a key made from the secret; "
             "both sides have the same");
}

}  // namespace tandem
