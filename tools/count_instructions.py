"""Counts the instructions that AVX2 products execute for each 64-byte line of weights.

Prints the table of cpu_kernels/line_instructions.cpp. Needs valgrind, which does not know AVX-512.

    python3 tools/count_instructions.py [build/release/benchmarks/one_product]
"""
import argparse
import re
import subprocess
import tempfile

ROWS = [1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 128]
BYTES_OF_NUMBER = {"bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "int4-32-bf16": 0.5}
OUTPUTS = 64
SHORT, LONG = 1024, 2048  # columns; the difference leaves out what a call costs


def instructions(program, form, rows, columns):
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run(["valgrind", "--tool=callgrind", "--toggle-collect=counted_product",
                        f"--callgrind-out-file={file.name}", program, form, str(rows), str(columns)],
                       check=True, stderr=subprocess.DEVNULL)
        return int(re.search(r"(?:summary|totals): (\d+)", open(file.name).read())[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PROGRAM", nargs="?", default="build/release/benchmarks/one_product")
    program = parser.parse_args().program
    print("rows".ljust(14) + "".join(f"{rows:9}" for rows in ROWS))
    for form, size in BYTES_OF_NUMBER.items():
        lines = (LONG - SHORT) * OUTPUTS * size / 64
        counts = [(instructions(program, form, rows, LONG) - instructions(program, form, rows, SHORT)) / lines
                  for rows in ROWS]
        print(form.ljust(14) + "".join(f"{count:9.1f}" for count in counts), flush=True)


if __name__ == "__main__":
    main()
