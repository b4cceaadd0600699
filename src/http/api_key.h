// The key that clients send as "Authorization: Bearer KEY".
#pragma once
#include <string>

#include "http/api_error.h"

namespace tandem {

// Throws ApiError 401 unless `authorization`, the value of the header, has the key. An empty key
// allows every request.
inline void require_api_key(const std::string& authorization, const std::string& key) {
  if (key.empty()) return;
  const std::string expected = "Bearer " + key;
  // All characters are compared, so that the time does not tell which part of the key is right.
  unsigned difference = authorization.size() == expected.size() ? 0 : 1;
  for (size_t i = 0; i < authorization.size(); ++i)
    difference |= static_cast<unsigned char>(authorization[i] ^ expected[i % expected.size()]);
  if (difference != 0)
    throw ApiError(401,
                   "the API key is missing or wrong: send the header Authorization: Bearer KEY", {},
                   "invalid_api_key");
}

}  // namespace tandem
