"""Compares tandem's ids of texts around every character of the planes with assigned characters with those of the
Python packages tokenizers and tiktoken (exit status 77, skipped, where they are missing). Takes minutes.

    python3 tests/tokenizer_oracle.py PATH_OF_TANDEM [FOLDER_OF_A_TOKENIZER ..]
"""
import argparse
import base64
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "tokenizer"
OFFICIAL = ROOT.parent / "shared" / "vectors" / "deepseek_v3_tokenizer"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem")
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    sys.path.insert(0, str(DATA))
    sys.dont_write_bytecode = True
    try:
        import make_unicode
    except ImportError as missing:
        print(f"skipped: {missing}")
        return 77
    folders = args.folders or [DATA / name for name in ("v3", "v2", "pairs", "kimi")] + [OFFICIAL] * OFFICIAL.exists()
    failed = 0
    for folder in folders:
        characters = [chr(c) for block in make_unicode.blocks() for c in block]
        wrong = different(args.tandem, folder, characters, make_unicode.text_around)
        print(f"{folder.name}: {len(characters)} characters, {len(wrong)} with other ids {[hex(ord(c)) for c in wrong[:10]]}")
        failed += len(wrong)
    return 1 if failed else 0


def different(tandem, folder, characters, text_around):
    """The characters around which a text has other ids. A text ends with a line break, which no piece crosses."""
    encode = encoder(folder)
    expected = [encode(text_around(c)) for c in characters]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", newline="") as file:
        file.write("".join(map(text_around, characters)))
        file.flush()
        done = subprocess.run([tandem, "tokenize", str(folder), "-f", file.name], capture_output=True, text=True, check=True)
    ids, at, wrong = json.loads(done.stdout), 0, []
    for character, own in zip(characters, expected):
        if ids[at:at + len(own)] != own:
            wrong.append(character)
            done = subprocess.run([tandem, "tokenize", str(folder), "-p", text_around(character)], capture_output=True, text=True)
            own = json.loads(done.stdout) if done.returncode == 0 else own
            if len(wrong) == 10:
                break
        at += len(own)
    return wrong or ([] if at == len(ids) else ["\0"])


def encoder(folder):
    import tiktoken
    import tokenizers
    from make_tokenizers import KIMI_PATTERN
    if (folder / "tokenizer.json").exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    lines = (folder / "tiktoken.model").read_text(encoding="utf-8").split("\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    return tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


if __name__ == "__main__":
    sys.exit(main())
