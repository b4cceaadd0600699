"""Replicas of a backbone on the emulated GPUs of two ranks, which are processes, beside expert workers: the tokens of one
process on a CPU while workers are killed, a step that fails, and GPUs of different memory.

    python3 tests/gpu_replica_workers_test.py PATH_OF_TANDEM_WITH_THE_EMULATED_GPU
"""
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import workers_test
import worker_ranks_processes_test
from mpi_launcher import LAUNCHERS, launch
from running_server import QUESTION, TANDEM, TINY, Server, chat
from worker_ranks_processes_test import are_up, of_replicas
from workers_test import Worker, wait_for

ASKED = workers_test.QUESTIONS[:6]
FEW = {"max_tokens": 8}  # the emulated GPU takes 50 ms for a token
ON_GPUS = ["--device", "cuda", "--dp", "2", "--ctx", "128", "--draft", "off", "--threads", "1"]


def text_of(server, question):
    return server.ok("/v1/chat/completions", chat(question, **FEW))["choices"][0]["message"]


class GpuReplicasWithWorkers(unittest.TestCase):
    def test_answers_while_workers_are_killed(self):
        alone = Server("--device", "cpu", "--threads", "1").wait_ready()
        want = [text_of(alone, question) for question in ASKED]
        alone.stop()
        workers = [Worker("4-15"), Worker("4-15")]  # the others are on the GPU or the CPU of each rank
        with unittest.mock.patch.dict(os.environ, TANDEM_GPU_MEMORY="4000000"):
            server = Server("--workers", ",".join(worker.address for worker in workers), *ON_GPUS, "--max-batch", "2", "--chunk", "32",
                            "--worker-patience", "2", "--worker-deadline", "1500").wait_ready()
        self.assertTrue(any("experts 0-3: each of the replicas" in line for line in server.lines), server.lines)
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            for lost in (None, *workers):
                answers = [clients.submit(text_of, server, question) for question in ASKED]
                if lost:
                    lost.kill()
                self.assertEqual([answer.result() for answer in answers], want)
                if lost:
                    lost.start()
                    wait_for(lambda one=lost: are_up(server, one), "both replicas use the worker")
        for worker in workers:
            self.assertGreater(min(of_replicas(server, "requests_total", worker)), 0)
            worker.kill()
        status, answer = server.post("/v1/chat/completions", chat(QUESTION, **FEW))
        self.assertNotEqual(status, 200)
        self.assertIn("have had no worker for 2 s", json.dumps(answer))
        for worker in workers:
            worker.start()
            wait_for(lambda one=worker: are_up(server, one), "both replicas use the worker")
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            self.assertEqual(list(clients.map(lambda question: text_of(server, question), ASKED)), want)
        self.assertEqual(server.stop(), 0)
        self.assertEqual([worker.stop() for worker in workers], [0, 0])

    def test_gpus_of_different_memory_have_the_same_experts(self):
        worker = Worker()
        run = ["run", TINY, "--temp", "0", "-n", "4", "--json", "-p", QUESTION, "--workers", worker.address, *ON_GPUS]
        bytes_of = {}
        for memory in (("6500000", "6500000"), ("7500000", "6500000"), ("6500000", "7500000"), ("7500000", "7500000")):
            parts = [(1, ["env", f"TANDEM_GPU_MEMORY={bytes_of_gpu}", TANDEM, *run]) for bytes_of_gpu in memory]
            with self.subTest(memory), tempfile.TemporaryDirectory() as folder:
                command, environment = launch(LAUNCHERS[0], parts, folder)
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)
                bytes_of[memory] = json.loads(done.stdout)["model_bytes"]  # of the first rank
        *alike, many = bytes_of.values()
        self.assertEqual(len(set(alike)), 1, bytes_of)
        self.assertGreater(many, alike[0])
        self.assertEqual(worker.stop(), 0)


if __name__ == "__main__":
    sys.exit(worker_ranks_processes_test.main("__main__"))
