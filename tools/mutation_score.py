"""The mutation score: the share of small changes that the tests catch.

Plants random small changes in a copy of the product code below build/mutation, all in one build, selected by a number
at run time. Records which tests reach each mutant, and runs those, the fastest first, until one fails. A mutant that
no test catches shows a gap in the tests or has no observable effect; the latter are argued one by one in the file of
equivalents.

    python3 tools/mutation_score.py --seed 1 [--n 100] [--only FOLDER] [--tests REGEX] [--list]

An interrupted run continues where it stopped. The resulting page is also kept in build/mutation/runs.
tools/mutation/drawing.py describes the draw.
"""
import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from mutation import building, drawing, report, schemata, testing

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build" / "libclang"
EQUIVALENTS = "docs/measurements/equivalent_mutants.json"
SECONDS_BETWEEN_LINES = 20


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def options():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--n", type=int, default=100, help="mutants (100)")
    parser.add_argument("--only", default="", help="a folder or a file of product code")
    parser.add_argument("--tests", default="", help="only tests of ctest whose names match this")
    parser.add_argument("--list", action="store_true", help="show what would be planted, build nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT, help="sources to measure (this checkout)")
    parser.add_argument("--equivalents", type=pathlib.Path, help=f"({EQUIVALENTS} of the tree)")
    chosen = parser.parse_args()
    if not 1 <= chosen.n < schemata.MOST_MUTANTS:
        fail(f"--n {chosen.n}: from 1 to {schemata.MOST_MUTANTS - 1}")
    if chosen.jobs < 1:
        fail(f"--jobs {chosen.jobs}: at least 1")
    try:
        re.compile(chosen.tests)
    except re.error as problem:
        fail(f"--tests {chosen.tests}: {problem}")
    chosen.tree = chosen.tree.resolve()
    if not (chosen.tree / "CMakeLists.txt").exists():
        fail(f"--tree {chosen.tree}: there is no CMakeLists.txt")
    if not drawing.product_files(chosen.tree, chosen.only):
        fail(f"--only {chosen.only}: no product code there; it is in {', '.join(drawing.PRODUCT)}")
    return chosen


def with_libclang():
    """Restarts in the Python that has the package, installing it if necessary."""
    if importlib.util.find_spec("clang"):
        return
    python = PACKAGE / "bin" / "python"
    if not (PACKAGE / "complete").exists():
        subprocess.run([str(ROOT / "tools" / "client_packages.sh")], check=False, stdout=sys.stderr)
    if not (PACKAGE / "complete").exists():
        fail(f"the package libclang is not in {PACKAGE} and cannot be installed")
    os.execv(python, [str(python), *sys.orig_argv[1:]])


class Progress:
    """Progress lines with rate and remaining time, at most one every few seconds."""

    def __init__(self, what):
        self.what, self.start, self.first, self.total, self.said = what, time.monotonic(), 0, None, 0

    def __call__(self, done, total, more=""):
        now = time.monotonic()
        if total != self.total:
            self.start, self.first, self.total = now, done, total
        if more or done == total or now - self.said > SECONDS_BETWEEN_LINES:
            rate = (done - self.first) / max(now - self.start, 1e-3)
            left = f", {60 * rate:.1f} a minute, {(total - done) / rate / 60:.0f} min left" if rate > 0 and done < total else ""
            print(f"{self.what} {done}/{total}{left}{': ' + more if more else ''}", file=sys.stderr, flush=True)
            self.said = now


class Run:
    """The state of one seed below build/mutation/runs, written during the run."""

    def __init__(self, chosen):
        slug = "_".join([str(chosen.seed), str(chosen.n), *chosen.only.strip("/").split("/")]).strip("_")
        self.folder = chosen.tree / "build" / "mutation" / "runs" / slug
        key = json.dumps([tree_hash(chosen.tree), chosen.seed, chosen.n, chosen.only, chosen.tests])
        if self.read("key") != key:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self.write("key", key)
        else:
            print(f"goes on with {self.folder}", file=sys.stderr)

    def read(self, name):
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, name, value):
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(value), encoding="utf-8")
        part.replace(self.folder / f"{name}.json")


def tree_hash(tree):
    """A hash of all files that a build or a test could read, without Markdown pages and these tools."""
    digest = hashlib.sha256()
    for name in building.tree_files(tree):
        if not name.endswith(".md") and name != EQUIVALENTS and "mutation" not in name:
            digest.update(name.encode() + b"\0" + (tree / name).read_bytes())
    return digest.hexdigest()


def reader(tree, units, jobs):
    """Reads the sites of several files, each in a separate process."""
    system = subprocess.run(["c++", "-print-file-name=include"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    cache = tree / "build" / "mutation" / "sites"

    def read(files):
        progress, found = Progress("reading the syntax of files:"), {}
        with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
            waiting = {pool.submit(drawing.read_sites, str(tree / f), *units.in_tree(f), system, str(cache)): f for f in files}
            for done in concurrent.futures.as_completed(waiting):
                found[waiting[done]] = done.result()
                progress(len(found), len(files))
        return found
    return read


def plant(chosen, run, copy):
    """Builds the mutants of this run: those of an interrupted run, or new ones, drawn until all of them compile."""
    copy.prepare()
    copy.configure()
    units = drawing.Units(copy.original, copy.tree, copy.compile_commands())
    targets = copy.targets(chosen.tests)
    if not targets:
        fail(f"--tests {chosen.tests}: no such test")
    known = run.read("mutants")
    if known:
        mutants = [drawing.Mutant.of(record) for record in known]
        copy.update(mutants)
        copy.make(targets, Progress("building"))
        return mutants
    draw = drawing.Draw(copy.original, units, chosen.seed, chosen.n, chosen.only, reader(copy.original, units, chosen.jobs))
    draw.fill()
    dropped, waiting = 0, True
    started = tree_hash(chosen.tree)
    while waiting:
        copy.update(draw.mutants)
        if tree_hash(chosen.tree) != started:
            fail("the sources changed while mutants were planted: measure another checkout with --tree")
        bad = copy.check_syntax(units) or copy.make(targets, Progress("building"))
        draw.drop(bad)
        dropped += len(bad)
        if bad:
            print(f"{len(bad)} mutants do not compile and are replaced", file=sys.stderr)
            draw.fill()
        waiting = bool(bad)
    run.write("dropped", dropped)
    run.write("mutants", [m.record() for m in draw.mutants])
    return draw.mutants


def show(chosen, copy):
    copy.prepare()
    copy.configure()
    units = drawing.Units(copy.original, copy.tree, copy.compile_commands())
    draw = drawing.Draw(copy.original, units, chosen.seed, chosen.n, chosen.only, reader(copy.original, units, chosen.jobs))
    draw.fill()
    for mutant in sorted(draw.mutants, key=lambda m: (m.file, m.site.start)):
        print(f"{mutant.file}:{mutant.line}: {mutant.site.kind}\n  - {mutant.before}\n  + {mutant.after}")


def measured(chosen, run, copy, runner):
    """The tests that pass without a mutant, with the mutants they reach, and the names of those that fail."""
    known = run.read("tests")
    if known is None:
        passed, failing = testing.measure(testing.listed(copy.build, chosen.tests), runner, Progress("tests without a mutant:"))
        known = {"passed": [dataclasses.asdict(t) for t in passed], "failing": failing}
        run.write("tests", known)
    return [testing.Test(**t) for t in known["passed"]], known["failing"]


def try_all(mutants, tests, runner, run):
    results = {r["number"]: r for r in run.read("results") or []}
    progress = Progress("mutants")
    left = [m for m in mutants if m.number not in results]
    for mutant, result in runner.each(lambda m: testing.catch(m.number, tests, runner), left):
        results[mutant.number] = result
        run.write("results", list(results.values()))
        by = f" ({result['test']}: {result['what']})" if result["test"] else ""
        progress(len(results), len(mutants), f"{mutant.file}:{mutant.line} {mutant.site.kind}: {result['status']}{by}")
    return results


def without_unsteady(mutants, tests, runner, run):
    """A test that caught a mutant must pass without one; otherwise its mutants are run again with the other tests."""
    notes = []
    while True:
        results = try_all(mutants, tests, runner, run)
        catching = {r["test"] for r in results.values() if r["test"]}
        again = [t for t in tests if t.name in catching]
        outcomes = runner.each(lambda t: runner.run(t, 0, testing.limit(t)), again)
        unsteady = {test.name for test, outcome in outcomes if outcome.status != "passed"}
        if not unsteady:
            return results, notes
        notes += [f"{name} failed without a mutant when it was run again, and is not used" for name in sorted(unsteady)]
        tests = [t for t in tests if t.name not in unsteady]
        run.write("results", [r for r in results.values() if r["test"] not in unsteady])


def interrupt(*_):
    raise KeyboardInterrupt


def main():
    signal.signal(signal.SIGTERM, interrupt)
    chosen = options()
    with_libclang()
    path = chosen.equivalents or chosen.tree / EQUIVALENTS
    try:
        equivalents = report.read_equivalents(path)
    except report.BadEquivalents as problem:
        fail(problem)
    place = chosen.tree / "build" / "mutation"
    copy = building.Copy(chosen.tree, place, chosen.jobs)
    runner = testing.Runner(place, chosen.jobs)
    try:
        if chosen.list:
            return show(chosen, copy)
        run = Run(chosen)
        mutants = plant(chosen, run, copy)
        tests, failing = measured(chosen, run, copy, runner)
        results, unsteady = without_unsteady(mutants, tests, runner, run)
    except building.BuildError as problem:
        fail(problem)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        runner.stop()
    notes = [f"{run.read('dropped')} draws did not compile and were replaced",
             *([f"only {len(mutants)} of {chosen.n} mutants: there are no more sites"] if len(mutants) < chosen.n else []),
             *(f"not used, as it fails without a mutant: {name}" for name in failing), *unsteady]
    where = f" in {chosen.only}" if chosen.only else ""
    text = report.page(f"Mutation score: seed {chosen.seed}, {len(mutants)} mutants{where}", mutants, results, equivalents, notes)
    (run.folder / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
