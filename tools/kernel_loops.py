"""What the inner loops of the GPU kernels allow, according to their SASS: instructions of a warp per pass, the cycles of a
multiprocessor that the busiest pipe takes for them, and the share of the memory bandwidth that this allows.

    python3 tools/kernel_loops.py [--kernels REGEX] [--cuobjdump PATH]      a minute; needs nvcc 13 and cuobjdump

Prints two Markdown tables. A share of 0.85 or more means that pipes do not prevent 0.85 of the bandwidth. Latencies,
bank conflicts and caches are not considered, and instructions that a pass rarely executes are left out.
"""
import argparse
import collections
import dataclasses
import pathlib
import re
import sys
import tempfile

import nvcc
import sass


@dataclasses.dataclass(frozen=True)
class Kernel:
    title: str
    file: str
    name: str  # as nvcc.demangled() writes it
    bytes_per_mma: float = 0  # bytes of weights or cache for each tensor core instruction; 0: all wide loads of the pass
    sums: float = 0  # the share of passes that take the branches with float multiplications
    widens: float = 1  # the share of the branches with widening that a pass takes


@dataclasses.dataclass(frozen=True)
class Card:
    name: str
    arch: str
    bandwidth: float  # bytes per second
    multiprocessors: int
    clock: float  # Hz

    def bytes_per_cycle(self):
        return self.bandwidth / self.multiprocessors / self.clock


TILE_32 = "MatrixTile<(tandem::Number)1,(tandem::Number)2,1,2,2>"
KERNELS = (
    Kernel("skinny FP8, 8 tokens", "skinny_product", "skinny<(tandem::Number)2,1,false>"),
    Kernel("skinny FP8, 16 tokens", "skinny_product", "skinny<(tandem::Number)2,2,false>"),
    Kernel("skinny BF16, 8 tokens", "skinny_product", "skinny<(tandem::Number)1,1,false>"),
    Kernel("skinny BF16, 16 tokens", "skinny_product", "skinny<(tandem::Number)1,2,false>"),
    # An instruction multiplies 8 rows of w by 16 columns with 16 of the tile's 32 tokens. Scale blocks have two steps.
    Kernel("experts FP8, gate and up", "grouped_product", f"gate_up<{TILE_32} >", 8 * 16 / 2, 1 / 2),
    Kernel("experts FP8, down", "grouped_product", f"down<{TILE_32} >", 8 * 16 / 2, 1 / 2),
    # 64 queries times 576 columns of scores and 512 of values for each token, 16 x 8 x 16 products an instruction.
    Kernel("mla_decode, BF16 cache", "mla_decode", "mla_decode<mla::Bf16Tiles>", 1152 / (64 * 1088 / 2048)),
    # Half of the warps decode before they multiply, the others after it.
    Kernel("mla_decode, FP8 cache", "mla_decode", "mla_decode<mla::Fp8Tiles>", 656 / (64 * 1088 / 2048), widens=1 / 2),
    # 128 queries times 192 columns of keys and 128 of values in BF16.
    Kernel("mla_prefill", "mla_prefill", "mla_prefill", 2 * 320 / (128 * 320 / 2048)),
    Kernel("per head FP8, transposed", "per_head_product", "per_head_transposed<(tandem::Number)2>"),
    Kernel("per head BF16, transposed", "per_head_product", "per_head_transposed<(tandem::Number)1>"),
)
# Data sheets; boost clocks. NVIDIA states no clock for the H200: 1.83 GHz is the one at which 132 multiprocessors have
# its 989 TFLOPS.
CARDS = (
    Card("RTX 4090", "89", 1008e9, 128, 2.52e9),
    Card("H200", "90", 4800e9, 132, 1.83e9),
    Card("RTX 5090", "120", 1792e9, 170, 2.41e9),
)

# Lanes that a multiprocessor executes in a cycle on sm_89, sm_90, sm_120. Source: "Throughput of Native Arithmetic
# Instructions" in the CUDA C++ Programming Guide (8.4.1, until release 12) and the CUDA C++ Best Practices Guide (12.1.1,
# from release 13). The guides count both halves of a pair; an instruction of 32 pairs is 32 lanes here.
LANES = {
    "float": (128, 128, 128),  # 32-bit floating-point add, multiply, multiply-add
    "pair": (64, 128, 64),  # 16-bit floating-point (BF16): 128, 256 and 128 results
    "add": (64, 64, 128),  # 32-bit integer add, subtract
    "multiply": (64, 64, 64),  # 32-bit integer multiply-add; IMAD also moves and shifts
    "logic": (64, 64, 64),  # and, or, xor; shift; compare, minimum, maximum; moves, PRMT and votes are not listed
    "special": (16, 16, 16),  # reciprocal, 2^x; conversions between types; leading zeros
    "shuffle": (32, 32, 32),
}
# Operations of a multiprocessor's tensor cores per cycle with BF16 and with FP8 and float sums. Data sheets: 165 and 330
# TFLOPS, 989 (reached by wgmma, not by the mma instruction of these kernels), 209.5 and 419.
TENSOR = {"89": {"HMMA": 512, "QMMA": 1024}, "90": {"HMMA": 4096}, "120": {"HMMA": 512, "QMMA": 1024}}
SHARED_BYTES = 128  # that a multiprocessor's shared memory and level-1 cache move in a cycle

# Kinds of instructions, columns of the table. Which pipe executes them: "Pipelines" in the Nsight Compute Profiling Guide.
KINDS = {
    "float": "FADD FFMA FMUL",
    "pair": "HADD2 HFMA2 HMUL2",
    "multiply": "IMAD",
    "add": "IADD IADD3 VIADD",
    "logic": "BMSK CS2R FCHK FMNMX FSEL FSET FSETP HSETP2 I2FP IABS IMNMX ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P SEL SGXT "
             "SHF VIADDMNMX VIMNMX VOTE",
    "special": "BREV F2F F2FP F2I FLO I2F MUFU POPC",
    "memory": "ATOMG LDG LDGSTS LDL LDS LDSM RED SHFL STG STL STS",
    "uniform": "LDC LDCU R2UR S2R S2UR VOTEU",
    "control": "BAR BRA BREAK BSSY BSYNC CALL CCTL DEPBAR ERRBAR EXIT LDGDEPBAR MEMBAR NOP RET WARPSYNC YIELD",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
COLUMNS = ("tensor", *KINDS)
PIPES = ("tensor", "FMA", "FMA heavy", "ALU", "XU", "shared", "issue")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", metavar="REGEX", default="", help="only those whose title contains this")
    parser.add_argument("--cuobjdump", metavar="PATH", default="cuobjdump")
    args = parser.parse_args()
    kernels = [kernel for kernel in KERNELS if re.search(args.kernels, kernel.title)]
    code = {(file, card.arch): disassembled(file, card.arch, args.cuobjdump)
            for file in {kernel.file: None for kernel in kernels} for card in CARDS}
    passes = {(kernel, card): pass_of(kernel, code[kernel.file, card.arch][kernel.name])
              for kernel in kernels for card in CARDS}
    print(instruction_table(passes))
    print()
    print(share_table(passes))


def disassembled(file, arch, cuobjdump):
    """Demangled name -> instructions of the kernels of a file."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / f"{file}.cubin"
        nvcc.compiled(nvcc.ROOT / "gpu_kernels" / f"{file}.cu", arch, cubin)
        text = nvcc.output_of([cuobjdump, "-sass", cubin]).stdout
    return {nvcc.demangled(name): instructions for name, instructions in sass.functions(text).items()}


def pass_of(kernel, instructions):
    """Name of an instruction -> how often a pass of the kernel's inner loop executes it, and the pass's bytes."""
    loop = sass.inner_loop(instructions)
    counts = collections.Counter()
    for with_sums, sums in ((False, 1 - kernel.sums), (True, kernel.sums)):
        for widens, share in ((True, kernel.widens), (False, 1 - kernel.widens)):
            for name, n in sass.counted_pass(instructions, loop, with_sums, kernel.bytes_per_mma, widens).items():
                counts[name] += n * sums * share
    counts = {name: n for name, n in counts.items() if n}
    if kernel.bytes_per_mma:
        return counts, kernel.bytes_per_mma * by_kind(counts)["tensor"]
    return counts, sum(n * sass.wide_load_bytes(instruction(name)) for name, n in counts.items())


def instruction(name):
    return sass.Instruction(0, "", name, "")


def kind_of(name):
    if sass.is_mma(instruction(name)):
        return "tensor"
    base = sass.kind(instruction(name))
    if base not in KIND_OF and not base.startswith("U"):
        sys.exit(f"error: the kind of {name} is not known; add it to KINDS")
    return KIND_OF.get(base, "uniform")


def by_kind(counts):
    kinds = collections.Counter()
    for name, n in counts.items():
        kinds[kind_of(name)] += n
    return kinds


def cycles(counts, arch):
    """Pipe -> cycles of a multiprocessor, a quarter of those of each of its four parts, for one pass of a warp."""
    column = [card.arch for card in CARDS].index(arch)
    total = dict.fromkeys(PIPES, 0.0)
    for name, n in counts.items():
        kind = kind_of(name)
        total["issue"] += n / 4
        of_kind = 32 * n / LANES[kind][column] if kind in LANES else 0
        if kind == "tensor":
            depth = int(re.search(r"\.168(\d+)", name)[1])
            total["tensor"] += n * 2 * 16 * 8 * depth / TENSOR[arch][sass.kind(instruction(name))]
        elif kind == "float":
            total["FMA"] += of_kind
        elif kind == "pair":  # both halves of the FMA pipe together
            total["FMA"] += of_kind
            total["FMA heavy"] += of_kind
        elif kind == "multiply":  # one half, called heavy
            total["FMA"] += of_kind / 2
            total["FMA heavy"] += of_kind
        elif kind in ("add", "logic"):
            total["ALU"] += of_kind
        elif kind == "special":
            total["XU"] += of_kind
        elif kind == "memory":
            total["shared"] += n * max(1, sass.vector_bytes(instruction(name)) / SHARED_BYTES)
    return total


def instruction_table(passes):
    lines = ["| loop | sm | all | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) + 1)]
    for (kernel, card), (counts, _) in passes.items():
        kinds = by_kind(counts)
        cells = [f"{sum(counts.values()):.0f}", *(f"{kinds[column]:.0f}" for column in COLUMNS)]
        lines.append(f"| {kernel.title} | {card.arch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def share_table(passes):
    lines = ["| loop | card | bytes | " + " | ".join(PIPES) + " | allowed | memory | share |",
             "|---|---|" + "---:|" * (len(PIPES) + 4)]
    for (kernel, card), (counts, n_bytes) in passes.items():
        pipes = cycles(counts, card.arch)
        busiest = max(pipes, key=pipes.get)
        allowed = n_bytes / pipes[busiest]
        cells = [f"{n_bytes:.0f}", *(("**{:.0f}**" if pipe == busiest else "{:.0f}").format(pipes[pipe]) for pipe in PIPES),
                 f"{allowed:.1f}", f"{card.bytes_per_cycle():.1f}", f"{allowed / card.bytes_per_cycle():.2f}"]
        lines.append(f"| {kernel.title} | {card.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
