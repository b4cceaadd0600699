#include "cli/ranks.h"

#include <cstdio>
#include <cstdlib>

#include "cli/console.h"
#include "comm/agreement.h"
#include "comm/mpi_world.h"

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
  run_on_all(world, [&] { require_same(world, "command line", text_of(argc, argv)); });
  if (world.rank() > 0)
    require(std::freopen("/dev/null", "w", stdout), "/dev/null cannot be opened");
  Ranks ranks{&world};
  if (launch_->local_size > 0) {
    ranks.of_host = launch_->local_rank;
    ranks.n_of_host = launch_->local_size;
  }
  return ranks;
}

std::string read_on_ranks(const Ranks& ranks, const std::string& path) {
  if (!ranks.group || path != "-") return read_text(path);
  std::string text;
  run_on_all(*ranks.group, [&] {
    if (ranks.group->rank() == 0) text = read_text(path);
  });
  return text_of_first(*ranks.group, std::move(text));
}

}  // namespace tandem
