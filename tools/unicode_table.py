#!/usr/bin/env python3
"""Writes src/text/unicode_table.h: general category and script of every character in one version of Unicode.

    pip install unicodedata2==16.0.0 fonttools==4.59.0
    python3 tools/unicode_table.py

Both packages carry the files of the Unicode Character Database: unicodedata2 UnicodeData.txt, fontTools Scripts.txt.
The version is that of the libraries which tandem's tokens must agree with: Oniguruma in `tokenizers` 0.23 and the regex
crate in `tiktoken` 0.14 (tests/data/tokenizer/make_unicode.py asks them about every character).
"""
import argparse
import itertools
import pathlib
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSION = "16.0.0"
LAST = 0x10FFFF


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "src/text/unicode_table.h")
    out = parser.parse_args().out
    import unicodedata2  # pylint: disable=import-outside-toplevel
    from fontTools.unicodedata import Scripts  # pylint: disable=import-outside-toplevel
    if unicodedata2.unidata_version != VERSION:
        parser.error(f"unicodedata2 has Unicode {unicodedata2.unidata_version}: install unicodedata2=={VERSION}")
    if f"Scripts-{VERSION}.txt" not in pathlib.Path(Scripts.__file__).read_text(encoding="utf-8"):
        parser.error(f"fontTools has other scripts than Unicode {VERSION}: install fonttools==4.59.0")
    categories = runs((c, unicodedata2.category(chr(c))) for c in range(LAST + 1))
    scripts = runs(values_of_ranges(Scripts.RANGES, Scripts.VALUES))
    names = "".join(f"{code}{name} " for code, name in sorted(Scripts.NAMES.items()) if code in Scripts.VALUES)
    out.write_text(f"""\
// Made by tools/unicode_table.py from the Unicode Character Database {VERSION}
// (c) Unicode, Inc., https://www.unicode.org/license.txt
#pragma once
#include <string_view>

namespace tandem::unicode_table {{

// Characters in ascending order: how many come next, where it is not one, and their general
// category.
inline constexpr std::string_view kCategories =
{literal(categories)};

// The same with the four letters of their script.
inline constexpr std::string_view kScripts =
{literal(scripts)};

// The four letters of each script before its name, with a space after it.
inline constexpr std::string_view kScriptNames =
{literal(names)};

}}  // namespace tandem::unicode_table
""", encoding="utf-8")


def values_of_ranges(starts, values):
    for start, end, value in zip(starts, starts[1:] + [LAST + 1], values):
        for c in range(start, end):
            yield c, value


def runs(values):
    """"65Zyyy26Latn...": the length of each run of equal values, unless it is 1, before the value."""
    lengths = ((value, sum(1 for _ in run)) for value, run in itertools.groupby(value for _, value in values))
    return "".join(f"{length if length > 1 else ''}{value}" for value, length in lengths)


def literal(text):
    return "\n".join(f'    "{line}"' for line in textwrap.wrap(text, 94, drop_whitespace=False))


if __name__ == "__main__":
    main()
