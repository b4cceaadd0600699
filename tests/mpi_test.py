"""Ranks as processes: mpi_ranks under the launchers of Open MPI and MPICH, as far as they are installed, with ranks
that are killed or stopped.

    python3 tests/mpi_test.py PATH_OF_MPI_RANKS
"""
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from mpi_launcher import LAUNCHERS, is_alive, launch

RANKS = ""
PATIENCE = 2  # seconds


class Job:
    """N ranks under a launcher."""

    def __init__(self, launcher, n, *arguments):
        self.folder = tempfile.TemporaryDirectory()
        command, environment = launch(launcher, [(n, [RANKS, *arguments])], self.folder.name)
        self.ranks = []  # their processes, once known
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)

    def processes(self, n):
        """The process of each rank, once all have said it."""
        found = {}
        while len(found) < n:
            said = re.match(r"rank (\d+) is process (\d+)", self.process.stdout.readline())
            if said:
                found[int(said[1])] = int(said[2])
        self.ranks = list(found.values())
        return found

    def end(self, seconds=120):
        """What was printed, and the status."""
        try:
            output = self.process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            kill(self.ranks)
            raise
        finally:
            self.process.kill()
            self.folder.cleanup()
        return output, self.process.returncode


def kill(processes):
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_until_gone(processes):
    """The processes that are not gone after ten seconds; they are killed."""
    end = time.monotonic() + 10
    while any(map(is_alive, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [p for p in processes if is_alive(p)]
    kill(left)
    return left


class Ranks(unittest.TestCase):
    def at_once(self, check, cases):
        """Runs check(*case) for all cases, most of whose time is patience, at the same time."""
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            for case, done in [(case, pool.submit(check, *case)) for case in cases]:
                with self.subTest(case=case):
                    done.result()

    def check(self, *arguments, counts=(1, 2, 4)):
        for launcher in LAUNCHERS:
            for n in counts:
                with self.subTest(launcher=launcher, n=n):
                    output, status = Job(launcher, n, *arguments).end()
                    self.assertEqual((output, status), ("", 0))

    def test_groups(self):
        self.check("groups")

    def test_exchanges(self):
        self.check("exchanges", counts=(2, 4))

    def test_several_threads_of_a_rank(self):
        self.check("threads", counts=(2, 3))

    def test_long_messages(self):
        self.check("long", counts=(2,))

    def test_calls_that_differ(self):
        def check(launcher, what, expected):
            output, status = Job(launcher, 2, what, str(PATIENCE)).end()
            self.assertNotEqual(status, 0)
            self.assertIn(expected, output)

        differences = (("fewer", "rank 1 sent 7 bytes where 8 were expected"), ("more", "essage truncated"),
                       ("orders", "ranks wait for each other"))
        self.at_once(check, [(launcher, *difference) for launcher in LAUNCHERS for difference in differences])

    def test_a_stopped_rank_is_named(self):
        def check(launcher, lost):
            job = Job(launcher, 4, "steps", str(PATIENCE))
            processes = job.processes(4)
            time.sleep(0.3)
            os.kill(processes[lost], signal.SIGSTOP)
            begin = time.monotonic()
            output, status = job.end()
            self.assertIn(f"rank {lost} does not answer", output)
            self.assertIn(f"lost: {lost}\n", output)
            for other in set(range(4)) - {lost}:
                self.assertNotIn(f"rank {other} does not answer", output)
            self.assertNotEqual(status, 0)
            self.assertLess(time.monotonic() - begin, 2 * PATIENCE + 6)
            self.assertEqual(wait_until_gone(processes.values()), [])

        self.at_once(check, [(launcher, lost) for launcher in LAUNCHERS for lost in (0, 3)])

    def test_a_stopped_rank_is_named_across_groups(self):
        def check(launcher):
            job = Job(launcher, 4, "pair", str(PATIENCE))
            processes = job.processes(4)
            output, _ = job.end()
            self.assertIn("rank 2 does not answer", output)
            self.assertNotIn("rank 3 does not answer", output)
            self.assertEqual(wait_until_gone(processes.values()), [])

        self.at_once(check, [(launcher,) for launcher in LAUNCHERS])

    def test_a_rank_that_stops_at_the_end(self):
        def check(launcher):
            job = Job(launcher, 2, "end", str(PATIENCE))
            processes = job.processes(2)
            job.end(2 * PATIENCE + 16)
            self.assertEqual(wait_until_gone(processes.values()), [])

        self.at_once(check, [(launcher,) for launcher in LAUNCHERS])

    def test_a_killed_rank_ends_the_others(self):
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                job = Job(launcher, 4, "steps", str(PATIENCE))
                processes = job.processes(4)
                os.kill(processes[2], signal.SIGKILL)
                begin = time.monotonic()
                _, status = job.end()
                self.assertNotEqual(status, 0)
                self.assertLess(time.monotonic() - begin, 2 * PATIENCE + 6)
                self.assertEqual(wait_until_gone(processes.values()), [])

    def test_a_killed_launcher_ends_the_ranks(self):
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                job = Job(launcher, 2, "steps", str(PATIENCE))
                processes = job.processes(2)
                job.process.kill()
                self.assertEqual(wait_until_gone(processes.values()), [])
                job.end()

    def test_started_alone(self):
        alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
        result = subprocess.run([RANKS, "groups"], env=alone, capture_output=True, text=True, check=False)
        self.assertEqual((result.returncode, result.stderr), (2, "error: no MPI launcher started this rank\n"))

    def test_environment_without_its_mpi(self):
        """A launcher that says another number of ranks than its MPI does, and one that makes no sense."""
        for size, rank, expected in (("3", "0", "rank 0 of 1, but its launcher says 0 of 3"), ("2", "2", "OMPI_COMM_WORLD_RANK=2"),
                                     ("two", "0", "OMPI_COMM_WORLD_SIZE=two")):
            if "3" in size and "mpirun.openmpi" not in LAUNCHERS:
                continue
            environment = dict(os.environ, OMPI_COMM_WORLD_SIZE=size, OMPI_COMM_WORLD_RANK=rank,
                               OMPI_MCA_ess_singleton_isolated="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            result = subprocess.run([RANKS, "groups"], env=environment, capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual(result.returncode, 1)
            self.assertIn(expected, result.stdout)


if __name__ == "__main__":
    RANKS = sys.argv.pop(1)
    if not LAUNCHERS:
        print("neither Open MPI nor MPICH is installed")
        sys.exit(77)
    unittest.main()
