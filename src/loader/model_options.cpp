#include "loader/model_options.h"

#include <cstdlib>

#include "core/check.h"

namespace tandem {

const char* name_of(DeviceChoice device) {
  const char* names[] = {"auto", "cpu", "cuda"};
  return names[static_cast<int>(device)];
}

const char* name_of(DenseProducts products) {
  const char* names[] = {"tandem", "onednn", "fastest"};
  return names[static_cast<int>(products)];
}

const char* name_of(ExpertDispatch dispatch) {
  const char* names[] = {"auto", "all-reduce", "gather", "all-to-all", "low-latency"};
  return names[static_cast<int>(dispatch)];
}

const char* name_of(DraftChoice draft) {
  const char* names[] = {"off", "auto", "mtp", "lookup"};
  return names[static_cast<int>(draft)];
}

cpu::Isa default_isa() {
  const char* variable = std::getenv("TANDEM_ISA");
  const std::string name = variable ? variable : "";
  return name.empty() || name == "auto" ? cpu::best_isa() : isa_called(name);
}

cpu::Isa isa_called(const std::string& name) {
  const cpu::Isa best = cpu::best_isa();
  std::string known, here;
  for (int i = 0; i < cpu::kNumIsas; ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    known += std::string(", ") + cpu::name_of(isa);
    if (isa <= best) here += std::string(here.empty() ? "" : ", ") + cpu::name_of(isa);
    if (name != cpu::name_of(isa)) continue;
    require(isa <= best, "instruction set {}: this machine lacks it; it has {}", name, here);
    return isa;
  }
  fail("unknown instruction set {}: choose one of auto{}", name, known);
}

}  // namespace tandem
