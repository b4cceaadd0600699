// What the router reads of a request's body: the model, and the beginning of the prompt.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct RequestSummary {
  std::string model = {};               // empty: none named
  std::vector<uint64_t> prefixes = {};  // prefix_hashes() of the prompt
  int64_t prompt_bytes = 0;
};

// Reads bodies of /v1/chat/completions, /v1/completions and /generate. What is not such a body has
// an empty summary: the backend refuses it in its own words.
RequestSummary summary_of(const std::string& body);

}  // namespace tandem
