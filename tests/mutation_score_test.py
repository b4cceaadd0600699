"""tools/mutation_score.py on a small generated tree with one library and two tests. Skipped without libclang
(build/libclang).

    python3 tests/mutation_score_test.py
"""
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
testing = importlib.import_module("mutation.testing")
CMAKE = """cmake_minimum_required(VERSION 3.25)
project(small CXX)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
add_library(small STATIC src/small.cpp)
target_include_directories(small PUBLIC src)
enable_testing()
foreach(name first second)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} small)
  add_test(NAME ${name} COMMAND ${name})
endforeach()
add_test(NAME broken COMMAND ${CMAKE_COMMAND} -E false)
"""
HEADER = """#pragma once
inline int ignored(int a, int b) { return a + b; }
int sum_until(int end);
int unused(int x);
int doubled();
void wait_for(bool& ready);
"""
# The bound of an array must be constant, so no mutant of `n` compiles.
LIBRARY = """#include "small.h"
int sum_until(int end) {
  int sum = 0;
  for (int i = 0; i < end; ++i) sum += i;
  return sum;
}
int unused(int x) { return x - 7; }
int doubled() {
  const int n = 4;
  struct { char bytes[n]; } room;
  return sizeof room;
}
void wait_for(bool& ready) {
  while (!ready) ready = true;
}
"""
FIRST = '#include "small.h"\nint main() { return sum_until(3) == 3 ? 0 : 1; }\n'
SECOND = '#include "small.h"\nint main() { bool r = false; wait_for(r); ignored(1, 2); return r && doubled() ? 0 : 1; }\n'


def run(tree, *arguments):
    return subprocess.run([sys.executable, str(ROOT / "tools" / "mutation_score.py"), "--tree", str(tree), *arguments],
                          capture_output=True, text=True, check=False)


class MutationScore(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.tree = pathlib.Path(cls.folder.name).resolve() / "tree"
        (cls.tree / "src").mkdir(parents=True)
        for name, text in (("CMakeLists.txt", CMAKE), ("src/small.h", HEADER), ("src/small.cpp", LIBRARY), ("first.cpp", FIRST),
                           ("second.cpp", SECOND)):
            (cls.tree / name).write_text(text, encoding="utf-8")
        cls.result = run(cls.tree, "--seed", "1", "--n", "60")
        cls.page = cls.result.stdout

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def results(self):
        folder = self.tree / "build" / "mutation" / "runs" / "1_60"
        status = {r["number"]: r for r in json.loads((folder / "results.json").read_text(encoding="utf-8"))}
        mutants = json.loads((folder / "mutants.json").read_text(encoding="utf-8"))
        return [(m["before"], m["after"], m["site"]["kind"], status[m["number"]]) for m in mutants]

    def of(self, words):
        found = [result for before, after, kind, result in self.results() if words in before]
        self.assertTrue(found, f"{words}: {self.page}")
        return found

    def test_what_a_test_notices_is_caught(self):
        self.assertEqual(self.result.returncode, 0, self.result.stderr)
        caught = [r for r in self.of("i < end") if r["status"] != "survived"]  # the sum is the same without i = 0
        self.assertTrue(caught)
        for result in caught:
            self.assertIn(result["status"], ("failed", "timed out"))
            self.assertEqual(result["test"], "first")

    def test_an_endless_loop_is_caught(self):
        self.assertEqual({r["status"] for r in self.of("ready = true;")}, {"failed", "timed out"})

    def test_what_no_test_notices_survives(self):
        for result in self.of("return a + b"):
            self.assertEqual((result["status"], result["tests"]), ("survived", 1))

    def test_what_no_test_reaches_is_told_apart(self):
        unreached = {r["status"] for before, after, kind, r in self.results() if "x - 7" in before}
        self.assertEqual(unreached, {"not reached"})
        self.assertRegex(self.page, r"- src/small.cpp:7, \w+, not reached\n  - `int unused\(int x\) { return x - 7; }`")

    def test_what_does_not_compile_is_replaced(self):
        self.assertFalse([before for before, after, kind, r in self.results() if "const int n" in before])
        self.assertRegex(self.page, r"[1-9]\d* draws did not compile")

    def test_a_test_that_fails_by_itself_is_not_used(self):
        self.assertIn("fails without a mutant: broken", self.page)

    def test_the_table_adds_up(self):
        cells = re.search(r"^\| all \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) of (\d+)", self.page, re.M)
        n, failed, crashed, late, survived, unreached, equivalent, caught, left = (int(cell) for cell in cells.groups())
        self.assertEqual(n, len(self.results()))
        self.assertEqual(caught, failed + crashed + late)
        self.assertEqual(n, caught + survived + unreached + equivalent)
        self.assertEqual(left, n - equivalent)

    def test_a_second_run_goes_on_where_the_first_ended(self):
        folder = self.tree / "build" / "mutation" / "runs" / "1_60"
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        (folder / "results.json").write_text(json.dumps(results[:-1]), encoding="utf-8")
        again = run(self.tree, "--seed", "1", "--n", "60")
        self.assertIn("goes on with", again.stderr)
        self.assertEqual(again.stdout, self.page)
        self.assertEqual(len(re.findall(r"^mutants ", again.stderr, re.M)), 1)

    def test_argued_equivalents_leave_the_score(self):
        before, after, *_ = next(r for r in self.results() if "x - 7" in r[0])
        path = self.tree / "build" / "equivalents.json"
        entry = {"file": "src/small.cpp", "before": before, "after": after, "reason": "as nothing calls it"}
        left_out = {"file": "src/small.cpp", "before": "x = 1;", "after": "", "reason": "as x is 1"}
        path.write_text(json.dumps([entry, left_out]), encoding="utf-8")
        page = run(self.tree, "--seed", "1", "--n", "60", "--equivalents", str(path)).stdout
        self.assertIn("## Equivalent", page)
        self.assertIn("as nothing calls it", page)

    def test_the_arguments_of_this_repository_are_read(self):
        path = ROOT / "docs" / "measurements" / "equivalent_mutants.json"
        listed = run(self.tree, "--seed", "1", "--n", "3", "--only", "src/small.cpp", "--list", "--equivalents", str(path))
        self.assertEqual((listed.returncode, listed.stdout == ""), (0, False), listed.stderr)

    def test_the_list_is_the_draw(self):
        listed = run(self.tree, "--seed", "1", "--n", "3", "--only", "src/small.cpp", "--list")
        self.assertEqual(len(re.findall(r"^src/small.cpp:\d+: ", listed.stdout, re.M)), 3)
        self.assertEqual(run(self.tree, "--seed", "1", "--n", "3", "--only", "src/small.cpp", "--list").stdout, listed.stdout)
        self.assertNotEqual(run(self.tree, "--seed", "2", "--n", "3", "--only", "src/small.cpp", "--list").stdout, listed.stdout)

    def test_bad_input_is_one_line(self):
        bad = self.tree / "build" / "bad.json"
        bad.write_text('[{"file": "src/small.cpp"}]', encoding="utf-8")
        for arguments, words in ((["--seed", "x"], "--seed"), ([], "--seed"), (["--seed", "1", "--n", "0"], "--n 0"),
                                 (["--seed", "1", "--jobs", "0"], "--jobs 0"),
                                 (["--seed", "1", "--only", "nowhere"], "--only nowhere"),
                                 (["--seed", "1", "--tests", "nothing"], "--tests nothing"),
                                 (["--seed", "1", "--tests", "("], "--tests ("),
                                 (["--seed", "1", "--equivalents", str(bad)], "entry 1")):
            result = run(self.tree, *arguments)
            self.assertEqual((result.returncode, result.stdout), (2, ""), arguments)
            self.assertRegex(result.stderr, r"^error: [^\n]*\n$", arguments)
            self.assertIn(words, result.stderr)


class Memory(unittest.TestCase):
    def outcome(self, python):
        """What a test's run ends with if it may write 100 MB."""
        with tempfile.TemporaryDirectory() as folder:
            runner = testing.Runner(pathlib.Path(folder), 1)
            runner.memory_pages = (100 << 20) // os.sysconf("SC_PAGE_SIZE")
            return runner.run(testing.Test("memory", [sys.executable, "-c", python], folder, {}), 0, 20)

    def test_reserved_memory_is_not_limited(self):
        no_reserve = 0x4000  # MAP_NORESERVE
        outcome = self.outcome(f"import mmap; m = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | {no_reserve}); m[1] = 1")
        self.assertEqual(outcome.status, "passed", outcome.what)

    def test_a_test_that_fills_the_memory_has_crashed(self):
        outcome = self.outcome("import time; m = bytearray(b'x') * (300 << 20); time.sleep(20)")
        self.assertEqual(outcome.status, "crashed")
        self.assertLess(outcome.seconds, 10)

    def test_memory_of_other_processes_counts(self):
        child = "import time; m = bytearray(b'x') * (300 << 20); time.sleep(20)"
        self.assertEqual(self.outcome(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])").status, "crashed")

    def test_a_test_that_does_not_end_has_timed_out(self):
        with tempfile.TemporaryDirectory() as folder:
            test = testing.Test("endless", ["sleep", "20"], folder, {})
            self.assertEqual(testing.Runner(pathlib.Path(folder), 1).run(test, 0, 0.6).status, "timed out")


if __name__ == "__main__":
    if not (ROOT / "build" / "libclang" / "complete").exists():
        print("skipped: libclang is not installed (tools/client_packages.sh)")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1])
