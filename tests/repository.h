// Folders of the repository that tests read. A bundle has them in another folder.
#pragma once
#include <cstdlib>
#include <string>

namespace tandem::test {

inline const std::string kRoot =
    std::getenv("TANDEM_TEST_ROOT") ? std::getenv("TANDEM_TEST_ROOT") : TANDEM_SOURCE_DIR;
inline const std::string kTinyR1 = kRoot + "/models/tiny-r1";
inline const std::string kGolden = kRoot + "/tests/golden/";

}  // namespace tandem::test
