// main() of the tests that need no GPU.
#include <gtest/gtest.h>

#include "tests/tests_of_file.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  tandem::test::choose_tests_of_file(argv[0]);
  return tandem::test::run_chosen();
}
