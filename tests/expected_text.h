// Compares whole outputs with files of tests/data. TANDEM_WRITE_EXPECTED=1 writes the files
// instead: review the difference before it is committed.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace tandem {

inline void expect_text(const std::string& name, const std::string& text) {
  const std::string path = std::string(TANDEM_SOURCE_DIR "/tests/data/") + name;
  if (std::getenv("TANDEM_WRITE_EXPECTED")) std::ofstream(path, std::ios::binary) << text;
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file.is_open()) << path;
  const std::string wanted((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(text, wanted) << path << ": TANDEM_WRITE_EXPECTED=1 writes it";
}

}  // namespace tandem
