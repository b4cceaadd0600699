#include "tests/whole_models.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/conversation.h"
#include "cli/options.h"
#include "tests/check_close.h"
#include "tests/plain_engine.h"
#include "text/chat_format.h"

namespace tandem::test {

std::vector<Request> questions(const std::string& directory, const Tokenizer& tokenizer, int n,
                               const SetSampling& sample) {
  const ChatFormat format(directory, tokenizer);
  std::vector<Request> requests;
  for (int i = 0; i < n; ++i) {
    GenerateOptions generate;
    generate.max_new_tokens = 12 - 3 * (i % 3);
    generate.sampling.temperature = 0;
    if (sample) sample(i, generate.sampling);
    const std::string question = fmt::format("What is {} + {}?", 17 * i + 3, 401 - 9 * i);
    requests.push_back(
        make_request(generate, tokenizer, format.prompt(first_messages("", question))));
  }
  return requests;
}

std::vector<std::vector<int32_t>> answers(const ModelOptions& options, int n_questions) {
  LoadedModel loaded(options);
  const Tokenizer tokenizer = Tokenizer::from_directory(options.directory);
  Engine engine = engine_for(loaded, tokenizer);
  std::vector<std::vector<int32_t>> tokens;
  for (const Completion& c : complete(engine, questions(options.directory, tokenizer, n_questions)))
    tokens.push_back(c.tokens);
  return tokens;
}

ModelOptions on_rank(ModelOptions options, Group& group, StepChannel* steps) {
  options.n_threads = 1;
  const int rank = group.rank(), n = group.size();
  options.ranks = {&group, steps, {rank, n, rank, n}};
  return options;
}

Logits logits_after(LoadedModel& loaded, const std::vector<int32_t>& tokens) {
  Logits rows;
  score(loaded.model(), loaded.cache(), tokens, 0,
        [&](int64_t, std::span<const float> row) { rows.emplace_back(row.begin(), row.end()); });
  return rows;
}

void expect_close_logits(const Logits& got, const Logits& want, double share) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "position " << i);
    expect_close(got[i], want[i], share * largest(want[i]));
  }
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want, int64_t cols) {
  EXPECT_EQ(got.size(), want.size());
  std::vector<double> errors;
  for (size_t row = 0; row < want.size(); row += cols) {
    double of_differences = 0, of_all = 0;
    for (size_t i = row; i < row + cols; ++i) {
      of_differences += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
      of_all += double{want[i]} * want[i];
    }
    errors.push_back(std::sqrt(of_differences / of_all));
  }
  std::sort(errors.begin(), errors.end());
  return errors[errors.size() / 2];
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i)
    most = std::max<double>(std::abs(a[i] - b[i]), most) + 0 * (a[i] - b[i]);
  return most;
}

int32_t greedy(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace tandem::test
