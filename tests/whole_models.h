// Whole models as a user loads them, for tests that compare devices: paths, tiny-r1's answers, and
// comparisons of logits.
#pragma once
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "loader/loaded_model.h"
#include "scheduling/request.h"
#include "tests/repository.h"

namespace tandem::test {

inline ModelOptions tiny_r1(DeviceChoice device) {
  return {.directory = kTinyR1, .device = device, .n_threads = 1, .context = 256, .max_logits = 3};
}

// Requests of up to 12 tokens for the answers to n questions, which `sample` may change. Greedy
// without it.
using SetSampling = std::function<void(int question, SamplingParams& sampling)>;
std::vector<Request> questions(const std::string& directory, const Tokenizer& tokenizer, int n,
                               const SetSampling& sample = {});

// Greedy answers to several questions, max_logits at a time, so that sequences start and end.
std::vector<std::vector<int32_t>> answers(const ModelOptions& options, int n_questions);

// Whether this run is of `make test-long`.
inline bool is_long() { return std::getenv("TANDEM_LONG_TEST") != nullptr; }

// Options of a rank that has one thread and shares its host with all others. Without `steps` all
// ranks make the same calls.
ModelOptions on_rank(ModelOptions options, Group& group, StepChannel* steps = nullptr);

// Logits after each of `tokens`.
using Logits = std::vector<std::vector<float>>;
Logits logits_after(LoadedModel& loaded, const std::vector<int32_t>& tokens);

// Fails the test where a number is further from `want` than `share` of the row's largest.
void expect_close_logits(const Logits& got, const Logits& want, double share);

// The median of the rows' relative errors, sqrt(sum of squared differences / sum of squares of
// `want`): a row whose token is computed by other experts does not count.
double relative_error(const std::vector<float>& got, const std::vector<float>& want, int64_t cols);
// Bounds of it for the logits of golden models whose rows travel as FP8 and sums as BF16. E4M3
// rounds a number by up to 2^-4 of itself, about 2.6 % in the mean square; what that does to logits
// after all layers is measured, 0.9 to 2.8 %, and the bound is twice the most.
constexpr double kMostErrorOfFp8Rows = 0.06;
constexpr double kLeastErrorOfFp8Rows = 1e-3;

// NaN if any of the numbers is NaN.
double largest_difference(const std::vector<float>& a, const std::vector<float>& b);

int32_t greedy(const std::vector<float>& logits);

}  // namespace tandem::test
