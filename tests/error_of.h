// The message of an Error, for tests of refusals.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/check.h"

namespace tandem {

// Returns the message of the Error that `work` throws, which must be one line of bounded length, or
// "no error".
inline std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    EXPECT_LT(what.size(), 1000u) << what;
    return what;
  }
  return "no error";
}

// EXPECT_TRUE(says(error_of(..), "part")) shows the whole message when it fails.
inline ::testing::AssertionResult says(const std::string& message, const std::string& part) {
  if (message.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << message << "\" does not say \"" << part << "\"";
}

}  // namespace tandem
