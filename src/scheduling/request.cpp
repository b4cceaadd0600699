#include "scheduling/request.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {

void require_runnable(const EngineRequest& asked, int n_tokens, int64_t context,
                      const Vocabulary& vocabulary) {
  const Request& request = asked.request;
  const auto n = static_cast<int64_t>(request.prompt.size());
  const int least = asked.first_scored ? 0 : 1;
  require(n > 0, "the prompt is empty: give at least one token");
  require(request.max_new_tokens >= least, "{} new tokens asked for: must be {} or more",
          request.max_new_tokens, least);
  const int64_t needed = n + std::min(request.max_new_tokens, 1);
  require(needed <= context,
          "the prompt has {} tokens and the context {}: shorten it or raise --ctx above {}", n,
          context, needed - 1);
  for (const int32_t token : request.prompt)
    require(token >= 0 && token < n_tokens, "token {} is not in the model's vocabulary of {}",
            token, n_tokens);
  validate(request.sampling, vocabulary);
}

}  // namespace tandem
