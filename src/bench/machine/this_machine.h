// The description of this machine as measured by `tandem bench machine`, in a file per host.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/machine.h"

namespace tandem {

struct Measuring {
  int n_threads = 0;         // 0: one per core
  double seconds = 0.3;      // per loop
  int64_t memory_bytes = 0;  // to read from; 0: MachineSpeed::enough_bytes()
  // File or model directory to read; empty: a temporary file in the cache directory.
  std::string disk = {};
};
// The report for save_this_machine(). Must be called before any team exists.
nlohmann::ordered_json measure_this_machine(const Measuring& how);

// A file in the cache directory, named after the host; empty if there is no cache directory.
std::string this_machine_path();

// Adds measured_at, and the previous measurement's efficiency if the report has none, and writes
// the report. Returns false if it cannot be written.
bool save_this_machine(nlohmann::ordered_json& report);

// The last measurement; empty if there is none that this version can read.
std::optional<Machine> saved_this_machine();

// "3 hours ago"
std::string age_in_words(int64_t seconds);

}  // namespace tandem
