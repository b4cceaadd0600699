"""Many mutants in one text, each guarded by its number, and the code that selects one at run time.

TANDEM_MUTANT is the number of the active mutant. When execution reaches a mutant, its byte in the file named by
TANDEM_REACHED becomes 1. No function is called, so that an island gains no symbol (tests/islands_test.sh).
"""
import dataclasses

# Placeholder for "this mutant is active" in Site.schema.
ON = "\0"
MOST_MUTANTS = 65536
DECLARATIONS = 'extern "C" int tandem_mutant; extern "C" bool* tandem_reached;\n'
RUNTIME = """#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

namespace {
constexpr int kMaxMutants = MOST;
bool nowhere[kMaxMutants];
}  // namespace

extern "C" {
int tandem_mutant = 0;
bool* tandem_reached = nowhere;
}

// Before every other initialiser of the program.
__attribute__((constructor(101))) static void choose_mutant() {
  if (const char* number = std::getenv("TANDEM_MUTANT")) tandem_mutant = std::atoi(number);
  const char* path = std::getenv("TANDEM_REACHED");
  const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void* bytes = mmap(nullptr, kMaxMutants, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (bytes != MAP_FAILED) tandem_reached = static_cast<bool*>(bytes);
  close(file);
}
""".replace("MOST", str(MOST_MUTANTS))
# CMake includes this after project(), so that every program contains the selection.
CMAKE = """add_library(tandem_mutation STATIC ${CMAKE_CURRENT_LIST_DIR}/runtime.cpp)
set_target_properties(tandem_mutation PROPERTIES POSITION_INDEPENDENT_CODE ON)
link_libraries(tandem_mutation)
"""


@dataclasses.dataclass
class Site:
    kind: str
    start: int  # offset in bytes in the file
    end: int
    changed: list  # the possible replacements of file[start:end]
    schema: list  # for each replacement: code that is the original, or the replacement where ON
    in_constexpr: bool = False


def is_on(mutant):
    chosen = f"(tandem_reached[{mutant.number}] = true, tandem_mutant == {mutant.number})"
    if mutant.site.in_constexpr:  # code that the compiler evaluates is unchanged
        return f"(!__builtin_is_constant_evaluated() && {chosen})"
    return chosen


def planted(text, mutants):
    """`text` with all mutants, and the first and last line of the result that each one changes."""
    out, at, lines = DECLARATIONS, 0, {}
    for mutant in sorted(mutants, key=lambda m: m.site.start):
        site = mutant.site
        out += text[at:site.start]
        first = out.count("\n") + 1
        out += site.schema[mutant.choice].replace(ON, is_on(mutant))
        lines[mutant.number] = first, out.count("\n") + 1
        at = site.end
    return out + text[at:], lines


def one_line_diff(text, mutant):
    """The lines that a mutant changes, before and after, each as one line."""
    site = mutant.site
    start = text.rfind("\n", 0, site.start) + 1
    end = text.find("\n", site.end)
    end = len(text) if end < 0 else end
    before = text[start:end]
    after = text[start:site.start] + site.changed[mutant.choice] + text[site.end:end]
    return " ".join(before.split()), " ".join(after.split())
