// From tandem_request to the engine's types.
#pragma once
#include <cstdint>
#include <vector>

#include "include/tandem.h"
#include "scheduling/answer_stream.h"
#include "scheduling/request.h"
#include "text/chat_format.h"

namespace tandem {

// Token ids of the request's prompt. `chat` is null for a model without a chat template. Throws
// Error unless there is exactly one prompt, and for text that cannot be a prompt.
std::vector<int32_t> prompt_of(const tandem_request& request, const Tokenizer& tokenizer,
                               const ChatFormat* chat);

// The request with this prompt. The engine checks its parameters.
Request request_of(const tandem_request& request, std::vector<int32_t> prompt,
                   const Tokenizer& tokenizer, int64_t context);

// How its answer becomes text, without on_part.
AnswerStream::Options text_options(const tandem_request& request);

}  // namespace tandem
