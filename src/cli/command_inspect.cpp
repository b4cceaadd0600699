// tandem inspect: describes a checkpoint without reading its weights.
#include <cstdio>

#include "cli/inspect.h"
#include "cli/options.h"

namespace tandem {

int inspect_command(const Options& options) {
  const ModelConfig config = ModelConfig::from_directory(options.model.directory);
  const WeightStore store(options.model.directory);
  const nlohmann::ordered_json report = inspect_report(config, store, options.list_tensors);
  const std::string text = options.json ? report.dump(2) + "\n" : inspect_text(report);
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace tandem
