// Data files that come with the program, found from where the program itself lies.
#pragma once
#include <string>
#include <vector>

namespace tandem {

// Where `name` ("models/tiny-r1") may be, in the order in which it is looked for: beside the
// program, in the three folders above it (as in a source tree), and in share/tandem of the
// installation.
std::vector<std::string> program_file_places(const std::string& name);

// The first of these places that exists; empty if none does.
std::string program_file(const std::string& name);

// "k2, r1, v2": the files in the program's folder `name` without their endings, for a message;
// where the folder is missing, what was looked for.
std::string names_of_program_files(const std::string& name);

}  // namespace tandem
