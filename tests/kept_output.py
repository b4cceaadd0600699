"""Compares what the program prints with the files of tests/data/output.

Text must be equal; a number may differ by one unit of its last printed decimal, since libraries and compilers round
differently. TANDEM_WRITE_EXPECTED=1 writes the files anew, here and in C++ tests (tests/expected_text.h): read what differs
before it is committed.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEPT = ROOT / "tests" / "data" / "output"
TANDEM = sys.argv[1] if len(sys.argv) > 1 else "build/tandem"
WRITES = "TANDEM_WRITE_EXPECTED" in os.environ
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


def tandem(*arguments):
    """Standard output, standard error and a status other than 0, in a cache folder without a measured machine."""
    with tempfile.TemporaryDirectory() as cache:
        result = subprocess.run([TANDEM, *arguments], capture_output=True, text=True, check=False, timeout=120,
                                env={**os.environ, "XDG_CACHE_HOME": cache})
    text = result.stdout + result.stderr
    return (text if result.returncode == 0 else f"{text}exit status {result.returncode}\n").replace(str(ROOT), "ROOT")


def unit(number):
    """One unit of the last printed decimal; zero for a whole number."""
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals else 0.0


def close(a, b):
    return a == b or abs(float(a) - float(b)) <= 1.001 * max(unit(a), unit(b)) + 1e-9 * abs(float(b))


def difference(now, kept):
    """The first line that differs, or None."""
    a, b = now.splitlines(), kept.splitlines()
    for n, (x, y) in enumerate(zip(a, b), 1):
        same_words = NUMBER.sub("#", x).split() == NUMBER.sub("#", y).split()
        if not same_words or not all(map(close, NUMBER.findall(x), NUMBER.findall(y))):
            return f"line {n}:\n  now  {x}\n  kept {y}"
    return None if len(a) == len(b) else f"{len(a)} lines now, {len(b)} kept"


class KeptOutput(unittest.TestCase):
    def same(self, name, text):
        path = KEPT / name
        if WRITES:
            KEPT.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        problem = difference(text, path.read_text(encoding="utf-8"))
        self.assertIsNone(problem, f"{name}, {problem}")
