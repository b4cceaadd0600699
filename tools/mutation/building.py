"""A copy of the tree with the mutants in it, and its build. Mutants that do not compile are found by the lines of the
errors.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess

from . import schemata
from .drawing import in_words

LEFT_OUT = {"build", ".git", "__pycache__"}
# A compiler cache provides unchanged files where there is one. One file a unit, so that a mutant recompiles one file.
CONFIGURE = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -DNDEBUG", "-DTANDEM_CUDA=off"]
PLACE = re.compile(r"([^\s:]+):(\d+)(?::\d+)?[:,]")
ERROR = re.compile(r"^([^\s:]+):(\d+):\d+: (?:fatal )?error:", re.M)


class BuildError(Exception):
    pass


def run(command, **more):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False, **more)


def tree_files(tree):
    for folder, folders, files in os.walk(tree):
        folders[:] = sorted(f for f in folders if f not in LEFT_OUT)
        for file in sorted(files):
            if file not in LEFT_OUT:
                yield (pathlib.Path(folder) / file).relative_to(tree).as_posix()


class Copy:
    """The tree below `place`/tree, built where its programs find their files (core/program_files.h)."""

    def __init__(self, tree, place, jobs):
        self.original, self.place, self.tree, self.jobs = tree, place, place / "tree", jobs
        self.build = self.tree / "build" / "release"
        self.mutants = {}  # {file: [Mutant]}
        self.lines = {}  # {file: {number of a mutant: (its first line, its last line)}}

    def prepare(self):
        """Copies what CMake needs. Files that another run mutated are not rewritten, which would compile them
        needlessly.
        """
        for name in tree_files(self.original):
            if not (self.tree / name).exists() or name.endswith((".txt", ".cmake", ".in")):
                self.write(self.tree / name, (self.original / name).read_bytes())

    def update(self, mutants=()):
        """Writes only the files that differ, so that only those are compiled again."""
        self.mutants, self.lines = {}, {}
        for mutant in mutants:
            self.mutants.setdefault(mutant.file, []).append(mutant)
        wanted = set(tree_files(self.original))
        for name in wanted:
            content = (self.original / name).read_bytes()
            if name in self.mutants:
                text, self.lines[name] = schemata.planted(content.decode("latin-1"), self.mutants[name])
                content = text.encode("latin-1")
            self.write(self.tree / name, content)
            shutil.copymode(self.original / name, self.tree / name)
        for name in set(tree_files(self.tree)) - wanted:
            (self.tree / name).unlink()
        packages = self.original / "build" / "clients"  # tools/client_packages.sh
        if packages.exists() and not (self.tree / "build" / "clients").exists():
            (self.tree / "build").mkdir(exist_ok=True)
            (self.tree / "build" / "clients").symlink_to(packages.resolve())

    @staticmethod
    def write(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)

    def configure(self):
        runtime = self.place / "runtime"
        self.write(runtime / "runtime.cpp", schemata.RUNTIME.encode())
        self.write(runtime / "mutation.cmake", schemata.CMAKE.encode())
        cached = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        result = run(["cmake", "-S", str(self.tree), "-B", str(self.build), f"-DCMAKE_PROJECT_INCLUDE={runtime / 'mutation.cmake'}",
                      *cached, *CONFIGURE])
        if result.returncode:
            raise BuildError("the copy does not configure: " + result.stdout.strip()[-600:])

    def compile_commands(self):
        return json.loads((self.build / "compile_commands.json").read_text(encoding="utf-8"))

    def targets(self, only):
        """The build targets of the tests whose names match `only`."""
        found = set()
        for file in sorted(self.build.rglob("CTestTestfile.cmake")):
            for name, command in re.findall(r'^add_test\((?:\[=\[)?(.+?)(?:\]=\])? "(.*)"\)$', file.read_text(encoding="utf-8"), re.M):
                if re.search(only, name):
                    below = [os.path.relpath(os.path.normpath(w), self.build) for w in command.split('" "')
                             if w.startswith(f"{self.build}/")]
                    found.update(below)
        return sorted(found)

    def check_syntax(self, units):
        """Numbers of mutants that do not compile in the first unit that contains them."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            wrong = {name: output for name, output in zip(self.lines, pool.map(lambda n: self.compile(units, n), self.lines)) if output}
        bad = set()
        for name, output in wrong.items():
            bad |= self.blamed(output, ERROR) or self.wrong_alone(units, name)
        return bad or {m for name in wrong for m in self.lines[name]}

    def compile(self, units, name):
        """The compiler's output for the unit with this file, '' if it compiles."""
        entry = units.command(name)
        compiler, source, flags = in_words(entry)
        result = run([compiler, *flags, "-w", "-fsyntax-only", source], cwd=entry["directory"])
        return result.stdout or f"status {result.returncode}" if result.returncode else ""

    def wrong_alone(self, units, name):
        """Tries each mutant alone, because an error may be far from its mutant."""
        path = self.tree / name
        everything = path.read_bytes()
        text = (self.original / name).read_bytes().decode("latin-1")

        def fails(mutants):
            path.write_bytes(schemata.planted(text, mutants)[0].encode("latin-1"))
            return self.compile(units, name) != ""
        # If the unit fails without mutants, the cause is in another file.
        bad = set() if fails([]) else {m.number for m in self.mutants[name] if fails([m])}
        path.write_bytes(everything)
        return bad

    def make(self, targets, progress):
        """Builds, and returns the numbers of mutants that do not compile."""
        command = ["ninja", "-C", str(self.build), "-k", "0", "-j", str(self.jobs), *targets]
        lines = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
            for line in process.stdout:
                lines.append(line)
                step = re.match(r"\[(\d+)/(\d+)\]", line)
                if step:
                    progress(int(step[1]), int(step[2]))
        if process.returncode == 0:
            return set()
        output = "".join(lines)
        bad = self.blamed(output, ERROR) or self.blamed(output, PLACE)
        if not bad:
            raise BuildError("the copy does not build: " + " ".join(output[-1500:].split()))
        return bad

    def blamed(self, output, pattern):
        """Mutants at the places that the matches of the pattern name."""
        found = set()
        for path, number in pattern.findall(output):
            name = os.path.relpath(os.path.normpath(os.path.join(self.build, path)), self.tree)
            found |= {m for m, (first, last) in self.lines.get(name, {}).items() if first <= int(number) <= last}
        return found
