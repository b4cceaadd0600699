"""clang-tidy over C++ sources, several at a time. A source that passed is not checked again before it, a file of the
repository that it includes, its command or the configuration changes.

    python3 tools/lint.py FILE ..       # or names on standard input; build/debug has the commands of the compiler
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "debug"
PASSED = ROOT / "build" / "lint"  # an empty file for each source that passed, named by what it depends on
TIDY = "clang-tidy-14"


def files_read(command, source):
    """The repository's files that the compiler reads for this source."""
    words = shlex.split(command["command"])
    output = words.index("-o")
    listed = subprocess.run([*words[:output], *words[output + 2:], "-M"], cwd=command["directory"], capture_output=True,
                            text=True, check=False)
    if listed.returncode != 0:
        return [source]  # clang-tidy says what is wrong
    paths = {pathlib.Path(command["directory"], name).resolve() for name in shlex.split(listed.stdout.replace("\\\n", " "))[1:]}
    return sorted(path for path in paths if path.is_relative_to(ROOT))


def state_of(command, source):
    """What clang-tidy's answer depends on, as a name of a file."""
    state = hashlib.sha256(command["command"].encode())
    for path in [ROOT / ".clang-tidy", *files_read(command, source)]:
        state.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


def check(command, source):
    """Nothing if the source passed before, else clang-tidy's exit status and messages."""
    stamp = PASSED / state_of(command, source)
    if stamp.exists():
        return None
    done = subprocess.run([TIDY, "-p", str(BUILD), "--quiet", str(source)], capture_output=True, text=True, check=False)
    if done.returncode == 0 and stamp.name == state_of(command, source):  # no file was changed meanwhile
        stamp.touch()
    return done.returncode, done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    PASSED.mkdir(parents=True, exist_ok=True)
    commands = {pathlib.Path(c["file"]): c for c in json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))}
    sources = [pathlib.Path(name).resolve() for name in options.files or sys.stdin.read().split()]
    unknown = [str(source) for source in sources if source not in commands]
    if unknown:
        sys.exit(f"error: the build does not compile {', '.join(unknown)}: configure it again, or leave these out")
    begin = shown = time.monotonic()
    failed = known = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(check, commands[source], source): source for source in sources}
        for n, future in enumerate(concurrent.futures.as_completed(running), 1):
            result = future.result()
            known += result is None
            if result and result[0] != 0:
                failed += 1
                print(f"{running[future].relative_to(ROOT)}:\n{result[1]}", flush=True)
            now = time.monotonic()
            if now - shown > 30 and n > known:
                left = (now - begin) / (n - known) * (len(sources) - n)
                print(f"linted {n} of {len(sources)}, at most {left / 60:.0f} min left", file=sys.stderr, flush=True)
                shown = now
    print(f"lint: {len(sources) - failed} passed ({known} of them before), {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
