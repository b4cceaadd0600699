// Data files that come with the program, found from where the program itself lies.
#pragma once
#include <string>

namespace tandem {

// Path of `name` ("models/tiny-r1") beside the program or in one of the three folders above it;
// empty if it is nowhere there.
std::string program_file(const std::string& name);

}  // namespace tandem
