#include "loader/expert_workers.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "comm/agreement.h"
#include "loader/weights/model_identity.h"
#include "loader/worker_expert_mover.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

// What the worker has. Nothing if it does not answer and is one of several addresses of a name.
std::optional<WorkerWelcome> welcome_of(WorkerLink& link, bool is_of_several,
                                        Clock::time_point until) {
  constexpr std::chrono::milliseconds kAgain(200);
  while (true) {
    try {
      return link.ask();
    } catch (const ConnectionError& error) {
      if (Clock::now() >= until && is_of_several) return {};
      require_run(
          Clock::now() < until,
          "the worker {} does not answer: {}: start it, leave it out, or wait longer for one "
          "that loads with --worker-patience",
          link.address(), error.what());
    } catch (const PathError& error) {
      throw PathError(fmt::format("--worker-transport ucx: the worker {} is not reached by UCX: {}",
                                  link.address(), error.what()));
    } catch (const ProtocolError& error) {
      fail("{}: {}", link.address(), error.what());
    }
    std::this_thread::sleep_for(kAgain);
  }
}

// Owners of the same expert must give the same bits, or a text would depend on who answered.
void require_same_bits(const AskedWorkers& asked) {
  for (size_t a = 0; a < asked.welcomes.size(); ++a)
    for (size_t b = a + 1; b < asked.welcomes.size(); ++b) {
      const WorkerWelcome &first = asked.welcomes[a], &second = asked.welcomes[b];
      const std::vector<int> of_first = in_any_layer(first.experts),
                             of_second = in_any_layer(second.experts);
      std::vector<int> both;
      std::set_intersection(of_first.begin(), of_first.end(), of_second.begin(), of_second.end(),
                            std::back_inserter(both));
      if (both.empty()) continue;
      // Shards are parts of `both`, so their sums agree if the places of all these experts do.
      require(arithmetic_of(first, both) == arithmetic_of(second, both),
              "the workers {} and {} both have experts {}, and would compute different sums "
              "(\"{}\" and \"{}\"): start them with the same --device, --isa, --format and "
              "--threads, or with different experts",
              asked.links[a]->address(), asked.links[b]->address(), text_of_experts(both),
              arithmetic_of(first, both), arithmetic_of(second, both));
    }
}

// A standby whose sums would be other ones than those of every worker is not what the user means.
void require_useful_standbys(const AskedWorkers& asked, int n_layers, int max_tokens) {
  const WorkerNeeds needs = needs_of(asked.welcomes, n_layers, max_tokens);
  for (size_t w = 0; w < asked.links.size(); ++w) {
    if (!asked.welcomes[w].is_standby) continue;
    try {
      require_fits(asked.welcomes[w], needs);
    } catch (const Error& error) {
      fail("the worker {}: {}", asked.links[w]->address(), error.what());
    }
  }
}

// What decides the sums that workers give, and how they are added.
std::string text_of(const AskedWorkers& asked) {
  std::string text = fmt::format("{} workers", asked.welcomes.size());
  for (const WorkerWelcome& worker : asked.welcomes)
    text += fmt::format("; {}{}, {}", worker.is_standby ? "standby " : "",
                        text_of_experts(in_any_layer(worker.experts)), worker.arithmetic);
  return text;
}

}  // namespace

AskedWorkers ask_workers(const ModelOptions& options, const WeightStore& store,
                         const ModelConfig& config) {
  const WorkerOptions& workers = options.workers;
  require(workers.addresses.empty() || workers.file.empty(),
          "--workers {} and --workers-file {}: give one of them",
          fmt::format("{}", fmt::join(workers.addresses, ",")), workers.file);
  const Secret secret = workers.secret.read();
  ChosenTransport chosen = chosen_transport(workers.transport, secret, "--worker-transport");
  if (!chosen.why_not.empty()) options.note("rows travel to workers by TCP: " + chosen.why_not);
  const PathUse path = !chosen.has_paths                             ? PathUse::kNever
                       : workers.transport == TransportChoice::kAuto ? PathUse::kIfPossible
                                                                     : PathUse::kAlways;
  AskedWorkers asked{.transport = std::move(chosen.transport),
                     .links = {},
                     .welcomes = {},
                     .experts = ExpertsOfLayers(config.n_layers + config.n_mtp_layers,
                                                std::vector<bool>(config.router.n_experts)),
                     .list = {}};
  asked.list = std::make_unique<WorkerList>(
      WorkerListOptions{.addresses = workers.addresses,
                        .file = workers.file,
                        .resolve = workers.resolve ? workers.resolve : tcp_addresses_of,
                        .period = workers.list_period,
                        .note = options.note,
                        .warn = options.warn});
  const WorkerWelcome model = {.model = model_identity(store),
                               .n_layers = config.n_layers,
                               .n_active = config.router.n_active,
                               .dim = static_cast<int32_t>(config.dim),
                               .experts = asked.experts,
                               .on_gpu = {},
                               .arithmetic = {}};
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(workers.patience);
  for (const ListedWorker& worker : asked.list->workers()) {
    auto link = std::make_unique<WorkerLink>(*asked.transport,
                                             WorkerLinkOptions{.address = worker.address,
                                                               .secret = secret,
                                                               .path = path,
                                                               .deadline = workers.deadline,
                                                               .note = options.note});
    const std::optional<WorkerWelcome> welcome = welcome_of(*link, worker.is_of_several, until);
    if (!welcome) {
      options.warn(
          fmt::format("the worker {} does not answer: it may join later", link->address()));
      continue;
    }
    require(has_model(*welcome, model),
            "the worker {} has another model than {}: start both with copies of one checkpoint",
            link->address(), store.directory());
    add_layers(welcome->experts, asked.experts);
    asked.welcomes.push_back(*welcome);
    asked.links.push_back(std::move(link));
  }
  require_run(!asked.links.empty(), "none of the workers answers: start them");
  require(has_any(asked.experts),
          "all workers are standbys, which only take over the experts of other workers: name those "
          "too, or leave --workers out");
  require_same_bits(asked);
  const std::string why_no_mtp = asked.why_no_mtp(config.n_all_layers());
  require(why_no_mtp.empty(), "--draft mtp: {}, or use --draft lookup", why_no_mtp);
  return asked;
}

bool every_rank_has_links(const ModelOptions& options) {
  return options.ranks.group && options.workers.any() && options.n_replicas > 1;
}

void require_workers_of_ranks(const ModelOptions& options) {
  const int n = options.ranks.group ? options.ranks.group->size() : 0;
  require(options.n_stages <= 1,
          "--workers and --pp {}: pipeline stages have no workers: leave one of them out",
          options.n_stages);
  require(options.n_replicas > 1 || n == 0 || options.tp == 0 || options.tp == n,
          "--workers: ranks use workers where all {} divide one backbone, or with --dp {} where "
          "each has a replica: leave --workers, or --tp {}, out",
          n, n, options.tp);
  require(options.n_replicas <= 1 || n == 0 || (options.n_replicas == n && options.tp <= 1),
          "--workers and --dp {}: each of the {} ranks has a replica of the backbone and links to "
          "the workers: ask for --dp {} without --tp, or leave --workers or --dp out",
          options.n_replicas, n, n);
  require(
      options.placement.empty(),
      "--workers and --placement {}: several ranks do not use the workers of a placement: leave "
      "one of them out",
      options.placement);
  require(options.dispatch == ExpertDispatch::kAuto ||
              (options.dispatch == ExpertDispatch::kAllReduce && options.n_replicas <= 1),
          "--ep-dispatch {}: ranks with workers exchange no rows: leave it or --workers out",
          name_of(options.dispatch));
  require(!options.moves_experts || options.n_replicas <= 1,
          "--rebalance, --workers and --dp {}: experts move between the workers of one backbone: "
          "leave one of them out",
          options.n_replicas);
  require(options.rows != ExpertRows::kFp8,
          "--ep-rows fp8: ranks with workers exchange no rows: leave it or --workers out");
}

AskedWorkers ask_workers_of_ranks(Group& group, const ModelOptions& options,
                                  const WeightStore& store, const ModelConfig& config) {
  AskedWorkers asked;
  const bool all_ask = every_rank_has_links(options);
  run_on_all(group, [&] {
    if (group.rank() == 0 || all_ask) asked = ask_workers(options, store, config);
  });
  if (all_ask)  // sums are added by workers, in their order
    require_same_on_all(group, "list of workers", [&] { return text_of(asked); });
  std::string flags;  // '1' for each expert of each layer that a worker has
  for (const std::vector<bool>& of_layer : asked.experts)
    for (const bool is_there : of_layer) flags += is_there ? '1' : '0';
  flags = text_of_first(group, flags);
  const size_t n_experts = config.router.n_experts;
  asked.experts.assign(config.n_layers + config.n_mtp_layers, std::vector<bool>(n_experts));
  check(flags.size() == asked.experts.size() * n_experts, "what the first rank has sent");
  for (size_t i = 0; i < flags.size(); ++i)
    asked.experts[i / n_experts][i % n_experts] = flags[i] == '1';
  return asked;
}

std::vector<std::vector<bool>> AskedWorkers::experts_of_layers(const ModelConfig& config) const {
  std::vector<std::vector<bool>> of_layers(config.n_all_layers());
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    if (config.is_moe(layer)) of_layers[layer] = experts[layer];
  return of_layers;
}

std::string AskedWorkers::why_no_mtp(int n_layers) const {
  for (size_t w = 0; w < welcomes.size(); ++w)
    if (welcomes[w].n_layers < n_layers)
      return fmt::format(
          "the worker {} has no experts of the layer for multi-token prediction: start it "
          "with --draft mtp",
          links[w]->address());
  return {};
}

std::unique_ptr<WorkerExperts> worker_experts(const WorkerExpertsOf& of, AskedWorkers& asked) {
  const std::vector<std::unique_ptr<WorkerLink>>& links = asked.links;
  for (size_t w = 0; w < links.size(); ++w)
    require(
        asked.welcomes[w].max_rows >= of.max_tokens,
        "a step has up to {} tokens, and the worker {} takes {} rows: start it with --chunk {}, "
        "or this program with a smaller step",
        of.max_tokens, links[w]->address(), asked.welcomes[w].max_rows, of.max_tokens);
  require_useful_standbys(asked, of.config.n_all_layers(), of.max_tokens);
  std::vector<std::string> addresses, standbys;
  for (size_t w = 0; w < links.size(); ++w) {
    addresses.push_back(links[w]->address());
    if (asked.welcomes[w].is_standby) standbys.push_back(links[w]->address());
  }
  const auto longest = of.options.ranks.group ? longest_wait(of.options.workers)
                                              : std::chrono::duration<double>::max();
  auto pool =
      std::make_unique<WorkerExperts>(WorkerExpertsParts{.welcomes = asked.welcomes,
                                                         .transport = *asked.transport,
                                                         .kernels = of.kernels,
                                                         .config = of.config,
                                                         .local = of.local,
                                                         .team = of.team,
                                                         .max_tokens = of.max_tokens,
                                                         .patience = of.options.workers.patience,
                                                         .longest_wait = longest,
                                                         .micro_batches = of.micro_batches,
                                                         .warn = of.options.warn},
                                      std::move(asked.links));
  for (const Shard& shard : pool->shards()) {
    std::string owners;
    for (const int worker : shard.owners) {
      const std::vector<bool>& on_gpu = asked.welcomes[worker].on_gpu;
      const std::vector<int> experts = in_any_layer(shard);
      const auto n = std::count_if(experts.begin(), experts.end(),
                                   [&](int e) { return !on_gpu.empty() && on_gpu[e]; });
      owners += (owners.empty() ? "" : " or ") + addresses[worker];
      if (n > 0) owners += n == std::ssize(experts) ? " (GPU)" : " (GPU and CPU)";
    }
    of.options.note(fmt::format("experts {}: {}", text_of_shard(shard),
                                !owners.empty()                    ? owners
                                : every_rank_has_links(of.options) ? "each of the replicas"
                                : of.options.ranks.group           ? "the ranks"
                                                                   : "this process"));
  }
  for (const std::string& standby : standbys)
    of.options.note(fmt::format("standby {}: loads experts whose workers are lost", standby));
  if (!pool->await_workers())
    of.options.warn("not all workers take requests yet: answers wait for them");
  return pool;
}

std::unique_ptr<ExpertMover> worker_mover(const ModelOptions& options, WorkerExperts& pool,
                                          std::vector<std::vector<bool>> on_gpu) {
  const WorkerHomes homes = pool.homes();
  const auto n = std::count_if(homes.workers.begin(), homes.workers.end(),
                               [](const auto& worker) { return worker.welcome.moves_experts; });
  require(n >= 2,
          "--rebalance: experts move between two or more workers that are started with "
          "--experts-move, and of these {} {} so: start them again, or leave --rebalance out",
          homes.workers.size(), n == 1 ? "1 is" : fmt::format("{} are", n));
  for (size_t w = 0; w < homes.workers.size(); ++w)
    if (const auto& [address, welcome, moves] = homes.workers[w];
        homes.homes.fixed[w + 1] && (moves || !welcome.moves_experts) && !welcome.is_standby)
      options.note(fmt::format("worker {} keeps its experts: {}", address,
                               moves ? "it computes other sums than the others"
                                     : "it was started without --experts-move"));
  const Group* const group = options.ranks.group;
  return std::make_unique<WorkerExpertMover>(
      pool, WorkerExpertMover::Backbone{.on_gpu = std::move(on_gpu),
                                        .is_whole = !group || group->size() == 1});
}

std::unique_ptr<WorkerList> watch_workers(AskedWorkers& asked, WorkerExperts& pool) {
  const bool has_standbys =
      std::any_of(asked.welcomes.begin(), asked.welcomes.end(),
                  [](const WorkerWelcome& welcome) { return welcome.is_standby; });
  asked.list->watch({.update = [&pool](const auto& listed) { pool.update_workers(listed); },
                     .is_up = [&pool](const std::string& address) { return pool.is_up(address); },
                     .has_standbys = has_standbys});
  return std::move(asked.list);
}

}  // namespace tandem
