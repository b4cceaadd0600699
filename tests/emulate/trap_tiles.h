// Runs native AMX code on a CPU without AMX. Every tile instruction is invalid there; the signal
// handler executes it on the emulated tiles and continues after it. This tests the instructions
// that the compiler generated, which the emulated object of an island does not.
#pragma once

namespace tandem::test {

// Installs the handler for the whole process. Invalid instructions other than AMX stay fatal.
void trap_tile_instructions();

}  // namespace tandem::test
