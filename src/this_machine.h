// The machine the program runs on as `tandem bench machine` measured it, kept in a file a host.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/machine.h"

namespace tandem {

struct Measuring {
  int n_threads = 0;         // 0: one a core
  double seconds = 0.3;      // a loop
  int64_t memory_bytes = 0;  // to read from; 0: enough
  std::string disk = {};  // file or model directory to read; empty: a file in the cache directory
};
// What save_this_machine() keeps. No team may exist.
nlohmann::ordered_json measure_this_machine(const Measuring& how);

// In the cache directory, named after the host; empty when there is no such directory.
std::string this_machine_path();

// Adds measured_at, and the last measurement's efficiency where this one brings none, and writes
// the report. A place that cannot be written is no error: false.
bool save_this_machine(nlohmann::ordered_json& report);

// The last measurement; nothing when there is none or another version wrote it.
std::optional<Machine> saved_this_machine();

// "3 hours ago"
std::string age_in_words(int64_t seconds);

}  // namespace tandem
