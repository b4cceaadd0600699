// Reads the messages of a chat request in the format of OpenAI's API.
#pragma once
#include <nlohmann/json.hpp>

#include "server/request_fields.h"

namespace tandem {

// Returns the field "messages" in the form that chat templates read: a content is a string, a list
// of
// {"type": "text", "text": ..}, or null beside tool calls; a refusal of the assistant becomes part
// of its content; null fields are removed, since templates test whether a field is defined. Throws
// ApiError naming a field that is invalid or not text (image, audio).
nlohmann::ordered_json read_chat_messages(const RequestFields& request);

}  // namespace tandem
