"""Prefill and decode servers of which one or both are several ranks, as processes: answers are those of one server, also when a
prefill server or a rank is killed.

    python3 tests/rank_prefill_test.py PATH_OF_TANDEM [RanksWithRoles | RanksThatAreLost]
"""
import concurrent.futures
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

from free_address import free_address
from mpi_launcher import LAUNCHERS, is_alive, launch
from prefill_test import answer, decode_server, fetched, prefill_server, says, wait_for
from running_server import TANDEM, TINY, Server
from worker_ranks_processes_test import ranks_of
from workers_test import Worker

N = 6  # questions


def answers(server, first=0):
    """The answers to all questions from the first one on, at once."""
    with concurrent.futures.ThreadPoolExecutor(N) as clients:
        return list(clients.map(lambda i: answer(server, i), range(first, N)))


def connected(decode, address):
    wait_for(lambda: says(decode, f"prefill server {address} is up"), "the prefill server is up")


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        plain = Server("--threads", "1").wait_ready()
        cls.expected = answers(plain)
        plain.stop()


class RanksWithRoles(Answers):
    def test_decode_servers_of_ranks(self):
        address = free_address()
        prefill = prefill_server(address).wait_ready()
        for grid in (("--tp", "2"), ("--dp", "2")):
            with self.subTest(grid):
                decode = decode_server([address], *grid)
                connected(decode, address)
                self.assertTrue(any("and this server by" in line and " by 2 (division " in line for line in decode.lines), decode.lines)
                self.assertEqual(answers(decode), self.expected)
                self.assertGreater(fetched(decode), N * 384)
                self.assertEqual(decode.stop(), 0)
        self.assertEqual(prefill.stop(), 0)

    def test_both_of_ranks_under_a_launcher(self):
        address = free_address()
        command, _ = launch(LAUNCHERS[0], [(2, [])], os.environ["TMPDIR"])  # whose environment main() has set
        prefill = prefill_server(address, "--pp", "2", before=command).wait_ready()
        decode = decode_server([address], "--dp", "2", before=command)
        connected(decode, address)
        self.assertEqual(answers(decode), self.expected)
        self.assertGreater(fetched(decode), N * 384)
        for server in (decode, prefill):
            server.stop()  # the launcher's status is its own

    def test_ranks_with_workers(self):
        worker, address = Worker("4-11"), free_address()
        prefill = prefill_server(address, "--ranks", "2", "--workers", worker.address).wait_ready()
        decode = decode_server([address], "--ranks", "2", "--workers", worker.address)
        connected(decode, address)
        self.assertFalse(says(decode, "answers may differ"), decode.lines)
        self.assertEqual(answers(decode, 3), self.expected[3:])
        self.assertGreater(fetched(decode), 3 * 384)
        for server in (decode, prefill, worker):
            self.assertEqual(server.stop(), 0)

    def test_refusals(self):
        for arguments, said in ((("--role", "prefill", "--kv-listen", "nothing"), "HOST:PORT"),
                                (("--role", "decode"), "say with --prefill"),
                                (("--role", "prefill", "--kv-listen", "0.0.0.0:0"), "--kv-secret")):
            with self.subTest(arguments):
                ended = subprocess.run([TANDEM, "serve", TINY, "--port", "0", "--tp", "2", *arguments], capture_output=True, text=True,
                                       timeout=60, check=False)
                errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
                self.assertEqual((ended.returncode, len(errors)), (2, 1), ended.stderr)
                self.assertIn(said, errors[0])


class RanksThatAreLost(Answers):
    def test_a_prefill_server_of_ranks_that_is_killed(self):
        address = free_address()
        decode = decode_server([address])
        for grid in (("--tp", "2"), ("--dp", "2"), ("--pp", "2")):
            with self.subTest(grid):
                decode.request("POST", "/flush_cache", "{}")
                prefill = prefill_server(address, *grid).wait_ready()
                connected(decode, address)
                self.assertEqual(says(decode, "answers may differ"), grid[0] != "--pp", decode.lines)
                before = fetched(decode)
                self.assertEqual(answers(decode, 3), self.expected[3:])
                self.assertGreater(fetched(decode), before + 3 * 384)
                self.assertEqual(answer(prefill, 0), self.expected[0])
                with concurrent.futures.ThreadPoolExecutor(3) as clients:
                    under_way = [clients.submit(answer, decode, i) for i in range(3)]
                    wait_for(lambda n=before + 3 * 384: fetched(decode) > n + 64, "it computes")
                    ranks = ranks_of(prefill)
                    self.assertEqual(len(ranks), 2)
                    os.kill(ranks[grid[0] != "--tp"], signal.SIGKILL)
                    self.assertEqual([got.result() for got in under_way], self.expected[:3])
                self.assertNotEqual(prefill.process.wait(timeout=60), 0)
                wait_for(lambda those=ranks: not any(map(is_alive, those)), "all ranks have ended")
                wait_for(lambda: says(decode, f"prefill server {address} is down"), "it is down")
                decode.lines.clear()
        self.assertEqual(decode.stop(), 0)

    def test_a_decode_server_of_ranks_that_is_killed(self):
        address = free_address()
        prefill = prefill_server(address).wait_ready()
        decode = decode_server([address], "--ranks", "2")
        connected(decode, address)
        ranks = ranks_of(decode)
        self.assertEqual(answer(decode, 1), self.expected[1])
        os.kill(max(ranks), signal.SIGKILL)
        self.assertNotEqual(decode.process.wait(timeout=60), 0)
        wait_for(lambda: not any(map(is_alive, ranks)), "all ranks have ended")
        wait_for(lambda: says(prefill, "a decode server has left"), "it is done without")
        self.assertEqual(answer(prefill, 2), self.expected[2])
        self.assertEqual(prefill.stop(), 0)


def main():
    if not LAUNCHERS:
        print("skipped: no MPI launcher is installed")
        return 77
    if len(os.sched_getaffinity(0)) < 2:
        print("skipped: two ranks need two cores")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        launcher = pathlib.Path(folder) / "mpirun"
        launcher.write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]}\nexec {shutil.which(LAUNCHERS[0])} "$@"\n', encoding="utf-8")
        launcher.chmod(0o755)
        os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", TMPDIR=folder, XDG_CACHE_HOME=folder,
                          OMPI_MCA_btl_vader_backing_directory=folder)
        return 0 if unittest.main(argv=sys.argv[:1] + sys.argv[2:], exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
