// tandem bench: measures this machine and the engine's kernels on it.
#include <cstdio>

#include "bench/machine_bench.h"
#include "options.h"

namespace tandem {
namespace {

void require_sane(const BenchOptions& b) {
  require(b.seconds > 0 && b.seconds <= 3600, "--seconds {}: must be above 0 and at most 3600",
          b.seconds);
}

}  // namespace

int bench_machine_command(const Options& options) {
  require_sane(options.bench);
  Team team(options.model.n_threads);
  MachineSpeed speed(team, MachineSpeed::enough_bytes(team));
  const nlohmann::ordered_json report = machine_report(speed, options.bench.seconds);
  const std::string text = options.json ? report.dump() + "\n" : machine_text(report);
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace tandem
