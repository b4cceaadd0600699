#include "engine/request.h"

#include "core/check.h"

namespace tandem {

void require_runnable(const Request& request, int n_tokens, int64_t context,
                      const Vocabulary& vocabulary, int least_new_tokens) {
  const auto n = static_cast<int64_t>(request.prompt.size());
  require(n > 0, "the prompt is empty: give at least one token");
  require(n < context,
          "the prompt has {} tokens and the context {}: shorten it or raise --ctx above {}", n,
          context, n);
  require(request.max_new_tokens >= least_new_tokens, "{} new tokens asked for: must be {} or more",
          request.max_new_tokens, least_new_tokens);
  for (const int32_t token : request.prompt)
    require(token >= 0 && token < n_tokens, "token {} is not in the model's vocabulary of {}",
            token, n_tokens);
  validate(request.sampling, vocabulary);
}

}  // namespace tandem
