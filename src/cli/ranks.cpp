#include "cli/ranks.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "comm/agreement.h"
#include "comm/hosts.h"
#include "comm/mpi/mpi_world.h"
#include "core/progress_watch.h"
#include "core/topology.h"
#include "loader/loaded_model.h"
#include "offload/parts/executed_parts.h"
#include "offload/plan/placement_json.h"
#include "offload/ranks/rank_timelines.h"

namespace tandem {
namespace {

// MPI itself waits without end for a rank that does not begin.
std::unique_ptr<Group> open_world(const Launch& launch) {
  constexpr std::chrono::seconds kMostSeconds(25);
  const ProgressWatch watch(
      [] {
        return WorkProgress{true, 0};
      },
      kMostSeconds,
      [&] {
        std::fprintf(
            stderr,
            "error: rank %d has waited %d s for MPI to begin: another of the %d ranks has not "
            "started, or does not answer\n",
            launch.rank, static_cast<int>(kMostSeconds.count()), launch.size);
        end_rank(1);
      });
  return open_mpi_world(launch);
}

std::string text_of(int argc, char** argv) {
  std::string text = "version " TANDEM_VERSION;
  for (int i = 1; i < argc; ++i) text += std::string(" ") + argv[i];
  return text;
}

}  // namespace

AskedRanks asked_ranks(std::optional<int> option, const ModelOptions& model, bool launched) {
  if (option) return {*option, fmt::format("--ranks {}", *option)};
  if (launched) return {};
  int n = 1;
  std::string by;
  const std::pair<const char*, int> numbers[] = {
      {"--dp", model.n_replicas}, {"--tp", model.tp}, {"--pp", model.n_stages}};
  for (const auto& [name, number] : numbers) {
    if (number == 0) continue;
    n *= number;
    by += fmt::format("{}{} {}", by.empty() ? "" : " ", name, number);
  }
  if (!by.empty()) return {n, by};
  if (model.placement.empty()) return {};
  try {
    const int n_placed = n_ranks_of(placement_from_file(model.placement));
    if (n_placed > 1) return {n_placed, fmt::format("--placement {}", model.placement)};
  } catch (const Error&) {
  }
  return {};
}

CommandRanks::CommandRanks()
    : launch_(launch_of([](const char* name) { return std::getenv(name); })) {}

std::optional<RanksOfHost> CommandRanks::to_start(const AskedRanks& asked, int argc,
                                                  char** argv) const {
  if (asked.n == 0) return {};
  require(!launch_ || launch_->size == asked.n,
          "{}: the MPI launcher started {}: start {}, or leave one of the numbers out", asked.by,
          launch_ ? launch_->size : 0, asked.n);
  if (launch_ || asked.n == 1) return {};
  const int n_cores = this_topology().n_cores();
  require(asked.n <= n_cores,
          "{}: this machine has {} cores for {} ranks, each of which needs one: ask for at most {}",
          asked.by, n_cores, asked.n, n_cores);
  const char* const path = std::getenv("PATH");
  RanksOfHost ranks{.launcher = find_launcher(path ? path : ""), .n = asked.n, .command = {}};
  require(
      !ranks.launcher.empty(),
      "{}: neither mpirun nor mpiexec is in PATH: install Open MPI (apt install openmpi-bin) or "
      "MPICH (apt install mpich)",
      asked.by);
  ranks.command.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  ranks.command.insert(ranks.command.end(), argv + 1, argv + argc);
  return ranks;
}

Ranks CommandRanks::open(int argc, char** argv) {
  if (alone()) return {};
  announce_rank(launch_->rank);
  world_ = open_world(*launch_);
  Group& world = *world_;
  require_same_on_all(world, "command line", [&] { return text_of(argc, argv); });
  const PlaceOnHost on_host = place_on_host(world);
  world.set_patience(kLoadPatience);  // rank 0 may read its input before it loads
  if (world.rank() > 0)
    require(std::freopen("/dev/null", "w", stdout), "/dev/null cannot be opened");
  // The process may leave at once: nothing is computed then, or what is computed is lost.
  const auto on_lost = [](const GroupError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    end_rank(1);
  };
  heartbeat_ = std::make_unique<Heartbeat>(world, on_lost);
  steps_ = std::make_unique<StepChannel>(world, on_lost, std::chrono::seconds(3), [this] {
    if (!heartbeat_->goes_on_in_steps()) heartbeat_->end();
  });
  return {
      .group = &world, .steps = steps_.get(), .on_host = on_host, .heartbeat = heartbeat_.get()};
}

int CommandRanks::run_alike(const std::function<int()>& command) {
  if (!world_) return command();
  heartbeat_->end();  // it would disturb what is measured
  int status = 0;
  run_on_all(*world_, [&] { status = command(); });
  return status;
}

int CommandRanks::run(const std::function<int()>& command) {
  if (!world_) return command();
  int status = 0;
  run_on_all(*world_, [&] {
    try {
      status = command();
    } catch (const GroupError&) {
      throw;
    } catch (const std::exception&) {
      if (steps_->leads() && steps_->has_started()) steps_->end();
      throw;
    }
    if (steps_->leads()) steps_->end();
  });
  heartbeat_->end();
  return status;
}

int follow(const std::vector<ModelOptions>& models) {
  std::vector<std::unique_ptr<LoadedModel>> loaded;
  for (const ModelOptions& options : models)
    loaded.push_back(std::make_unique<LoadedModel>(options));
  // Launchers pass signals on to all ranks. Rank 0 decides what they mean.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  const Ranks& ranks = models.front().ranks;
  ranks.steps->follow();
  for (size_t i = 0; i < models.size(); ++i)
    if (models[i].record_timeline) rank_timelines_json(*ranks.group, loaded[i]->timeline());
  return 0;
}

}  // namespace tandem
