"""The bugs that tools/mutants.py plants, one by one, in a file for each area."""
from . import cpu_kernels, engine, gpu_kernels, offload, planner, program

AREAS = (cpu_kernels, engine, gpu_kernels, offload, planner, program)
# The tests that know a file, by the beginning of its path; the longest matching one counts.
TESTS_OF = {beginning: tests for area in AREAS for beginning, tests in area.TESTS_OF.items()}
# A name, a file, and the texts to replace there.
MUTANTS = [mutant for area in AREAS for mutant in area.MUTANTS]
