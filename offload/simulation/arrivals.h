// Simulates servers that answer requests which arrive at random (Poisson), step by step, with the
// rules of the scheduler (docs/serving.md), of prefill and decode servers (docs/prefill_decode.md)
// and of the router (docs/routing.md). offload/servers/server_speed.h predicts the same in closed
// form. Pure.
#pragma once
#include <cstdint>
#include <vector>

#include "offload/servers/server_speed.h"

namespace tandem {

// Seconds from the start, ascending.
std::vector<double> poisson_arrivals(double requests_per_second, int n, uint64_t seed);

struct SimulatedAnswers {
  std::vector<double> first_token_seconds;  // of each request, from its arrival; in their order
  std::vector<double> gaps;                 // between two tokens of any answer, ascending
  double seconds = 0;                       // until the last token
  // The rate of answers, from the arrival of the first tenth of the requests to that of the last.
  double tokens_per_second = 0;
};
// Every request is of the system's prompt and answer. Throws Error if there are none, or more
// tokens than can be simulated.
SimulatedAnswers simulate_arrivals(const ServerSystem& system, const std::vector<double>& arrivals);

// The value that `part` of sorted values do not exceed; 0 without values.
double percentile(const std::vector<double>& sorted, double part);

// What simulated requests experience at the rate of a prediction, in its terms.
ServerSpeed simulated_speed(const ServerSystem& system, const ServerSpeed& predicted,
                            uint64_t seed);

}  // namespace tandem
