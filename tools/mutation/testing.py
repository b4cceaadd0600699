"""The tests of a build: which mutants each test reaches, measured by running it once, and whether one of them catches
a mutant.
"""
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from . import schemata

SPLIT_SECONDS = 4  # a GoogleTest program that takes longer is run case by case
MOST_SECONDS = 3600
TIMES, PLUS_SECONDS = 5, 10  # time limit of a mutant, relative to the test's time without it
FIRST_FAILURE = re.compile(r"^(?:\[  FAILED  \]|FAIL:|ERROR:) ([^\s,(]+)", re.M)
# Python's tests also stop at the first failure, for which unittest has no environment variable.
FAIL_FAST = """import unittest
run = unittest.TestProgram.__init__
unittest.TestProgram.__init__ = lambda self, *a, **k: run(self, *a, **{"failfast": True, **k})
"""
SECONDS_BETWEEN_LOOKS = 0.25  # at the memory of a running test
TOO_MUCH_MEMORY = -signal.SIGKILL


@dataclasses.dataclass
class Test:
    name: str
    command: list
    folder: str
    variables: dict
    skipped: int = 0  # the exit status that means skipped
    seconds: float = 0
    reaches: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Outcome:
    status: str  # "passed", "skipped", "failed", "crashed" or "timed out"
    seconds: float
    what: str = ""
    reached: list = dataclasses.field(default_factory=list)


class Runner:
    """Runs tests with limits, each in a temporary folder, and ends their remaining processes."""

    def __init__(self, place, jobs):
        self.place, self.jobs = place, jobs
        self.helpers = place / "fail_fast"
        self.helpers.mkdir(parents=True, exist_ok=True)
        (self.helpers / "sitecustomize.py").write_text(FAIL_FAST, encoding="utf-8")
        # Some tests reserve memory, or create files with holes, as large as R1, which take no room. So what a test
        # may write is limited, not what it may reserve.
        self.limits = f"ulimit -c 0; ulimit -f {2 << 30}; exec \"$@\""
        self.memory_pages = os.sysconf("SC_PHYS_PAGES") // (jobs + 1)
        self.running, self.lock, self.stopped = set(), threading.Lock(), False

    def run(self, test, mutant, limit):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="run", dir=self.place))
        marks = folder / "reached"
        marks.write_bytes(bytes(schemata.MOST_MUTANTS))
        for name in ("tmp", "cache"):
            (folder / name).mkdir()
        variables = {**os.environ, **test.variables, "TANDEM_MUTANT": str(mutant), "TANDEM_REACHED": str(marks),
                     "TMPDIR": str(folder / "tmp"), "TEST_TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache"),
                     "GTEST_FAIL_FAST": "1", "PYTHONPATH": str(self.helpers)}
        start = time.monotonic()
        try:
            with open(folder / "output", "wb") as output:
                status = self.wait(["sh", "-c", self.limits, "sh", *test.command], limit, cwd=test.folder, env=variables,
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            seconds = time.monotonic() - start
            with open(folder / "output", "rb") as output:
                text = output.read(1 << 20).decode("utf-8", "replace")
            reached = [i for i, mark in enumerate(marks.read_bytes()) if mark]
        finally:
            subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=False)
            shutil.rmtree(folder, ignore_errors=True)
        first = FIRST_FAILURE.search(text)
        what = first[1] if first else (text.strip().splitlines() or [""])[-1][:120]
        return Outcome(self.in_words(status, test), seconds, what, reached)

    @staticmethod
    def in_words(status, test):
        if status is None:
            return "timed out"
        if status == 0:
            return "passed"
        if status == test.skipped:
            return "skipped"
        return "crashed" if status < 0 or status > 128 else "failed"

    def each(self, function, items):
        """Yields (item, function(item)) in the order of completion. An interruption ends running tests."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(function, item): item for item in items}
            try:
                for done in concurrent.futures.as_completed(waiting):
                    yield waiting[done], done.result()
            except BaseException:
                self.stop()
                raise

    def wait(self, command, limit, **more):
        """The exit status, None if the command did not end in time, or TOO_MUCH_MEMORY. Its process group is ended."""
        with self.lock:
            if self.stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(command, start_new_session=True, **more)
            self.running.add(process)
        end = time.monotonic() + limit
        try:
            while time.monotonic() < end:
                try:
                    return process.wait(min(SECONDS_BETWEEN_LOOKS, max(end - time.monotonic(), 0)))
                except subprocess.TimeoutExpired:
                    if resident_pages(process.pid) > self.memory_pages:
                        return TOO_MUCH_MEMORY
            return None
        finally:
            self.end(process)

    def end(self, process):
        with self.lock:
            self.running.discard(process)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def stop(self):
        with self.lock:
            self.stopped = True
            left = list(self.running)
        for process in left:
            self.end(process)


def resident_pages(group):
    """Pages of memory of the processes of a group."""
    pages = 0
    for stat in (pathlib.Path("/proc", name, "stat") for name in os.listdir("/proc") if name.isdigit()):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[2]) == group:
            pages += int(fields[21])
    return pages


def listed(build, only):
    """The tests that ctest would run."""
    shown = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], stdout=subprocess.PIPE, check=True)
    tests = []
    for entry in json.loads(shown.stdout)["tests"]:
        properties = {p["name"]: p["value"] for p in entry.get("properties", [])}
        if "command" in entry and re.search(only, entry["name"]):
            variables = dict(v.split("=", 1) for v in properties.get("ENVIRONMENT", []))
            tests.append(Test(entry["name"], entry["command"], properties.get("WORKING_DIRECTORY", str(build)), variables,
                              int(properties.get("SKIP_RETURN_CODE", 0))))
    return tests


def cases(test):
    """The cases of a GoogleTest program as separate tests; any other test unchanged."""
    if len(test.command) > 1:
        return [test]
    try:
        shown = subprocess.run([*test.command, "--gtest_list_tests"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               check=False, timeout=60, cwd=test.folder)
    except (OSError, subprocess.TimeoutExpired):
        return [test]
    found, suite = [], ""
    for line in shown.stdout.splitlines():
        name = line.split("#")[0].rstrip()
        if name.endswith(".") and not name.startswith(" "):
            suite = name
        elif suite and name.startswith("  ") and "DISABLED_" not in suite + name:
            found.append(suite + name.strip())
    if shown.returncode or len(found) < 2:
        return [test]
    return [dataclasses.replace(test, name=f"{test.name}: {name}", command=[*test.command, f"--gtest_filter={name}"]) for name in found]


def measure(tests, runner, progress):
    """Runs each test without a mutant. Returns the passing ones with the mutants they reach, and messages of the
    failing ones.
    """
    passed, longer, failing = [], [], []

    def run_all(some, long_ones):
        for done, (test, outcome) in enumerate(runner.each(lambda t: runner.run(t, 0, MOST_SECONDS), some), 1):
            progress(done, len(some))
            known = dataclasses.replace(test, seconds=outcome.seconds, reaches=outcome.reached)
            if outcome.status in ("failed", "crashed", "timed out"):
                failing.append(f"{test.name} ({outcome.status}: {outcome.what})")
            elif outcome.status == "passed" and outcome.reached:
                (long_ones if outcome.seconds > SPLIT_SECONDS else passed).append(known)

    run_all(tests, longer)
    parts = [part for test in longer for part in cases(test)]
    passed += [test for test in longer if test in parts]
    run_all([part for part in parts if part not in longer], passed)
    return passed, sorted(failing)


def limit(test):
    return TIMES * test.seconds + PLUS_SECONDS


def catch(number, tests, runner):
    """The result of a mutant: {"status", "test", "what", "seconds", "tests"}. The fastest test that reaches it runs
    first.
    """
    reaching = sorted((t for t in tests if number in t.reaches), key=lambda t: t.seconds)
    start = time.monotonic()
    result = {"number": number, "status": "survived" if reaching else "not reached", "test": "", "what": "", "tests": len(reaching)}
    for test in reaching:
        outcome = runner.run(test, number, limit(test))
        if outcome.status not in ("passed", "skipped"):
            result.update(status=outcome.status, test=test.name, what=outcome.what)
            break
    return {**result, "seconds": round(time.monotonic() - start, 1)}
