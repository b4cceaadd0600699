// Arbitrary bytes as a hub's list of files give an Error of one line, or files that stay below the
// folder they are fetched into.
#include <cstdint>
#include <filesystem>
#include <set>
#include <string_view>

#include "core/check.h"
#include "hub/repository.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  try {
    const HubListing listing =
        parse_listing({reinterpret_cast<const char*>(data), size}, "https://hub/api");
    std::set<std::string> paths;
    for (const HubFile& file : listing.files) {
      const auto path = (std::filesystem::path("/models/r1") / file.path).lexically_normal();
      check(path.string().starts_with("/models/r1/"), "a path in the folder");
      check(!path.string().starts_with("/models/r1/.pull/"), "not in the folder of partial files");
      check(paths.insert(path.string()).second, "different files");
      check(file.bytes >= 0, "a size");
    }
    check(listing.bytes() >= 0, "a sum of sizes");
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
  }
  return 0;
}
