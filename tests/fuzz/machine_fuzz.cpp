// Arbitrary bytes as a machine's description give an Error or a machine that is unchanged by
// writing and reading.
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/check.h"
#include "io/machine_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  Machine m;
  try {
    m = machine_from_json({reinterpret_cast<const char*>(data), size}, "machine.json");
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
    return 0;
  }
  check(m.cores() > 0 && m.memory_bytes() > 0 && m.hosts > 0, "sizes");
  check(std::isfinite(m.read_bytes_per_second()) && m.read_bytes_per_second() > 0, "bandwidth");
  for (const Gpu& gpu : m.gpus) check(gpu.memory_bytes > 0 && gpu.peak.bf16 > 0, "GPU");
  for (int kind = 0, hosts = 0; kind < m.n_kinds(); hosts += m.of_kind(kind++).hosts) {
    check(m.kind_of(hosts) == kind && m.first_host_of(kind) == hosts, "hosts of a kind");
    check(m.n_hosts() == 1 || m.link(0, m.n_hosts() - 1).bytes_per_second > 0, "a network");
  }
  machine_to_json(m);
  return 0;
}
