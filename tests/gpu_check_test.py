"""gpu_check.sh with fake programs: slow and failing ones, one that ignores SIGTERM, none with a GPU. The script must
write JSON, return the right status and end in time.

    python3 tests/gpu_check_test.py
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "gpu_check.sh"

# FAKE_<suite> sets what a suite does, FAKE_<tool>_<suite> what it does under compute-sanitizer.
TESTS = """#!/bin/bash
[ "$FAKE_GPU" = no ] && { echo "skipped: this machine has no NVIDIA driver"; exit 77; }
[ "$FAKE_GPU" = broken ] && exit 3
echo 'on NVIDIA "H200" 1\\0, compute capability 9.0, built with CUDA 12.8, driver for CUDA 13.0'
case "$1" in
  --gtest_list_tests)
    for suite in Wrappers. Families/Hybrid. Families/GpuGolden. GpuSwap. HybridSteps. GpuProducts. HybridBenchOnGpu. HandOffRow.; do
      echo "$suite"; echo "  One"; echo "  Two  # GetParam() = 1"
    done
    exit ;;
esac
suite=${1#--gtest_filter=}
suite=${suite%.\\*}
suite=${suite#*/}
does=FAKE_$suite
case "${!does}" in
  fails) exit 1 ;;
  skips) exit 77 ;;
  sleeps) sleep 100 ;;
  hangs) trap '' TERM; for i in {1..300}; do sleep 0.1; done ;;
esac
"""
TANDEM = """#!/bin/bash
[ "$1" = selftest ] && { [ "$FAKE_selftest" = fails ] && exit 1; echo "9 passed, 0 failed"; exit; }
[ "$1" = run ] && { [ "$FAKE_run" = fails ] && exit 1; echo '{"text": "834"}'; exit; }
what=$2
does=FAKE_bench_$what
echo "{\\"bench\\": \\"$what\\", \\"gpu_seconds\\": 1e-3}"
[ "${!does}" = fails ] && exit 1
if [ "${!does}" = sleeps ]; then printf '{"bench": "half'; sleep 100; fi
echo "{\\"bench\\": \\"$what\\", \\"all\\": \\"$*\\"}"
"""
SANITIZER = """#!/bin/bash
tool=$2
shift 4
does=FAKE_$tool
[ "${!does}" = sleeps ] && exec sleep 100
[ "${!does}" = fails ] && exit 1
exec "$@"
"""
SMI = """#!/bin/bash
echo "| NVIDIA-SMI 575.51   Driver Version: 575.51.03   CUDA Version: 13.0 |"
"""
KERNEL_SUITES = ["Wrappers", "HybridSteps", "GpuProducts"]
SUITES = ["Wrappers", "Families/Hybrid", "Families/GpuGolden", "GpuSwap", "HybridSteps", "GpuProducts", "HybridBenchOnGpu", "HandOffRow"]
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]


class Checked:
    """One run of the script; fakes and results are in a temporary folder."""

    def __init__(self, seconds=60, sanitizer=True, smi=True, **does):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            # As in a bundle, the script is beside the programs.
            (folder / "bundle").mkdir()
            shutil.copy(SCRIPT, folder / "bundle")
            self.write(folder / "bundle" / "gpu_tests_cuda", TESTS)
            self.write(folder / "bundle" / "tandem", TANDEM)
            (folder / "bin").mkdir()
            for tool in ("sh", "bash", "sed", "date", "dirname", "mkdir", "timeout", "sleep", "head", "tail", "tr"):
                (folder / "bin" / tool).symlink_to(shutil.which(tool))
            if sanitizer:
                self.write(folder / "bin" / "compute-sanitizer", SANITIZER)
            if smi:
                self.write(folder / "bin" / "nvidia-smi", SMI)
            env = {"PATH": str(folder / "bin"), "GPU_CHECK_SECONDS": str(seconds)}
            env.update({"FAKE_" + key: value for key, value in does.items()})
            start = time.monotonic()
            done = subprocess.run(["sh", folder / "bundle" / "gpu_check.sh", folder / "out"], env=env, capture_output=True,
                                  text=True, check=False, timeout=60)
            self.seconds = time.monotonic() - start
            self.status, self.said = done.returncode, done.stdout + done.stderr
            self.json = json.loads((folder / "out" / "gpu.json").read_text())
            self.log = (folder / "out" / "gpu.log").read_text()
        self.results = {r["name"]: r["result"] for r in self.json["results"]}

    @staticmethod
    def write(path, text):
        path.write_text(text)
        path.chmod(0o755)


def all_cases():
    """Runs all cases concurrently, because they mostly sleep."""
    cases = {
        "sound": {},
        "no_gpu": {"GPU": "no"},
        "broken": {"GPU": "broken"},
        "no_tools": {"sanitizer": False, "smi": False},
        "fails": {"GpuSwap": "fails", "Hybrid": "skips", "bench_mlp": "fails", "run": "fails", "selftest": "fails"},
        "sanitizer_fails": {"racecheck": "fails"},
        "hangs": {"seconds": 10, "Wrappers": "hangs", "Hybrid": "hangs"},
        "slow": {"seconds": 12, "bench_attention": "sleeps", "memcheck": "sleeps"},
    }
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        runs = {name: pool.submit(Checked, **how) for name, how in cases.items()}
        return {name: run.result() for name, run in runs.items()}


class Suites(unittest.TestCase):
    def test_each_has_one_fixture(self):
        """All GPU tests are linked into one program, in which GoogleTest refuses a suite with tests of several
        classes.
        """
        files, kinds = {}, {}
        for path in sorted((ROOT / "tests").glob("gpu_*_test.c*")):
            for kind, suite, name in re.findall(r"^(TEST(?:_F|_P)?)\((\w+), (\w+)\)", path.read_text(), re.M):
                self.assertEqual(files.setdefault((suite, name), path.name), path.name, f"{suite}.{name} twice")
                if kind != "TEST_P":  # suites of TEST_P are prefixed with the name of an instance
                    self.assertEqual(kinds.setdefault(suite, kind), kind, f"{suite}: {path.name}")
        self.assertGreater(len(kinds), 25)


class GpuCheck(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.runs = all_cases()

    def test_all_is_run_and_written_down(self):
        run = self.runs["sound"]
        self.assertEqual(run.status, 0, run.said)
        self.assertEqual(run.json["card"], "NVIDIA H200 10")
        self.assertEqual(run.json["compute_capability"], "9.0")
        self.assertEqual(run.json["cuda"], {"program": "12.8", "driver": "13.0"})
        self.assertEqual(run.json["driver_version"], "575.51.03")
        wanted = SUITES + ["self-test", "tiny-r1 on cpu", "tiny-r1 on cuda"] + [f"{t} {s}" for t in TOOLS for s in KERNEL_SUITES]
        benches = [name for name in run.results if name.startswith("bench ")]
        n_before = len(SUITES) + 3
        early = [name for name in run.results if name.startswith("early ")]
        self.assertEqual(early, ["early Families/GpuGolden", "early GpuProducts"])
        self.assertEqual([name for name in run.results if name not in early], wanted[:n_before] + benches + wanted[n_before:])
        self.assertEqual(set(run.results.values()), {"passed"}, run.results)
        rows = run.json["benchmarks"]
        self.assertEqual(len(rows), 2 * len(benches))
        self.assertTrue(any("--ctx 65536 --batch 1,16" in row.get("all", "") for row in rows), rows)
        self.assertTrue(any("attention" in row["bench"] and "--ctx 4096,65536 --context-limit 65536 --tokens 512" in row.get("all", "")
                            for row in rows), rows)
        self.assertEqual({row["bench"] for row in rows}, {"machine", "embed", "mlp", "moe", "attention", "layer", "hybrid", "generate",
                                                       "kernels", "products", "head"})
        self.assertIn("Driver Version", run.log)

    def test_without_a_gpu_it_is_skipped(self):
        run = self.runs["no_gpu"]
        self.assertEqual(run.status, 77, run.said)
        self.assertEqual(run.json["card"], "")
        self.assertEqual(run.json["benchmarks"], [])
        self.assertIn("no NVIDIA driver", run.said)

    def test_a_program_that_does_not_start(self):
        run = self.runs["broken"]
        self.assertEqual(run.status, 1, run.said)
        self.assertEqual(run.results, {"list of tests": "failed"})

    def test_missing_tools_are_said(self):
        run = self.runs["no_tools"]
        self.assertEqual(run.status, 0, run.said)
        self.assertEqual(run.results["compute-sanitizer"], "not installed")
        self.assertFalse([name for name in run.results if "check " in name])
        self.assertEqual(run.json["driver_version"], "")

    def test_what_fails_does_not_stop_the_rest(self):
        run = self.runs["fails"]
        self.assertEqual(run.status, 1, run.said)
        for name, result in run.results.items():
            wrong = name in ("GpuSwap", "self-test") or name.startswith(("bench mlp", "tiny-r1"))
            self.assertEqual(result, "failed" if wrong else "skipped" if name == "Families/Hybrid" else "passed", name)

    def test_a_sanitizer_that_finds_something(self):
        run = self.runs["sanitizer_fails"]
        self.assertEqual(run.status, 1, run.said)
        self.assertEqual({name for name, result in run.results.items() if result != "passed"},
                         {f"racecheck {suite}" for suite in KERNEL_SUITES})

    def test_tests_that_hang_leave_time_for_the_rest(self):
        run = self.runs["hangs"]
        self.assertEqual(run.status, 1, run.said)
        self.assertLess(run.seconds, 10 + 4)
        self.assertEqual(run.results["Wrappers"], "out of time")
        self.assertEqual(run.results["GpuProducts"], "not run")
        self.assertEqual(run.results["tiny-r1 on cuda"], "passed")
        self.assertGreater(len(run.json["benchmarks"]), 0)

    def test_slow_benchmarks_and_sanitizers_are_no_failure(self):
        run = self.runs["slow"]
        self.assertEqual(run.status, 0, run.said)
        self.assertLess(run.seconds, 12 + 4)
        self.assertEqual(run.results["memcheck Wrappers"], "out of time")
        self.assertEqual([run.results[suite] for suite in SUITES], ["passed"] * len(SUITES))
        rows = [row for row in run.json["benchmarks"] if row["bench"] == "attention"]
        self.assertGreater(len(rows), 0, "rows before the one it was ended in")
        self.assertTrue(all("gpu_seconds" in row for row in rows), rows)
        self.assertIn("not run", run.results.values())


if __name__ == "__main__":
    unittest.main(verbosity=1)
