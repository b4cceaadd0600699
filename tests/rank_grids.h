// Models on the ranks of a grid, as threads.
#pragma once
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/local_ranks.h"
#include "loader/loaded_model.h"
#include "tests/whole_models.h"

namespace tandem::test {

struct RankGrid {
  int dp, tp;
  ExpertDispatch dispatch = ExpertDispatch::kAuto;
  int pp = 1;
  int micro_batches = 0;
  std::vector<int> hosts = {};  // ModelOptions::simulated_hosts
  std::string name() const {
    return fmt::format("dp {}, tp {}, pp {}, {}, micro-batches {}, hosts {}", dp, tp, pp,
                       name_of(dispatch), micro_batches, fmt::join(hosts, ","));
  }
};

// Runs `lead` on rank 0 with the model on the grid's ranks, which follow its steps. `prepare` is
// called on every rank before.
inline void on_grid(const RankGrid& grid, ModelOptions options,
                    const std::function<void(LoadedModel&)>& lead,
                    const std::function<void(LoadedModel&, int rank)>& prepare = {}) {
  options.n_replicas = grid.dp;
  options.tp = grid.tp;
  options.n_stages = grid.pp;
  options.dispatch = grid.dispatch;
  options.micro_batches = grid.micro_batches;
  options.simulated_hosts = grid.hosts;
  run_local_ranks({grid.dp * grid.tp * grid.pp}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    if (prepare) prepare(loaded, group.rank());
    if (!steps.leads()) return steps.follow();
    lead(loaded);
    steps.end();
  });
}

}  // namespace tandem::test
