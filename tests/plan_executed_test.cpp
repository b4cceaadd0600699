// Plans for the machines of machines/ run as they are written, but for those that are listed here
// with the reason.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "offload/parts/executed_parts.h"
#include "offload/parts/placed_workers.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

std::vector<std::string> all_machines() {
  std::vector<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(TANDEM_SOURCE_DIR "/machines"))
    names.push_back(file.path().stem());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(PlansOfKnownMachines, AreExecuted) {
  const std::map<std::string, std::string> refused = {
      {"desktop-192gb, 1 sequences", "r1 does not fit"},
      {"desktop-192gb, 64 sequences", "r1 does not fit"},
      {"desktop-192gb, 0 sequences", "r1 does not fit"}};
  for (const std::string& name : all_machines())
    for (const int concurrency : {1, 64, 0}) {
      Workload w;
      w.concurrency = concurrency;
      if (concurrency != 1) w.objective = Objective::kThroughput;
      const Planned planned("r1", known_machine(name), w);
      const std::string subject = fmt::format("{}, {} sequences", name, concurrency);
      SCOPED_TRACE(subject);
      std::optional<PlannedPlacement> plan;
      const std::string no_room = error_of([&] { plan = plan_placement(planned.request); });
      const std::string why =
          plan ? why_not_executed(planned.config, planned.machine, plan->placement) : no_room;
      const auto at = refused.find(subject);
      if (at == refused.end())
        EXPECT_EQ(why, "");
      else
        EXPECT_TRUE(says(why, at->second));
    }
}

}  // namespace
}  // namespace tandem
