// Lets native code with AMX run on a CPU without: every tile instruction is an invalid one there,
// so the signal handler does its work with the emulated tiles and goes on behind it. This tests the
// very instructions that the compiler made, which the emulated flavour of an island does not.
#pragma once

namespace tandem::test {

// From here on for the whole process. An invalid instruction that is not AMX stays fatal.
void trap_tile_instructions();

}  // namespace tandem::test
