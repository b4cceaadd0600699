"""Registers, spills and static shared memory of the GPU kernels according to ptxas, and the number of warps that
their registers allow on a multiprocessor, in blocks of 256 threads or as in the table below.

    python3 tools/kernel_resources.py [FILE.cu ..]        default: all; the tiles of products take minutes each

Prints a Markdown table, a row for each kernel and a column for each architecture: registers, and warps that fit of
the most warps of a multiprocessor. Exit status 1 if a kernel spills.
"""
import argparse
import pathlib
import re
import sys

import nvcc

WARPS = {"80": 64, "86": 48, "89": 48, "90": 64, "100": 64, "120": 48}  # most warps of a multiprocessor, CUDA C++ Programming Guide
REGISTERS = 65536
THREADS = {  # threads of a block, where not 256
    "append_fp8": 128, "draw": 1024, "gather_latents": 32, "plain_attention": 128, "plain_experts": 64,
    "plain_product": 64, "raise": 32, "await": 32, "stamp": 32, "rotate_append": 128,
}


def kernels():
    """All but cuda/probe.cu, which is empty."""
    return sorted(file for file in (nvcc.ROOT / "gpu_kernels").rglob("*.cu") if file.parent.name != "cuda")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE.cu", nargs="*", type=pathlib.Path)
    files = parser.parse_args().files or kernels()
    rows = {}
    spills = False
    for file in files:
        for name, arch, registers, spilled in compiled(file):
            rows.setdefault(name, {})[arch] = registers
            if spilled:
                print(f"{name} spills {spilled} bytes on sm_{arch}", file=sys.stderr)
                spills = True
    print("| kernel | threads | " + " | ".join(f"sm_{a}" for a in WARPS) + " |")
    print("|---|---:|" + "---:|" * len(WARPS))
    for name, by_arch in rows.items():
        cells = [f"{by_arch[a]}, {warps(name, by_arch[a], a)}/{WARPS[a]}" for a in WARPS]
        print(f"| `{name}` | {threads_of(name)} | " + " | ".join(cells) + " |")
    return 1 if spills else 0


def threads_of(name):
    return THREADS.get(name.split("<")[0], 256)


# Registers are allocated to warps in units of 256; a block needs all its warps.
def warps(name, registers, arch):
    block = max(1, threads_of(name) // 32)
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256)
    most = min(by_registers, WARPS[arch]) // block * block
    return min(most, 32 * block)


def compiled(file):
    for arch in WARPS:
        name, spilled = "", 0
        for line in nvcc.compiled(file, arch, "/dev/null", "-Xptxas", "-v").splitlines():
            if found := re.search(r"Compiling entry function '(\w+)'", line):
                name = nvcc.demangled(found[1])
            elif found := re.search(r"(\d+) bytes spill stores", line):
                spilled = int(found[1])
            elif found := re.search(r"Used (\d+) registers", line):
                yield name, arch, int(found[1]), spilled


if __name__ == "__main__":
    sys.exit(main())
