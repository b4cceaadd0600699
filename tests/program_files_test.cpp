// Where the files that come with the program are looked for.
#include "core/program_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

namespace tandem {
namespace {

namespace fs = std::filesystem;

const fs::path kProgram = fs::read_symlink("/proc/self/exe");

// The program's folder and three folders above it, share/tandem beside the folder, and the folder
// of the installation.
TEST(ProgramFiles, AreLookedForAroundTheProgram) {
  const fs::path home = kProgram.parent_path(), up = home.parent_path();
  const std::vector<std::string> places = program_file_places("a/b");
  ASSERT_GE(places.size(), 5U);
  EXPECT_LE(places.size(), 6U);
  fs::path folder = home;
  for (int i = 0; i < 4; ++i, folder = folder.parent_path()) EXPECT_EQ(places[i], folder / "a/b");
  EXPECT_EQ(places[4], up / "share/tandem/a/b");
  EXPECT_TRUE(places.back().ends_with("/a/b"));
  EXPECT_EQ(std::set<std::string>(places.begin(), places.end()).size(), places.size());
}

TEST(ProgramFiles, TheNearestIsFound) {
  EXPECT_EQ(program_file(kProgram.filename().string()), kProgram);
  EXPECT_EQ(program_file(kProgram.parent_path().filename().string()), kProgram.parent_path());
  EXPECT_EQ(program_file("no/such/file"), "");
}

TEST(ProgramFiles, NamesAreListed) {
  const std::string configs = names_of_program_files("models/configs");
  EXPECT_NE(configs.find("k2, k2-thinking, "), std::string::npos) << configs;
  EXPECT_EQ(configs.find(".json"), std::string::npos) << configs;
  std::string places;
  for (const std::string& place : program_file_places("no/such"))
    places += (places.empty() ? "" : ", ") + place;
  EXPECT_EQ(names_of_program_files("no/such"),
            "no/such, which is missing (looked for " + places + ")");
}

}  // namespace
}  // namespace tandem
