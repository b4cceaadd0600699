#include "cli/ranks.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "comm/agreement.h"
#include "comm/mpi_world.h"
#include "loader/loaded_model.h"

namespace tandem {
namespace {

std::string text_of(int argc, char** argv) {
  std::string text = "version " TANDEM_VERSION;
  for (int i = 1; i < argc; ++i) text += std::string(" ") + argv[i];
  return text;
}

}  // namespace

CommandRanks::CommandRanks()
    : launch_(launch_of([](const char* name) { return std::getenv(name); })) {}

Ranks CommandRanks::open(int argc, char** argv) {
  if (alone()) return {};
  world_ = open_mpi_world(*launch_);
  Group& world = *world_;
  require_same_on_all(world, "command line", [&] { return text_of(argc, argv); });
  world.set_patience(kLoadPatience);  // rank 0 may read its input before it loads
  if (world.rank() > 0)
    require(std::freopen("/dev/null", "w", stdout), "/dev/null cannot be opened");
  // Nothing is computed then, so the process may leave at once.
  steps_ = std::make_unique<StepChannel>(world, [](const GroupError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    std::_Exit(1);
  });
  Ranks ranks{.group = &world, .steps = steps_.get()};
  if (launch_->local_size > 0) {
    ranks.of_host = launch_->local_rank;
    ranks.n_of_host = launch_->local_size;
  }
  return ranks;
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
  return status;
}

int follow(const std::vector<ModelOptions>& models) {
  std::vector<std::unique_ptr<LoadedModel>> loaded;
  for (const ModelOptions& options : models)
    loaded.push_back(std::make_unique<LoadedModel>(options));
  // Launchers pass signals on to all ranks. Rank 0 decides what they mean.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  models.front().ranks.steps->follow();
  return 0;
}

}  // namespace tandem
