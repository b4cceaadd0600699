"""Reads the SASS of cuobjdump, finds a kernel's inner loop and the instructions of one pass through it."""
import collections
import dataclasses
import re

Instruction = collections.namedtuple("Instruction", "address predicate name operands")


@dataclasses.dataclass(frozen=True)
class Loop:
    first: int  # index of its first instruction
    last: int  # index of its last branch to the first one


def functions(text):
    """Mangled name -> instructions, of the output of cuobjdump -sass."""
    found = {}
    for line in text.splitlines():
        if name := re.search(r"Function : (\S+)", line):
            instructions = found[name[1]] = []
        elif part := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            instructions.append(Instruction(int(part[1], 16), part[2] or "", part[3], part[4]))
    return found


def kind(instruction):
    return instruction.name.split(".")[0]


def is_mma(instruction):
    return kind(instruction) in ("HMMA", "QMMA", "IMMA", "DMMA")


def is_widening(instruction):
    """Whether this is the last step of widening FP8 codes to a pair of BF16 numbers."""
    return kind(instruction) in ("HFMA2", "HMUL2") and "BF16" in instruction.name


def is_multiplication(instruction):
    return kind(instruction) in ("FFMA", "FMUL")


def vector_bytes(instruction):
    """Bytes that a warp moves with one load or store; 32 bits a lane where the name has no width."""
    if kind(instruction) == "LDSM":
        return 128 * int(instruction.name[-1])  # .4: four matrices of 8 x 8 numbers of 16 bits
    width = re.search(r"\.(?:[US])?(8|16|64|128)(?:\.|$)", instruction.name)
    return 32 * int(width[1] if width else 32) // 8


def wide_load_bytes(instruction):
    """Bytes of a load of the shape that reads weights and caches: a vector, or a copy to shared memory."""
    name = kind(instruction)
    return vector_bytes(instruction) if name == "LDGSTS" or name == "LDG" and vector_bytes(instruction) >= 256 else 0


def target(instruction):
    """Where a branch leads, if this is one. The compiler also leaves loops by conditional calls."""
    if kind(instruction) != "BRA" and not (kind(instruction) == "CALL" and instruction.predicate):
        return None
    address = re.search(r"\b0x([0-9a-f]+)$", instruction.operands)
    return int(address[1], 16) if address else None


def may_continue(instruction):
    """Whether the next instruction can follow: not after an unconditional branch."""
    unconditional = kind(instruction) in ("BRA", "EXIT", "RET") and not instruction.predicate
    return not unconditional or "P" in instruction.operands or "BRA." in instruction.name


def loops(instructions):
    """All loops: a branch back and what lies between. Branches to the same place are one loop."""
    index = {one.address: i for i, one in enumerate(instructions)}
    last = {}
    for i, one in enumerate(instructions):
        if kind(one) == "BRA" and target(one) is not None and target(one) < one.address:
            last[index[target(one)]] = i
    return [Loop(first, end) for first, end in last.items()]


def usual_pass(instructions, loop, with_sums, with_widening=True):
    """Indices of one pass: of all paths through the loop, the one with the most tensor core instructions, then the most
    widening (without with_widening the least), then the most bytes of wide loads, then the fewest instructions. With
    with_sums, multiplications in float count before bytes: the path that takes their branches. Inner loops are passed
    once."""
    index = {one.address: i for i, one in enumerate(instructions)}
    best, following = {}, {}
    for i in range(loop.last, loop.first - 1, -1):
        one, to = instructions[i], index.get(target(instructions[i]))
        after = [to] if to is not None and i < to <= loop.last else []
        after += [i + 1] if may_continue(one) and i < loop.last else []
        ends = to == loop.first
        options = [(best[n], n) for n in after if n in best] + ([((0, 0, 0, 0, 0), None)] if ends else [])
        if not options:
            continue
        value, following[i] = max(options, key=lambda option: option[0])
        own = (is_mma(one), is_widening(one) * (1 if with_widening else -1), with_sums and is_multiplication(one), wide_load_bytes(one), -1)
        best[i] = tuple(a + b for a, b in zip(value, own))
    path, at = [], loop.first if loop.first in best else None
    while at is not None:
        path.append(at)
        at = following[at]
    return path


def inner_loop(instructions):
    """The loop whose pass has the most tensor core instructions, then the most multiplications and wide loads; of equal
    ones the shortest."""
    def work(loop):
        body = [instructions[i] for i in usual_pass(instructions, loop, True)]
        return *(sum(map(of, body)) for of in (is_mma, is_multiplication, wide_load_bytes)), loop.first - loop.last

    return max(loops(instructions), key=work)


def counted_pass(instructions, loop, with_sums=False, bytes_per_mma=None, with_widening=True):
    """Instruction -> how often a pass executes it, by name. The pass of an inner loop that copies repeats until the pass
    has copied bytes_per_mma for each tensor core instruction."""
    path = usual_pass(instructions, loop, with_sums, with_widening)
    times = dict.fromkeys(path, 1)
    if bytes_per_mma:
        wanted = bytes_per_mma * sum(is_mma(instructions[i]) for i in path)
        copied = sum(wide_load_bytes(instructions[i]) for i in path)
        for inner in loops(instructions):
            inside = [i for i in path if loop.first < inner.first <= i <= inner.last < loop.last]
            own = sum(wide_load_bytes(instructions[i]) for i in inside)
            if own:
                times.update(dict.fromkeys(inside, max(1, (wanted - copied + own) / own)))
    counts = collections.Counter()
    for i, n in times.items():
        counts[instructions[i].name] += n
    return counts
