// Finds data files that are installed with the program or the shared library, relative to its path.
#pragma once
#include <string>
#include <vector>

namespace tandem {

// Paths at which `name` ("models/tiny-r1") is looked for, in order: beside the library that
// contains this code, in the three folders above it (as in a source tree) and in share/tandem of
// its installation; the same for the program; and in share/tandem of the configured installation.
std::vector<std::string> program_file_places(const std::string& name);

// The first path of program_file_places() that exists; empty if none does.
std::string program_file(const std::string& name);

// For a message, "k2, r1, v2": the files in the program's folder `name` without their extensions,
// or, if the folder is missing, the paths where it was looked for.
std::string names_of_program_files(const std::string& name);

}  // namespace tandem
