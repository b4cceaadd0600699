// Whole models as a user loads them, for tests that compare devices: paths, tiny-r1's answers, and
// comparisons of logits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/conversation.h"

namespace tandem::test {

// A bundle has the data in another folder.
inline const std::string kRoot =
    std::getenv("TANDEM_TEST_ROOT") ? std::getenv("TANDEM_TEST_ROOT") : TANDEM_SOURCE_DIR;
inline const std::string kGolden = kRoot + "/tests/golden/";

inline ModelOptions tiny_r1(DeviceChoice device) {
  return {.directory = kRoot + "/models/tiny-r1",
          .device = device,
          .n_threads = 1,
          .context = 256,
          .max_logits = 3};
}

// Greedy answers to several questions, max_logits at a time, so that sequences start and end.
inline std::vector<std::vector<int32_t>> answers(const ModelOptions& options, int n_questions) {
  LoadedModel loaded(options);
  const Tokenizer tokenizer = Tokenizer::from_directory(options.directory);
  const ChatFormat format(options.directory, tokenizer);
  std::vector<Request> requests;
  for (int i = 0; i < n_questions; ++i) {
    GenerateOptions generate;
    generate.max_new_tokens = 20 - 5 * (i % 3);
    generate.sampling.temperature = 0;
    const std::string question = fmt::format("What is {} + {}?", 17 * i + 3, 401 - 9 * i);
    requests.push_back(
        make_request(generate, tokenizer, format.prompt(first_messages("", question))));
  }
  Engine engine = engine_for(loaded, tokenizer);
  std::vector<std::vector<int32_t>> tokens;
  for (const Completion& c : complete(engine, requests)) tokens.push_back(c.tokens);
  return tokens;
}

// NaN if any of the numbers is NaN.
inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i)
    most = std::max<double>(std::abs(a[i] - b[i]), most) + 0 * (a[i] - b[i]);
  return most;
}

inline int32_t greedy(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace tandem::test
