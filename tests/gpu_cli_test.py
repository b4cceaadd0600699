"""The program without a GPU, with too small a GPU, and with a GPU that is lost during a run: one clear line, the
right status, an answer with --device auto.

    python3 tests/gpu_cli_test.py PATH_OF_TANDEM_WITH_THE_EMULATED_GPU PATH_OF_TANDEM
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from running_server import QUESTION, TANDEM, Server, chat

MODEL = pathlib.Path(__file__).resolve().parent.parent / "models" / "tiny-r1"
PRODUCT = os.path.abspath(sys.argv[2])
LOST = r"the GPU failed: unspecified launch failure \(cudaErrorLaunchFailure, at .*\): check nvidia-smi .*--device cpu"


def run(program, *arguments, command="run", **env):
    return subprocess.run([program, command, *arguments, "-q", "-p", QUESTION, "--temp", "0", "-n", "6"], capture_output=True,
                          text=True, check=False, timeout=300, env={**os.environ, **env})


def called(*command, **env):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **env})


def has_gpu():
    return shutil.which("nvidia-smi") is not None and subprocess.run(["nvidia-smi", "-L"], check=False).returncode == 0


class Case(unittest.TestCase):
    def refused(self, result, status, why):
        self.assertEqual(result.returncode, status, result)
        self.assertRegex(result.stderr, rf"\Aerror: .*{why}.*\n\Z")

    def falls_back(self, result, why):
        self.assertEqual(result.returncode, 0, result)
        self.assertRegex(result.stderr, rf"\Awarning: running on the CPU: .*{why}.*\n\Z")
        self.assertEqual(result.stdout, run(PRODUCT).stdout)


@unittest.skipIf(has_gpu(), "a GPU is here")
class WithoutAGpu(Case):
    def test_cuda_is_refused(self):
        self.refused(run(PRODUCT, "--device", "cuda"), 2, "use --device cpu")

    def test_auto_answers(self):
        self.falls_back(run(PRODUCT, "--device", "auto"), "use --device cpu")


class EmulatedGpu(Case):
    def test_it_answers(self):
        for device in ("cuda", "auto"):
            result = run(TANDEM, "--device", device)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            self.assertEqual(result.stdout, run(PRODUCT).stdout)

    def test_uses_of_experts(self):
        with tempfile.TemporaryDirectory() as folder:
            recorded = pathlib.Path(folder) / "r.json"
            self.assertEqual(run(PRODUCT, "--record-routing", str(recorded)).returncode, 0)
            want = json.loads(recorded.read_text())
        shares = []
        for memory in ("8000000000", "4100000"):  # all experts on the GPU, and some
            os.environ["TANDEM_GPU_MEMORY"] = memory
            try:
                server = Server("--device", "cuda", "--ctx", "64", "--chunk", "24", "--max-batch", "1", "--draft", "off").wait_ready()
            finally:
                del os.environ["TANDEM_GPU_MEMORY"]
            server.ok("/v1/chat/completions", chat(max_tokens=6))
            got = server.get("/experts")[1]
            self.assertEqual([layer["counts"] for layer in got["layers"]], want["counts"])
            on_gpu = sum(layer["counts"][expert] for layer in got["layers"] for expert in layer["gpu"])
            self.assertAlmostEqual(got["gpu_share"], on_gpu / sum(got["load"]))
            self.assertAlmostEqual(server.metric("tandem:expert_gpu_share"), got["gpu_share"])
            shares.append(got["gpu_share"])
            self.assertEqual(server.stop(), 0)
        self.assertEqual(shares[0], 1)
        self.assertTrue(0 < shares[1] < 1, shares)

    def test_hot_experts_are_exchanged(self):
        os.environ["TANDEM_GPU_MEMORY"] = "4500000"
        try:
            server = Server("--device", "cuda", "--ctx", "64", "--chunk", "24", "--max-batch", "1", "--draft", "off", "--hot-experts", "live",
                            "--rebalance-period", "3600").wait_ready()
        finally:
            del os.environ["TANDEM_GPU_MEMORY"]
        first = server.ok("/v1/chat/completions", chat(max_tokens=6))["choices"]
        before = server.get("/experts")[1]
        self.assertTrue(0 < before["gpu_share"] < 1)
        begun = server.get("/rebalance")[1]["number"]  # it may have moved some by itself
        if begun == 0:
            self.assertEqual(server.post("/rebalance", {})[0], 202)
        while (report := server.get("/rebalance")[1])["state"] in ("planning", "loading"):
            pass
        self.assertEqual((report["state"], report["number"]), ("done", 1))
        self.assertLess(report["gpu_share_before"], report["gpu_share_after"])
        self.assertAlmostEqual(server.get("/experts")[1]["gpu_share"], report["gpu_share_after"])
        self.assertEqual(server.ok("/v1/chat/completions", chat(max_tokens=6))["choices"], first)
        self.assertEqual(server.stop(), 0)

    def test_what_does_not_move(self):
        for arguments, memory, why in ((("--hot-experts", "live", "--device", "cuda"), "8000000000", "the GPU has all experts"),
                                       (("--hot-experts", "live", "--device", "cpu"), "8000000000", "one process on the CPU has all experts"),
                                       (("--hot-experts", "live", "--rebalance", "auto"), "8000000000", "leave one of them out"),
                                       (("--hot-experts", "live", "--balance-window", "0"), "8000000000", "needs the uses of experts"),
                                       (("--hot-experts", "often"), "8000000000", "choose static or live")):
            result = called(TANDEM, "serve", str(MODEL), "-q", "--port", "0", "--ctx", "64", *arguments, TANDEM_GPU_MEMORY=memory)
            self.refused(result, 2, why)

    def test_no_gpu(self):
        self.refused(run(TANDEM, "--device", "cuda", TANDEM_GPU_MEMORY="0"), 2, "no NVIDIA GPU can be used")
        self.falls_back(run(TANDEM, "--device", "auto", TANDEM_GPU_MEMORY="0"), "no NVIDIA GPU can be used")

    def test_too_little_memory(self):
        self.refused(run(TANDEM, "--device", "cuda", TANDEM_GPU_MEMORY="1000000"), 2, "do not fit with any --ctx")
        self.falls_back(run(TANDEM, "--device", "auto", TANDEM_GPU_MEMORY="1000000"), "do not fit with any --ctx")

    def test_fp8_activations(self):
        fp8 = ("--device", "cuda", "--activations", "fp8")
        result = run(TANDEM, *fp8)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(result.stdout, run(PRODUCT).stdout)
        self.refused(run(TANDEM, *fp8, TANDEM_GPU_CAPABILITY="86"), 2, "emulated GPU has compute capability 8.6.*leave it out")
        self.refused(run(TANDEM, "--activations", "fp8"), 2, "the CPU does not.*--device cuda")
        self.refused(run(TANDEM, "--device", "cuda", "--activations", "int8"), 2, "--activations int8: choose bf16 or fp8")
        bf16 = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "v2_lite")
        logits = called(TANDEM, "logits", bf16, "--tokens", "1,2", "--out", "never_written.npy", "-q", *fp8)
        self.refused(logits, 2, "no FP8 weights.*leave it out")

    def test_benchmarks_with_fp8_activations(self):
        bench = ("bench", "mlp", "--config", "moonlight", "--activations", "fp8")
        self.refused(called(TANDEM, *bench, TANDEM_GPU_CAPABILITY="80"), 2, "compute capability 8.0.*leave it out")
        self.refused(called(TANDEM, *bench), 2, "weights are bf16: leave it out")
        self.refused(called(TANDEM, *bench, TANDEM_GPU_MEMORY="0"), 2, "no NVIDIA GPU can be used")

    def test_short_contexts_in_a_cache_made_for_long_ones(self):
        bench = ("bench", "attention", "--config", str(MODEL), "--ctx", "16", "--tokens", "2", "--seconds", "0.001", "--memory", "0.1")
        shown = {}
        for limit in ("0", "4096"):
            result = called(TANDEM, *bench, "--context-limit", limit, "--json")
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            rows = [json.loads(line) for line in result.stdout.splitlines()]
            self.assertEqual([row["context_limit"] for row in rows], [int(limit) or 16] * 2)
            self.assertTrue(all(row["gpu_seconds"] > 0 for row in rows), rows)
            shown[limit] = [(row["what"], row["context"], row["bytes"], row["ops"]) for row in rows]
        self.assertEqual(shown["0"], shown["4096"])
        text = called(TANDEM, *bench, "--context-limit", "4096").stdout
        self.assertRegex(text, r"\| context \|   limit \|.*\n.*\n.*\|      16 \|    4096 \|")
        small = called(TANDEM, *bench, "--context-limit", "4096", TANDEM_GPU_MEMORY="1000000")
        self.refused(small, 2, "--context-limit 4096 --batch 1: the caches of . layers do not fit the GPU")

    def test_lost_while_loading_or_running(self):
        for n in ("1", "100", "500"):
            self.refused(run(TANDEM, "--device", "cuda", TANDEM_GPU_LOST_AFTER=n), 1, LOST)

    def test_benchmarks_of_the_gpu(self):
        for what, tokens in (("kernels", "2"), ("products", "17")):
            arguments = (TANDEM, "bench", what, "--config", str(MODEL), "--tokens", tokens, "--seconds", "0.001",
                         "--memory", "0.05")
            result = subprocess.run([*arguments, "--json"], capture_output=True, text=True, check=True, timeout=300)
            rows = [json.loads(line) for line in result.stdout.splitlines()]
            self.assertGreater(len(rows), 3)
            for row in rows:
                self.assertEqual((row["bench"], row["card"]), (what, "emulated GPU"))
                self.assertGreater(row["gpu_seconds"], 0)
            without = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300,
                                     env={**os.environ, "TANDEM_GPU_MEMORY": "0"})
            self.assertIn({"kernels": "no GPU", "products": "threads: reading"}[what], without.stdout)
            if what == "kernels":
                self.assertEqual(len(without.stdout.splitlines()), len(rows) + 4)

    def test_a_server_tells_its_clients_and_ends(self):
        os.environ["TANDEM_GPU_LOST_AFTER"] = "1000"
        try:
            server = Server("--device", "cuda", "--ctx", "512", "--max-batch", "8").wait_ready()
        finally:
            del os.environ["TANDEM_GPU_LOST_AFTER"]
        ask = {"prompt": QUESTION, "max_tokens": 400, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            whole = pool.submit(server.post, "/v1/completions", ask, timeout=300)
            pieces = list(server.events("/v1/completions", {**ask, "stream": True}))
        status, answer = whole.result()
        self.assertEqual(status, 500)
        self.assertRegex(answer["error"]["message"], LOST)
        self.assertGreater(len(pieces), 1)
        self.assertRegex(pieces[-1]["error"]["message"], LOST)
        self.assertEqual(server.process.wait(timeout=60), 1)
        server.reader.join()
        errors = [line for line in server.lines if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, server.lines)
        self.assertTrue(re.search(LOST, errors[0]))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
