"""Plants bugs one by one and shows that the tests catch every one.

Builds the unchanged sources once, in build/mutants. A bug is planted in a copy of its file; what includes the file is
compiled from the copy and linked with the unchanged objects. The output of each test that caught a bug is kept in
build/mutants/caught. --write writes docs/measurements/planted_bugs.md. Exit status 1 if a bug survives or no longer
applies, or if a test fails without a bug.

    python3 tools/mutants.py [--only NAME] [--files REGEX [--others N]] [--likely] [--jobs N] [--write MACHINE]
"""
import argparse
import collections
import concurrent.futures
import functools
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time

from planted_bugs import MUTANTS, TESTS_OF

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mutants"
PLANTED = ROOT / "build" / "planted"
PAGE = ROOT / "docs" / "measurements" / "planted_bugs.md"
CONFIGURE = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Debug",
             "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -DNDEBUG", "-DTANDEM_CUDA=off"]
# The programs that a script is called with, if not `tandem`.
PROGRAMS_OF = {"gpu_cli_test.py": ["tests/tandem_emulated", "tandem"], "gpu_prefill_test.py": ["tests/tandem_emulated"],
               "gpu_ranks_test.py": ["tests/tandem_emulated"], "gpu_replica_workers_test.py": ["tests/tandem_emulated"],
               "gpu_check_test.py": [], "mpi_test.py": ["tests/mpi_ranks"]}
# A test of whole models on the emulated GPU takes up to a minute.
SLOW = re.compile("gpu_engine|gpu_hybrid")
# What a test may take with a bug: this many times what it takes without one, and some seconds more.
TIMES_AS_LONG, SECONDS_MORE = 10, 20


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def target_of(test):
    return f"tests/emulate/{test}" if test.startswith("emulated_") else f"tests/{test}"


def programs_of(test):
    """The programs that a test runs, as paths below the build folder."""
    return PROGRAMS_OF.get(test, ["tandem"]) if test.endswith(".py") else [target_of(test)]


class Unchanged:
    """The build of the unchanged sources: what depends on what, and how each file is compiled and linked."""

    def __init__(self, tests):
        if run(CONFIGURE).returncode != 0:
            sys.exit("error: the unchanged sources do not configure")
        targets = sorted({program for test in tests for program in programs_of(test)})
        if targets and subprocess.run(["cmake", "--build", str(BUILD), "--target", *targets], check=False).returncode:
            sys.exit("error: the unchanged sources do not compile")
        commands = json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))
        self.compile = {self.output_of(c["command"]): c["command"] for c in commands}
        self.dependents = collections.defaultdict(set)  # file: the objects that are compiled from it
        for line in run(["ninja", "-C", str(BUILD), "-t", "deps"]).stdout.splitlines():
            if line.startswith(" "):
                self.dependents[os.path.normpath(BUILD / line.strip())].add(output)
            elif line:
                output = line.split(": #deps")[0]
        self.locks = collections.defaultdict(threading.Lock)
        self.seconds = {}

    @staticmethod
    def output_of(command):
        words = shlex.split(command)
        return words[words.index("-o") + 1]

    @functools.cache
    def link(self, program):
        """The words of the command that links a program, and the objects that end up in it."""
        command = run(["ninja", "-C", str(BUILD), "-t", "commands", "-s", program]).stdout.strip()
        words = shlex.split(command.removeprefix(": && ").removesuffix(" && :"))
        at = words.index("-o") + 1
        traced = run([*words[:at], "/dev/null", *words[at + 1:], "-Wl,-t,-t"], cwd=BUILD)
        objects = set(re.findall(r"^\S+\.o$", traced.stdout, re.M))
        members = set(re.findall(r"^\((?:\S*/)?lib(\w+)\.a\)(\S+\.o)$", traced.stdout, re.M))
        for path in self.compile:
            library, _, name = path.partition(".dir/")
            if (library.rsplit("/", 1)[-1], name.rsplit("/", 1)[-1]) in members:
                objects.add(path)
        return words, objects

    def passes(self, test):
        """Whether a test passes without a bug, run where bugs are planted; the first call runs it."""
        with self.locks[test]:
            if test not in self.seconds:
                folder = new_folder(test)
                for program in programs_of(test):
                    hard_link(BUILD / program, folder / program)
                start = time.time()
                failed = failure(test, folder, ROOT, 600)
                if failed:
                    print(f"{test} without a bug: {failed[0]}\n{failed[1][-2000:]}")
                self.seconds[test] = None if failed else time.time() - start
            return self.seconds[test] is not None


def new_folder(name):
    """An empty folder for programs, which look for models and machines in the folders above them."""
    folder = PLANTED / str(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for needed in ["models", "machines"]:
        (folder / needed).symlink_to(ROOT / needed)
    return folder


def hard_link(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


def failure(test, build, root, seconds):
    """(what failed, output) of a test, or None if it passed."""
    programs = [str(build / program) for program in programs_of(test)]
    if test.endswith(".py"):
        command = [sys.executable, str(root / "tests" / test), *programs, "--failfast"]
    else:
        command = [*programs, "--gtest_brief=1", "--gtest_fail_fast"]
    is_kernel_test = test.startswith("gpu_") and not SLOW.search(test)
    for order in ["reverse", "forward", "shuffled"] if is_kernel_test else ["reverse"]:  # as in tests/gpu.cmake
        try:
            result = run(command, timeout=seconds, env={**os.environ, "TANDEM_GPU_ORDER": order})
        except subprocess.TimeoutExpired:
            return "hangs", f"no end after {seconds:.0f} s"
        if result.returncode != 0:
            output = result.stdout + result.stderr
            failed = re.search(r"^(?:\[  FAILED  \]|FAIL:|ERROR:) ([^\s,(]+)", output, re.M)
            return failed[1] if failed else f"aborted ({result.returncode})", output
    return None


class Planted:
    """One bug: a folder with the changed file, what is compiled from it and the programs that are linked with that."""

    def __init__(self, unchanged, number, path, changes):
        self.unchanged, self.path = unchanged, path
        text = (ROOT / path).read_text(encoding="utf-8")
        for old, new in changes:
            if old not in text:
                raise ValueError(f"{path} no longer contains: {old}")
            text = text.replace(old, new, 1)
        self.folder = new_folder(number)
        if path.startswith("tests/"):  # a script, which other scripts find beside them
            shutil.copytree(ROOT / "tests", self.folder / "tests")
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="utf-8")
        if path.startswith("tests/"):
            shutil.copymode(ROOT / path, self.folder / path)
        self.dependents = unchanged.dependents[str(ROOT / path)]
        self.compiled = {}

    def compile(self, output):
        if output not in self.compiled:
            changed = self.folder / "objects" / output
            changed.parent.mkdir(parents=True, exist_ok=True)
            words = []
            for word in shlex.split(self.unchanged.compile[output]):
                if word.startswith(f"-I{ROOT}"):
                    words.append(word.replace(str(ROOT), str(self.folder), 1))
                words.append(str(changed) if word == output else
                             str(self.folder / self.path) if word == str(ROOT / self.path) else word)
            result = run([*words, "-w"], cwd=BUILD)
            if result.returncode != 0:
                raise ValueError(f"does not compile: {result.stderr[-400:]}")
            self.compiled[output] = str(changed)
        return self.compiled[output]

    def link(self, program):
        """Links a program; false if it contains nothing of what was changed."""
        words, objects = self.unchanged.link(program)
        target = self.folder / program
        if target.exists() or not objects & self.dependents:
            if not target.exists():
                hard_link(BUILD / program, target)
            return bool(objects & self.dependents)
        changed = {output: self.compile(output) for output in sorted(objects & self.dependents)}
        at = words.index("-o") + 1
        # Members of archives come before the archives, which then have nothing to add.
        direct = [changed.pop(word, word) for word in words[:at]]
        target.parent.mkdir(parents=True, exist_ok=True)
        result = run([*direct, str(target), *changed.values(), *words[at + 1:]], cwd=BUILD)
        if result.returncode != 0:
            raise ValueError(f"does not link: {result.stderr[-400:]}")
        return True

    def caught_by(self, tests):
        """"TEST: CASE" of the first test that fails with the bug and passes without, and its output; or None."""
        for test in tests:
            reached = [self.link(program) for program in programs_of(test)]
            if not any(reached) and not self.path.startswith("tests/"):
                continue
            if not self.unchanged.passes(test):
                raise ValueError(f"{test} fails without a bug")
            root = self.folder if self.path.startswith("tests/") else ROOT
            failed = failure(test, self.folder, root, TIMES_AS_LONG * self.unchanged.seconds[test] + SECONDS_MORE)
            if failed:
                return f"{test}: {failed[0]}", failed[1]
        return None

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


def likely_tests(path):
    """The tests that know a file, those of the longest matching beginning of its path."""
    known = [start for start in TESTS_OF if path.startswith(start)]
    return TESTS_OF[max(known, key=len)] if known else []


def all_tests():
    found = [p.stem for p in (ROOT / "tests").glob("*_test.c[pu]*")]
    return sorted(found, key=lambda test: (bool(SLOW.search(test)), test))


def chosen_mutants(options):
    chosen = [m for m in MUTANTS if options.only in m[0] and re.search(options.files, m[1])]
    rest = [m for m in MUTANTS if m not in chosen]
    return chosen + random.Random(10).sample(rest, min(options.others, len(rest)))


def options_of(options):
    words = [f"--only {shlex.quote(options.only)}"] if options.only else []
    words += [f"--files {shlex.quote(options.files)}"] if options.files else []
    words += [f"--others {options.others}"] if options.others else []
    words += ["--likely"] if options.likely else []
    return "".join(word + " " for word in words)


def page(options, chosen, caught):
    """Markdown: a row for each file."""
    survived = [name for name, _, _ in chosen if not caught[name]]
    rows = collections.defaultdict(list)
    for name, path, _ in chosen:
        rows[path].append((caught[name] or "**survived**").split(":")[0])
    which = f"all {len(MUTANTS)}" if len(chosen) == len(MUTANTS) else (
        f"{len(chosen)} of {len(MUTANTS)}: those of the files `{options.files}` and {options.others} others at random")
    lines = ["# Planted bugs and the tests that caught them", "",
             f"{time.strftime('%Y-%m-%d')}, {options.write}. Bugs of `tools/planted_bugs/`: {which}.",
             f"The tests caught {len(chosen) - len(survived)} of {len(chosen)}.", "",
             *[f"* Survived: {name}" for name in survived],
             f"Command: `python3 tools/mutants.py {options_of(options)}--write MACHINE`", "",
             "| file | bugs | the tests that failed first |", "|---|---|---|"]
    for path, tests in sorted(rows.items()):
        lines.append(f"| {path} | {len(tests)} | {', '.join(sorted(set(tests)))} |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a bug's name")
    parser.add_argument("--files", default="", help="a regular expression that is found in the path of the file")
    parser.add_argument("--others", type=int, default=0, help="as many others, drawn at random")
    parser.add_argument("--likely", action="store_true", help="run only the tests that know the file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", metavar="MACHINE", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()

    chosen = chosen_mutants(options)
    more = [] if options.likely else all_tests()
    unchanged = Unchanged({test for _, path, _ in chosen for test in likely_tests(path)} | set(more))
    kept = BUILD / "caught"
    kept.mkdir(exist_ok=True)

    def caught(number, path, changes):
        tests = likely_tests(path)
        planted = Planted(unchanged, number, path, changes)
        found = planted.caught_by([*tests, *(test for test in more if test not in tests)])
        planted.remove()
        if found:
            (kept / f"{number}.txt").write_text(f"{chosen[number][0]}\n{found[0]}\n{found[1]}", encoding="utf-8")
        return found and found[0]

    results, start = {}, time.time()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(caught, number, path, changes): name
                   for number, (name, path, changes) in enumerate(chosen)}
        for done, future in enumerate(concurrent.futures.as_completed(waiting), 1):
            name = waiting[future]
            try:
                results[name] = future.result()
            except ValueError as problem:
                results[name] = None
                print(f"{name}: {problem}")
            left = (time.time() - start) / done * (len(chosen) - done)
            print(f"{done}/{len(chosen)} {name}: {results[name] or 'SURVIVED'} ({left:.0f} s left)", flush=True)
    n_caught = sum(bool(found) for found in results.values())
    print(f"{n_caught} of {len(chosen)} caught")
    if options.write:
        PAGE.write_text(page(options, chosen, results), encoding="utf-8")
    return 0 if n_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
