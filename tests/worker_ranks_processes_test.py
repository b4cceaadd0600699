"""Two ranks that divide a backbone or have replicas of it, and expert workers, as processes: what workers_test.py does with
one backbone, ranks that are lost beside workers, and what is refused.

    python3 tests/worker_ranks_processes_test.py PATH_OF_TANDEM

TANDEM_LONG_TEST=1 repeats the faults, and waits for workers longer than ranks wait for each other without workers.
"""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import workers_test
from mpi_launcher import LAUNCHERS, is_alive
from running_server import QUESTION, TANDEM, TINY, Server
from worker_moves_processes_test import WorkersWhoseExpertsMove
from workers_test import ROUNDS, ComeAndGo, OneOwner, Standby, TwoOwners, Worker, is_up, server_of, text_of, wait_for

workers_test.BACKBONE += ["--ranks", "2"]


def run(*arguments):
    return subprocess.run([TANDEM, "run", TINY, "--temp", "0", "-p", QUESTION, *arguments], capture_output=True, text=True,
                          check=False, timeout=120)


def ranks_of(server):
    """The processes of the ranks of a server."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
            if os.readlink(folder / "exe") == os.path.realpath(TANDEM) and arguments[1:] == server.process.args[1:] + [""]:
                found.append(int(folder.name))
        except OSError:
            pass
    return [process for process in found if process != server.process.pid]


def of_replicas(server, name, worker):
    """A metric of the links of both replicas to a worker; None: it is not there."""
    text = server.get("/metrics")[1]
    found = [re.search(rf'^tandem:worker_{name}{{[^}}]*replica="{replica}",worker="{worker.address}"}} (\S+)$', text, re.M)
             for replica in range(2)]
    return [one and float(one[1]) for one in found]


def are_up(server, worker):
    return of_replicas(server, "up", worker) == [1, 1]


class SlowPath:
    """Stands between a server and a worker, whose answers come `seconds` after the last request."""

    def __init__(self, worker):
        self.worker, self.seconds, self.last_request = worker, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            server = self.listener.accept()[0]
            host, port = self.worker.address.split(":")
            worker = socket.create_connection((host, int(port)))
            for pair in ((server, worker, False), (worker, server, True)):
                threading.Thread(target=self.pass_on, args=pair, daemon=True).start()

    def pass_on(self, source, target, is_slow):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_slow:
                    time.sleep(max(0, self.last_request + self.seconds - time.monotonic()))
                else:
                    self.last_request = time.monotonic()
                target.sendall(data)
        source.close()
        target.close()


class RanksWithWorkers(unittest.TestCase):
    def test_run_has_the_tokens_of_one_process_and_each_rank_its_part(self):
        worker = Worker("0-7")
        alone = json.loads(run("--json", "--threads", "1").stdout)
        beside = ["--workers", worker.address]
        bytes_of = {}
        for arguments in (["--ranks", "2"], ["--ranks", "2", *beside], ["--tp", "2", *beside, "--micro-batches", "2"],
                          ["--ranks", "2", *beside, "--draft", "off"]):
            with self.subTest(arguments):
                done = run("--json", "--threads", "1", *arguments)
                self.assertEqual(done.returncode, 0, done.stderr)
                got = json.loads(done.stdout)
                self.assertEqual(got["token_ids"], alone["token_ids"])
                bytes_of["--workers" in arguments] = got["model_bytes"]
        # The first rank has four experts of two layers instead of eight: three matrices of 128 x 128 FP8, each with a scale.
        self.assertEqual(bytes_of[False] - bytes_of[True], 4 * 2 * 3 * (128 * 128 + 4))
        self.assertEqual(worker.stop(), 0)

    def test_replicas_have_the_tokens_of_one_process_while_owners_are_lost(self):
        alone = Server("--threads", "1").wait_ready()
        want = {question: text_of(alone, question) for question in workers_test.QUESTIONS}
        self.assertEqual(alone.stop(), 0)
        workers = [Worker("0-15"), Worker("0-15")]
        server = Server("--workers", ",".join(worker.address for worker in workers), "--threads", "1", "--dp", "2",
                        "--worker-deadline", "400").wait_ready()
        self.assertEqual(server.get("/server_info")[1]["dp_size"], 2)
        streams = workers_test.Streams(server, 4)
        streams.wait_for_more()
        for worker in workers:
            worker.kill()
            streams.wait_for_more()
            wait_for(lambda one=worker: of_replicas(server, "up", one) == [0, 0], "both replicas have lost it")
            worker.start()
            wait_for(lambda one=worker: are_up(server, one), "the worker is up again")
        streams.wait_for_more()
        for question, errors, text in streams.end():
            self.assertEqual((errors, text), ([], want[question]))
        for worker in workers:
            wait_for(lambda one=worker: min(of_replicas(server, "requests_total", one)) > 0, "both replicas have asked it")
            self.assertEqual(of_replicas(server, "experts", worker), [16, 16])
            self.assertEqual(len(re.findall(r"(?m)^tandem:worker_up\{", server.get("/metrics")[1])), 4)
        for worker in workers:  # nothing is computed
            worker.kill()
            wait_for(lambda one=worker: of_replicas(server, "up", one) == [0, 0], "both replicas have lost it")
        status, answer = server.post("/v1/chat/completions", workers_test.chat(QUESTION))
        self.assertNotEqual(status, 200)
        self.assertIn("have had no worker for", json.dumps(answer))
        for worker in workers:
            worker.start()
            wait_for(lambda one=worker: are_up(server, one), "the worker is up again")
        for question in workers_test.QUESTIONS[:4]:
            self.assertEqual(text_of(server, question), want[question])
        self.assertEqual(server.stop(), 0)
        self.assertEqual([worker.stop() for worker in workers], [0, 0])

    def test_a_rank_that_is_killed_ends_all_and_no_worker(self):
        worker = Worker("4-11")
        for lost in range(2):
            with self.subTest(lost=lost):
                server = server_of([worker])
                want = text_of(server, QUESTION)
                ranks = sorted(ranks_of(server))
                self.assertEqual(len(ranks), 2)
                os.kill(ranks[lost], signal.SIGKILL)
                self.assertNotEqual(server.process.wait(timeout=60), 0)
                wait_for(lambda: not any(map(is_alive, ranks)), "all ranks have ended")
                other = server_of([worker])
                self.assertEqual(text_of(other, QUESTION), want)
                self.assertEqual(other.stop(), 0)
        self.assertEqual(worker.stop(), 0)

    def lost_after(self, ranks, server, lost):
        """Seconds after which all have ended once a rank was stopped."""
        os.kill(ranks[lost], signal.SIGSTOP)
        begin = time.monotonic()
        self.assertNotEqual(server.process.wait(timeout=60), 0)
        wait_for(lambda: not any(map(is_alive, ranks)), "all ranks have ended")
        return time.monotonic() - begin

    def test_a_replica_that_is_stopped_is_lost_and_one_that_computes_for_long_is_not(self):
        """A step takes longer than ranks wait for each other. Then a rank is stopped in another one, and in an idle server."""
        worker = Worker("4-11")
        for lost, is_idle in ((1, False), (0, False), (1, True), (0, True)) if ROUNDS > 1 else ((1, False), (0, True)):
            with self.subTest(lost=lost, is_idle=is_idle), concurrent.futures.ThreadPoolExecutor(2) as pool:
                path = SlowPath(worker)
                server = Server("--workers", path.address, "--threads", "1", "--dp", "2", "--worker-deadline", "60000",
                                "--draft", "off").wait_ready()
                want = server.ok("/v1/completions", {"prompt": "1 2", "max_tokens": 1, "temperature": 0})["choices"]
                if not is_idle:
                    path.seconds = 12  # each of two layers
                    begin = time.monotonic()
                    got = server.ok("/v1/completions", {"prompt": "1 2", "max_tokens": 1, "temperature": 0})["choices"]
                    self.assertEqual(got, want)
                    self.assertGreater(time.monotonic() - begin, 22)
                    pool.submit(server.post, "/v1/completions", {"prompt": "3 4", "max_tokens": 1})
                    time.sleep(1)
                ranks = sorted(ranks_of(server))
                self.assertLess(self.lost_after(ranks, server, lost), 30)
        self.assertEqual(worker.stop(), 0)

    @unittest.skipIf(ROUNDS == 1, "takes half a minute")
    def test_ranks_wait_for_workers_longer_than_for_each_other(self):
        worker = Worker("4-11")
        server = server_of([worker], "--worker-patience", "60")
        want = text_of(server, QUESTION)
        worker.kill()
        wait_for(lambda: not is_up(server, worker), "the worker is down")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(text_of, server, QUESTION)
            time.sleep(25)
            worker.start()
            self.assertEqual(answer.result(timeout=60), want)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(worker.stop(), 0)

    def test_run_ends_with_one_error_when_no_owner_is_left(self):
        worker = Worker("4-11")
        command = [TANDEM, "run", TINY, "--raw", "--ignore-eos", "-n", "100000", "--ctx", "200000", "-p", "a", "--threads", "1",
                   "--ranks", "2", "--workers", worker.address, "--worker-patience", "0.5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
            job.stdout.read(1)  # it generates
            worker.kill()
            _, said = job.communicate(timeout=60)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        self.assertEqual((job.returncode, len(errors)), (1, 1), said)
        self.assertIn(f"experts 4-11 have had no worker for 0.5 s: {worker.address}", errors[0])

    def test_refusals(self):
        worker = Worker("0-7")
        beside = ["--workers", worker.address]
        for arguments, said in (
                ([*beside, "--pp", "2"], "--workers and --pp 2: pipeline stages have no workers"),
                ([*beside, "--ranks", "2", "--tp", "1"], "or with --dp 2 where each has a replica"),
                ([*beside, "--ranks", "2", "--placement", "p.json"], "--workers and --placement p.json: several ranks do not use"),
                ([*beside, "--ranks", "2", "--ep-dispatch", "gather"], "--ep-dispatch gather: ranks with workers exchange no rows"),
                ([*beside, "--ranks", "2", "--ep-rows", "fp8"], "--ep-rows fp8: ranks with workers exchange no rows: leave it or --workers out"),
                ([*beside, "--ep-rows", "fp8"], "--ep-rows fp8: no rows travel between ranks: leave it out, or give replicas"),
                ([*beside, "--ranks", "2", "--workers-file", "f"], f"--workers {worker.address} and --workers-file f: give one"),
                (["--ranks", "2", "--workers-file", "/none"], "cannot open /none"),
                (["--ranks", "2", "--workers", "127.0.0.1:1", "--worker-patience", "0.2"], "does not answer: Connection refused")):
            with self.subTest(arguments):
                done = run(*arguments)
                errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
                self.assertEqual(len(errors), 1, done.stderr)
                self.assertIn(said, errors[0])
                self.assertEqual((done.returncode, done.stdout), (1 if "answer" in said else 2, ""))
        self.assertEqual(worker.stop(), 0)


def main(module="__main__"):
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
        os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", TMPDIR=folder, OMPI_MCA_btl_vader_backing_directory=folder)
        return 0 if unittest.main(module, argv=sys.argv[:1] + sys.argv[2:], exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
