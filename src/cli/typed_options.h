// Command-line options that several commands have, most of which become a type while they are
// parsed. Each adds one option to `command` that sets `value`; a name that is not known is an Error
// that lists the known ones.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "core/check.h"
#include "loader/model_options.h"
#include "offload/plan/workload.h"

namespace tandem {

// Options that --help does not show: other programs' names, and what is for measurements. Errors
// name them, as they do not with CLI11's own hidden options.
void hide(CLI::Option& option);
std::shared_ptr<CLI::FormatterBase> help_without_hidden();

// An option of any type; --help shows the value that it has now as the default.
template <class T>
void add_value(CLI::App& command, const std::string& option, T& value, const std::string& help) {
  command.add_option(option, value, help)->capture_default_str();
}
// A choice among names; the default is the one that `value` has now.
template <class T>
void add_choice(CLI::App& command, const std::string& option, T& value,
                const std::vector<std::pair<std::string, T>>& choices, const std::string& help) {
  const auto set = [&value, option, choices](const std::string& text) {
    std::string known;
    for (size_t i = 0; i < choices.size(); ++i) {
      if (choices[i].first == text) return void(value = choices[i].second);
      known += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i].first;
    }
    fail("{} {}: choose {}", option, text, known);
  };
  CLI::Option* added = command.add_option_function<std::string>(option, set, help);
  for (const auto& [name, choice] : choices)
    if (choice == value) added->default_str(name);
}
void add_threads(CLI::App& command, int& value);
void add_device(CLI::App& command, DeviceChoice& value, const std::string& help);
void add_isa(CLI::App& command, std::optional<cpu::Isa>& value, const std::string& help);
// A format of matrices, under the name `option`; "auto" is no value.
CLI::Option* add_format(CLI::App& command, const std::string& option,
                        std::optional<WeightFormat>& value, const std::string& help);
void add_kv_type(CLI::App& command, std::optional<DType>& value, const std::string& help);
void add_dense_products(CLI::App& command, DenseProducts& value, const std::string& help);
void add_attention(CLI::App& command, AttentionForm& value, const std::string& help);
void add_objective(CLI::App& command, Objective& value, const std::string& help);
// --draft and --draft-tokens.
void add_draft(CLI::App& command, DraftChoice& draft, int& n_tokens);
void add_ranks(CLI::App& command, std::optional<int>& value);
// --ranks, and how they divide a model: --dp, --tp, --ep, --pp, --ep-dispatch, --ep-rows.
void add_ranks(CLI::App& command, std::optional<int>& n_ranks, ModelOptions& model);
// What the ranks of all replicas divide; none if it is not said.
void add_divided(CLI::App& command, std::optional<SharedByReplicas>& value);
// How rows come to the ranks that have their experts.
void add_dispatch(CLI::App& command, ExpertDispatch& value);
// In which formats they travel; none if it is not said.
void add_expert_rows(CLI::App& command, std::optional<ExpertRows>& value);
// Experts that replace the router's choice for a measurement.
void add_simulated_routing(CLI::App& command, SimulatedRouting& value);
// Hosts and a network between them for a measurement on one host; help may not show them.
struct SimulatedOptions {
  std::vector<int>& hosts;
  std::chrono::duration<double>& delay;
  double& bytes_per_second;
};
void add_simulated_network(CLI::App& command, SimulatedOptions values, bool shown);
// NAME-secret and NAME-encryption.
void add_secret(CLI::App& command, const std::string& name, SecretOptions& value,
                const std::string& help);
// NAME-transport.
void add_transport(CLI::App& command, const std::string& name, TransportChoice& value);
void add_activations(CLI::App& command, bool& fp8, const std::string& help);

}  // namespace tandem
