// Chooses tests by the name under which a program was started: a program can contain the tests of
// several files and has a link with the name of each (CMakeLists.txt).
#pragma once
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <string>

namespace tandem::test {

// If `program` has the name of one of its test files, only that file's tests will run. Called after
// InitGoogleTest, whose filter then chooses among them.
inline void choose_tests_of_file(const std::filesystem::path& program) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  bool contained = false;
  std::string others;
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      if (std::filesystem::path(test.file()).stem() == program.filename())
        contained = true;
      else
        others += std::string(":") + suite.name() + "." + test.name();
    }
  }
  if (!contained) return;
  const std::string chosen = testing::GTEST_FLAG(filter);
  const bool excludes = chosen.find('-') != std::string::npos;
  testing::GTEST_FLAG(filter) = chosen + (excludes ? "" : "-") + others;
}

// Runs what is chosen. A filter that chooses nothing fails.
inline int run_chosen() {
  const int failed = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() > 0) return failed;
  std::puts("no test is chosen");
  return 1;
}

}  // namespace tandem::test
