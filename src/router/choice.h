// Which backend gets a request. A pure function of what is known about them.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

namespace tandem {

struct Candidate {
  std::optional<double> answer_seconds = {};  // Speed::expected_seconds(); empty: not measured
  int64_t n_running = 0;                      // requests
  int64_t known_bytes = 0;                    // of the prompt, that its prefix cache has
  int64_t last_chosen = 0;                    // larger: later
};

// Seconds of an answer where no backend has been measured.
constexpr double kUnknownSeconds = 0.1;

// The index of the candidate with the least
//
//     answer_seconds * (1 + n_running) - known_bytes * seconds_per_byte
//
// where the first term is the expected latency and the second what the cached beginning of the
// prompt saves. So a request goes to the backend that has its beginning, unless another one is
// faster by more than computing that beginning again costs. A backend that was not measured counts
// like the fastest of the others. Among equals the one that was chosen longest ago is taken.
// `candidates` is not empty.
size_t best_candidate(std::span<const Candidate> candidates, double seconds_per_byte);

}  // namespace tandem
