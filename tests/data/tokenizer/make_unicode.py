#!/usr/bin/env python3
"""Classifies every character with Oniguruma, as the `tokenizers` library runs it, and writes the results to
unicode.json.

    pip install tokenizers==0.23.3
    python3 tests/data/tokenizer/make_unicode.py

"properties": for each general category, group of categories, script and class the hash of the ranges of characters
outside of it. "splits": for each tokenizer of this folder, and each 4,096 characters of the planes with assigned
characters, the hash of where the pieces of texts_around() begin. Hashes are FNV-1a of 64 bits.
"""
import argparse
import pathlib

from tokenizers import Regex, pre_tokenizers

from make_tokenizers import KIMI_PATTERN, V2_SPLITS, V3_SPLITS, dump

HERE = pathlib.Path(__file__).resolve().parent
VERSION = "16.0.0"
CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn "
              "L M N P S Z C").split()
PLANES = [0, 1, 2, 3, 14]
BLOCK = 4096


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    every = "".join(map(chr, scalars(range(0x110000))))
    patterns = {name: rf"\p{{{name}}}" for name in CATEGORIES + script_names()} | {r"\s": r"\s", r"\d": r"\d"}
    properties = {}
    for name, pattern in patterns.items():
        outside = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), "removed").pre_tokenize_str(every)
        properties[name] = fnv("".join(f"{ord(piece[0]):X}-{ord(piece[-1]):X} " for piece, _ in outside))
    digits = [pre_tokenizers.Digits(individual_digits=True)]
    splits = {"v3": sequence(V3_SPLITS), "v2": sequence(V2_SPLITS, digits), "kimi": sequence([KIMI_PATTERN])}
    starts = {name: [block_hash(split, block) for block in blocks()] for name, split in splits.items()}
    dump(HERE / "unicode.json", {"version": VERSION, "properties": properties, "splits": starts})


def script_names():
    """The script names in unicode_table.h. A missing script would show as a category without a script."""
    table = (HERE.parents[2] / "src/text/unicode_table.h").read_text(encoding="utf-8")
    names = "".join(line.strip().strip('";') for line in table.split("kScriptNames =")[1].split("\n\n")[0].splitlines())
    return [name[4:] for name in names.split() if name != "ZzzzUnknown"]


def scalars(numbers):
    return [c for c in numbers if not 0xD800 <= c < 0xE000]


def blocks():
    return [scalars(range(first, first + BLOCK)) for plane in PLANES
            for first in range(plane << 16, (plane + 1) << 16, BLOCK)]


def text_around(c):
    """A text in which the class of a character shows: beside letters, spaces, digits, marks, line ends and itself."""
    return f"a{c}b {c}{c}1{c}'s{c}\n{c}\u0301{c}一{c}A{c}!{c} {c}\r\n"


def sequence(patterns, more=()):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns] + list(more))


def block_hash(split, block):
    starts = []
    for at in range(0, len(block), 64):
        text = "".join(text_around(chr(c)) for c in block[at:at + 64])
        starts += [str(begin) for _, (begin, _) in split.pre_tokenize_str(text)]
    return fnv(" ".join(starts))


def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


if __name__ == "__main__":
    main()
