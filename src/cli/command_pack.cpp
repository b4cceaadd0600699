// tandem pack: writes the packed cache ahead of time.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/console.h"
#include "cli/options.h"

namespace tandem {

int pack_command(const Options& options) {
  ModelOptions model_options = options.model;
  model_options.context = 1;  // nothing is computed
  model_options.cache_use = CacheUse::kRequire;
  const LoadedModel loaded(model_options, load_progress(options.quiet || options.json));
  const LoadReport& load = loaded.load_report();
  if (options.json) {
    const nlohmann::ordered_json report = {{"cache", load.cache},
                                           {"packed_bytes", loaded.packed_bytes()},
                                           {"written", !load.from_cache},
                                           {"load_seconds", load.seconds},
                                           {"write_seconds", load.write_seconds},
                                           {"isa", loaded.isa()}};
    std::puts(report.dump().c_str());
  } else if (!options.quiet) {
    fmt::print("{} ({:.1f} MB) {}\n", load.cache, static_cast<double>(loaded.packed_bytes()) * 1e-6,
               load.from_cache ? "was there already and is sound"
                               : fmt::format("written in {:.2f} s", load.write_seconds));
  }
  return 0;
}

}  // namespace tandem
