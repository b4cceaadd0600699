"""Expert workers with the emulated GPU as processes: answers of one process, one whose GPU is lost while it answers, and
what is refused.

    python3 tests/gpu_workers_test.py PATH_OF_TANDEM_WITH_THE_EMULATED_GPU
"""
import json
import os
import subprocess
import tempfile
import unittest

from running_server import QUESTION, TANDEM, TINY, Server
from workers_test import OTHER_MODEL, Worker, is_up, metric_of, server_of, text_of, wait_for

LOST = r"the GPU failed: unspecified launch failure \(cudaErrorLaunchFailure, at .*\): check nvidia-smi .*--device cpu"


class GpuWorker(Worker):
    """Its standard error is in a file. `env` counts at its first start only."""

    def __init__(self, **env):
        super().__init__(arguments=("--device", "cuda"), errors=tempfile.TemporaryFile("w+"), **env)

    def said(self):
        self.errors.seek(0)
        return self.errors.read()


def refused(*arguments, **env):
    return subprocess.run([TANDEM, "worker", *arguments, "--listen", "127.0.0.1:0"], capture_output=True, text=True, check=False,
                          timeout=60, env={**os.environ, **env})


class GpuWorkers(unittest.TestCase):
    def worker(self, **env):
        worker = GpuWorker(**env)
        self.addCleanup(worker.errors.close)
        return worker

    def test_two_owners_answer_as_one_process_also_when_one_loses_its_gpu(self):
        alone = Server("--threads", "1").wait_ready()
        want = text_of(alone, QUESTION)
        self.assertEqual(alone.stop(), 0)
        workers = [self.worker(), self.worker(TANDEM_GPU_LOST_AFTER="700")]
        for worker in workers:
            self.assertIn("experts 0-15 on emulated GPU\n", worker.said())
        server = server_of(workers, "--draft", "off")
        self.assertEqual([metric_of(server, "gpu_experts", worker) for worker in workers], [16, 16])
        self.assertTrue(any("(GPU) or" in line for line in server.lines), server.lines)
        self.assertTrue(is_up(server, workers[1]))
        self.assertEqual(text_of(server, QUESTION), want)  # its GPU is lost meanwhile
        self.assertEqual(workers[1].wait(), 1)
        self.assertRegex(workers[1].said(), rf"(?m)^error: {LOST}$")
        self.assertTrue(is_up(server, workers[0]))
        workers[1].start()
        wait_for(lambda: is_up(server, workers[1]), "the worker is back")
        self.assertEqual(text_of(server, QUESTION), want)
        self.assertEqual(server.stop(), 0)
        self.assertEqual([worker.stop() for worker in workers], [0, 0])

    def test_experts_on_both_devices(self):
        worker = self.worker(TANDEM_GPU_MEMORY="4000000")
        self.assertRegex(worker.said(), r"(?m)^experts 0-\d+ on emulated GPU, \d+-15 in memory$")
        server = server_of([worker])
        on_gpu = metric_of(server, "gpu_experts", worker)
        self.assertTrue(0 < on_gpu < metric_of(server, "experts", worker) == 16, on_gpu)
        self.assertTrue(any("(GPU and CPU)" in line for line in server.lines), server.lines)
        self.assertIn("834", text_of(server, QUESTION))
        self.assertEqual(server.stop(), 0)
        self.assertEqual(worker.stop(), 0)

    def test_owners_of_both_devices_are_refused(self):
        workers = [self.worker(), Worker()]
        result = subprocess.run([TANDEM, "run", TINY, "-p", QUESTION, "-q", "--workers", ",".join(w.address for w in workers)],
                                capture_output=True, text=True, check=False, timeout=60)
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertRegex(result.stderr, r"\Aerror: the workers \S+ and \S+ both have experts 0-15, and would compute different "
                         r"sums \(\"emulated GPU of compute capability 8\.9, experts as stored\" and \"kernels .*\"\): start them "
                         r"with the same --device, .*\n\Z")
        for worker in workers:
            worker.stop()

    def test_a_placement_gives_each_device_its_experts(self):
        def groups(**experts_of):
            names = {"gpu": "host0.gpu0", "cpu": "host0.cpu", "gpu_worker": "host1.gpu0", "cpu_worker": "host2.cpu"}
            return [{"experts": experts, "format": "fp8", "owners": [names[name]]} for name, experts in experts_of.items()]

        placed = {"backbone": {"format": "fp8", "stages": [{"layers": "0-2", "devices": ["host0.gpu0"]}]},
                  "embedding": {"on": "backbone"}, "head": {"on": "backbone", "replicated": True}, "kv": {"tokens": 4096, "type": "bf16"},
                  "experts": {"layers": [
                      {"layers": "1-1", "groups": groups(gpu="0-2", cpu="3-5", gpu_worker="6-10", cpu_worker="11-15")},
                      {"layers": "2-2", "groups": groups(gpu="2,6,11", cpu="0-1,3-5", gpu_worker="7-10", cpu_worker="12-15")}]},
                  "prefill": {"chunk_tokens": 512, "stream_from_tokens": 0}, "micro_batches": 2}
        alone = Server("--threads", "1").wait_ready()
        want = text_of(alone, QUESTION)
        self.assertEqual(alone.stop(), 0)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(placed, file)
            file.flush()
            workers = []
            for host, says in (("host1", "experts 6-10 on emulated GPU\n"), ("host2", "experts 11-15 in memory\n")):
                worker = Worker(None, arguments=("--placement", file.name, "--host", host), errors=tempfile.TemporaryFile("w+"))
                self.addCleanup(worker.errors.close)
                worker.errors.seek(0)
                self.assertIn(says, worker.errors.read())
                workers.append(worker)
            server = server_of(workers, "--placement", file.name, "--device", "cuda", "--draft", "off", "--ctx", "4096")
            layers = server.get("/experts")[1]["layers"]
            self.assertEqual([layer["gpu"] for layer in layers], [[0, 1, 2], [2, 6, 11]])
            for line in ("experts 0-5: this process", f"experts 6-10: {workers[0].address} (GPU)", f"experts 11-15: {workers[1].address}"):
                self.assertIn(line, "".join(server.lines))
            self.assertEqual(text_of(server, QUESTION), want)
            self.assertEqual(server.stop(), 0)
            for worker in workers:
                worker.stop()

    def test_what_is_refused(self):
        for arguments, env, why in (((TINY, "--device", "cuda"), {"TANDEM_GPU_MEMORY": "0"}, "no NVIDIA GPU can be used"),
                                    ((TINY, "--device", "cuda"), {"TANDEM_GPU_MEMORY": "1000000"},
                                     "emulated GPU has 0.00 GB free, and one expert of every layer needs 0.0. GB with the rows of "
                                     "--chunk 512: use a smaller --chunk, or --device cpu"),
                                    ((TINY, "--device", "cuda", "--experts", "standby"), {}, "--experts standby: .*use --device cpu"),
                                    ((OTHER_MODEL, "--device", "cuda", "--format", "int8"), {}, "--format int8: a GPU keeps"),
                                    ((TINY, "--device", "gpu"), {}, "--device gpu: choose auto, cpu or cuda")):
            result = refused(*arguments, **env)
            self.assertEqual((result.returncode, result.stdout), (2, ""), result)
            self.assertRegex(result.stderr, rf"\Aerror: .*{why}.*\n\Z")


if __name__ == "__main__":
    unittest.main(argv=["gpu_workers_test"], verbosity=1)
