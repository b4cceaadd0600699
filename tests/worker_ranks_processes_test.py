"""Two ranks that divide a backbone, and expert workers, as processes: what workers_test.py does with one backbone, ranks that
are lost beside workers, and what is refused.

    python3 tests/worker_ranks_processes_test.py PATH_OF_TANDEM

TANDEM_LONG_TEST=1 repeats the faults, and waits for workers longer than ranks wait for each other without workers.
"""
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
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
            worker.start()
            wait_for(lambda one=worker: is_up(server, one), "the worker is up again")
            time.sleep(1)  # the other rank connects twice a second too
        for question, errors, text in streams.end():
            self.assertEqual((errors, text), ([], want[question]))
        for worker in workers:
            worker.kill()
        status, answer = server.post("/v1/chat/completions", workers_test.chat(QUESTION))
        self.assertNotEqual(status, 200)
        self.assertIn("have had no worker for", json.dumps(answer))
        for worker in workers:
            worker.start()
            wait_for(lambda one=worker: is_up(server, one), "the worker is up again")
        time.sleep(1)
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
                ([*beside, "--dp", "2"], "--workers and --dp: no worker has experts 8-15"),
                ([*beside, "--pp", "2"], "--workers and --pp 2: pipeline stages have no workers"),
                ([*beside, "--dp", "2", "--device", "cuda"], "--workers, --dp 2 and --device cuda"),
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
        os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", TMPDIR=folder, OMPI_MCA_btl_vader_backing_directory=folder)
        return 0 if unittest.main(argv=sys.argv[:1] + sys.argv[2:], exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
