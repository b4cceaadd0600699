// The messages of a chat request, read as OpenAI's description has them.
#pragma once
#include <nlohmann/json.hpp>

#include "server/request_fields.h"

namespace tandem {

// Field "messages", as chat templates read it: a content is a text, a list of {"type": "text",
// "text": ..}, or null beside tool calls; a refusal of the assistant is part of its content; fields
// that are null are left out, as templates ask whether a field is there. Throws ApiError naming
// the field that is wrong or that a language model cannot read.
nlohmann::ordered_json read_chat_messages(const RequestFields& request);

}  // namespace tandem
