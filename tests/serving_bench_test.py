"""tandem bench serving from the command line: against `tandem serve` with the embedded model, and against a fake
server that is slow, broken or endless.

    python3 tests/serving_bench_test.py PATH_OF_TANDEM
"""
import asyncio
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from running_server import TANDEM, TINY, Server


class MadeUp:
    """A fake server whose users share `speed` tokens a second. `how`: well, empty (an event without choices after the
    first request), refuse (503 after the first), cut (the stream breaks off after the first), endless.
    """

    def __init__(self, speed=1000, how="well"):
        self.speed, self.how = speed, how
        self.running = self.peak = 0
        self.requests, self.arrivals, self.emptied = [], [], []
        self.loop = asyncio.new_event_loop()
        listening = threading.Event()

        async def main():
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            listening.set()

        def work():
            self.loop.run_until_complete(main())
            self.loop.run_forever()

        threading.Thread(target=work, daemon=True).start()
        listening.wait()

    async def serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            body = await reader.readexactly(int(re.search(r"content-length: (\d+)", head, re.I)[1]))
            if path == "/v1/models":
                self.reply(writer, "200 OK", {"data": [{"id": TINY}]})
            elif method == "POST" and path == "/reset_prefix_cache":
                self.emptied.append(path)
                self.reply(writer, "200 OK", {})
            elif method == "POST" and path == "/v1/completions":
                self.arrivals.append(time.monotonic())
                self.requests.append((head, json.loads(body)))
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    await self.answer(writer, json.loads(body), self.how if len(self.requests) > 1 else "well")
                finally:
                    self.running -= 1
            else:
                self.reply(writer, "404 Not Found", {"error": {"message": f"there is no {path}"}})
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        writer.close()

    @staticmethod
    def reply(writer, status, json_body):
        text = json.dumps(json_body)
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    async def answer(self, writer, asked, how):
        if how == "refuse":
            return self.reply(writer, "503 Service Unavailable", {"error": {"message": "too many"}})
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

        def event(data):
            line = b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"
            for part in (line[:5], line[5:]):  # lines may arrive in several pieces
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))

        n = 10**9 if how == "endless" else asked["max_tokens"]
        for i in range(n):
            await asyncio.sleep(self.running / self.speed)
            event({"choices": [{"text": "7"}], "usage": {"completion_tokens": i + 1}})
            await writer.drain()
            if i == 1 and how == "cut":
                return None
        if how == "empty":
            event({"choices": [], "usage": {}})
        event(b"[DONE]")
        writer.write(b"0\r\n\r\n")
        return None


class Bench(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def start(self, port, *more):
        arguments = ["--backend", "vllm", "--host", "127.0.0.1", "--port", str(port), "--dataset-name", "random-ids", "--tokenizer", TINY,
                     "--random-input-len", "12", "--random-output-len", "8", "--random-range-ratio", "1", "--num-prompts", "20",
                     "--output-file", "out.jsonl"]
        return subprocess.Popen([TANDEM, "bench", "serving", *arguments, *more], cwd=self.folder.name, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OPENAI_API_KEY": "the-key"})

    def bench(self, port, *more, status=0):
        process = self.start(port, *more)
        out, err = process.communicate(timeout=240)
        self.assertEqual(process.returncode, status, out + err)
        return out, err

    def lines(self):
        return [json.loads(line) for line in pathlib.Path(self.folder.name, "out.jsonl").read_text().splitlines()]

    def value(self, report, label):
        found = re.search(rf"^{re.escape(label)} *(\S+) *$", report, re.M)
        self.assertIsNotNone(found, f"no {label} in {report}")
        self.assertEqual(len(found[0]), max(51, 41 + len(found[1])))
        return found[1]

    def test_against_the_server(self):
        server = Server().wait_ready()
        self.addCleanup(server.stop)
        backends = ("lmdeploy", "sglang", "sglang-oai", "vllm-chat", "sglang-oai-chat")
        for backend in backends:
            out, _ = self.bench(server.port, "--backend", backend, "--output-details", "--max-concurrency", "6")
            self.assertEqual(self.value(out, "Backend:"), backend)
            self.assertEqual(self.value(out, "Successful requests:"), "20", backend)
            self.assertEqual(self.value(out, "Max request concurrency:"), "6")
            self.assertEqual(self.value(out, "Total input tokens:"), "240")
            self.assertEqual(self.value(out, "Total generated tokens:"), "160", backend)
            self.assertEqual(self.lines()[-1]["output_lens"], [8] * 20)
            if backend.endswith("-chat"):  # R1's thinking counts, and the server counts the tokens of the template
                self.assertGreater(int(self.value(out, "Total generated tokens (retokenized):")), 130)
                self.assertGreater(min(self.lines()[-1]["input_lens"]), 12)
            self.assertIn("#Input tokens: 240\n#Output tokens: 160\nStarting warmup with 1 sequences...\n", out)
            last = self.lines()[-1]
            self.assertEqual((last["completed"], last["failed"]), (20, 0))
            self.assertGreater(last["mean_ttft_ms"], 0)
            self.assertGreaterEqual(last["mean_e2e_latency_ms"], last["mean_ttft_ms"])
        self.assertEqual(len(self.lines()), len(backends))
        out, err = self.bench(server.port, "--model", "no-such", status=1)
        self.assertRegex(err, "error: the warm-up failed at .*404 Not Found.*no-such")

    def test_figures_are_those_of_the_server(self):
        server = MadeUp(speed=100)
        out, _ = self.bench(server.port, "--max-concurrency", "2", "--json", "--num-prompts", "6")
        report = json.loads(out)
        self.assertEqual(report, self.lines()[-1])
        self.assertEqual(server.peak, 2)
        self.assertEqual(report["max_concurrency"], 2)
        for name in ("median_tpot_ms", "median_itl_ms", "median_ttft_ms"):
            self.assertGreaterEqual(report[name], 10)  # 20, less what arrives together after the host was stopped
            self.assertLess(report[name], 80, name)
        self.assertEqual(len(server.requests), 7)
        head, body = server.requests[0]
        self.assertIn("Authorization: Bearer the-key", head)
        self.assertEqual(set(body), {"model", "prompt", "temperature", "best_of", "max_tokens", "stream", "ignore_eos"})

    def test_the_warm_up_keeps_the_limit_and_the_cache_is_emptied_as_asked(self):
        server = MadeUp(speed=1000)
        self.bench(server.port, "--max-concurrency", "2", "--warmup-requests", "8", "--num-prompts", "4", "--flush-cache")
        self.assertEqual((server.peak, len(server.requests)), (2, 12))
        self.assertEqual(server.emptied, ["/reset_prefix_cache"])
        _, err = self.bench(server.port, "--backend", "lmdeploy", "--flush-cache", status=1)
        self.assertIn("--flush-cache: http://127.0.0.1", err)
        self.assertIn("/flush_cache answers 404 Not Found", err)

    def test_requests_come_at_the_times_drawn(self):
        server = MadeUp(speed=100000)
        self.bench(server.port, "--request-rate", "20", "--seed", "42", "--random-input-len", "1", "--random-output-len", "1")
        times = server.arrivals[1:]
        # np.random.seed(42), 20 offsets below 495, then 20 times np.random.exponential(1 / 20); lengths use no random
        # numbers
        wanted = [0.001, 0.1752, 0.0893, 0.0119, 0.01, 0.0101, 0.0181, 0.0372, 0.0283, 0.0172, 0.0473, 0.0075, 0.0173, 0.0228, 0.0304, 0.0769, 0.0111, 0.0361, 0.0449]
        for i, gap in enumerate(wanted):
            self.assertGreater(times[i + 1] - times[0], sum(wanted[:i + 1]) - 0.03)
            self.assertLess(times[i + 1] - times[0], sum(wanted[:i + 1]) + 0.5)

    def test_what_breaks_is_counted_and_said(self):
        for how, words in (("empty", "a line has no choice"), ("refuse", "503 Service Unavailable: \"too many\""), ("cut", "partial message")):
            out, err = self.bench(MadeUp(how=how).port, "--num-prompts", "5", status=1)
            self.assertEqual(self.value(out, "Successful requests:"), "0")
            self.assertIn("error: 5 of 5 requests failed; the first: " + words, err)

    def test_interrupted_it_says_what_it_had(self):
        server = MadeUp(how="endless")
        process = self.start(server.port)
        while len(server.requests) < 20:
            time.sleep(0.01)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, err)
        self.assertEqual(self.value(out, "Successful requests:"), "0")
        self.assertGreater(int(self.value(out, "Total generated tokens:")), 100)
        self.assertGreater(float(self.value(out, "Mean ITL (ms):")), 1)
        self.assertIn("interrupted: 20 requests had not ended", err)
        self.assertEqual(self.lines()[-1]["interrupted"], 20)

    def test_sweep_and_search(self):
        server = MadeUp(speed=60)
        out, _ = self.bench(server.port, "--concurrency", "1,3", "--slo-tps-user", "10", "--max-concurrency", "12", "--plot", "sweep.svg",
                            "--random-output-len", "6")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if re.match(r"\| +\d", line)]
        self.assertEqual([int(row[0]) for row in rows][:3], [1, 2, 3])
        self.assertTrue(all(row[8] == "0" for row in rows))
        self.assertIn("yes", {row[9] for row in rows})
        found = re.search(r"10 tokens/s for each user: up to (\d+) at once", out)
        self.assertTrue(found and 2 <= int(found[1]) <= 6, out)
        svg = pathlib.Path(self.folder.name, "sweep.svg").read_text()
        self.assertTrue(svg.startswith("<svg") and svg.count("<circle") == len(rows))
        self.assertEqual(len(self.lines()), len(rows))

    def test_search_for_a_first_token_in_time(self):
        server = MadeUp(speed=40)  # n users wait n / 40 s for their first token
        out, _ = self.bench(server.port, "--slo-ttft", "0.16", "--random-output-len", "2", "--gpus", "4")
        found = re.search(r"\na first token within 0\.16 s: up to (\d+) at once", out)
        self.assertTrue(found and 2 <= int(found[1]) <= 6, out)
        header = next(line for line in out.splitlines() if line.startswith("| concurrency"))
        self.assertIn("| tok/s a GPU |", header)
        rows = [[float(cell) for cell in line.split("|")[2:4]] for line in out.splitlines() if re.match(r"\| +\d", line)]
        for output, each in rows:
            self.assertAlmostEqual(each, output / 4, delta=0.02)
        out, _ = self.bench(server.port, "--slo-tps-user", "1", "--slo-ttft", "0.01", "--random-output-len", "2", "--json")
        self.assertEqual(json.loads(out.splitlines()[-1]), {"slo_tps_user": 1.0, "slo_ttft": 0.01, "max_concurrency": 0})

    def test_preset(self):
        server = MadeUp(speed=10_000)
        process = subprocess.run(
            [TANDEM, "bench", "serving", "--backend", "vllm", "--host", "127.0.0.1", "--port", str(server.port), "--tokenizer", TINY,
             "--preset", "isl1k-osl1k", "--random-output-len", "3", "--concurrency", "2", "--output-file", "out.jsonl"],
            cwd=self.folder.name, capture_output=True, text=True, check=True, timeout=240)
        line = self.lines()[0]
        self.assertEqual([line[key] for key in ("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "completed")],
                         ["random-ids", 1000, 3, 1, 8])
        self.assertIn("#Input tokens: 8000\n", process.stdout)

    def test_sweep_over_lengths(self):
        server = MadeUp(speed=10_000)
        command = [TANDEM, "bench", "serving", "--backend", "vllm", "--host", "127.0.0.1", "--port", str(server.port), "--tokenizer", TINY,
                   "--dataset-name", "random-ids", "--random-range-ratio", "1", "--sweep-lengths", "12:3,6:2", "--sweep-num-prompts", "4,2",
                   "--gpus", "2"]
        out = subprocess.run(command, cwd=self.folder.name, capture_output=True, text=True, check=True, timeout=240).stdout
        (folder,) = pathlib.Path(self.folder.name).iterdir()
        self.assertRegex(folder.name, r"^20\d{6}$")
        names = [f"speed_in{i}_out{o}_n{n}" for i, o in ((12, 3), (6, 2)) for n in (4, 2)]
        self.assertEqual({path.name for path in folder.iterdir()},
                         {"summary.csv", *(f"{name}.jsonl" for name in names), *(f"{name}.log" for name in names)})
        header, *lines = (folder / "summary.csv").read_text().splitlines()
        rows = [dict(zip(header.split(","), line.split(","))) for line in lines]
        self.assertEqual([[int(row[key]) for key in ("input_tokens", "output_tokens", "num_prompts", "completed", "failed", "interrupted")]
                          for row in rows], [[12, 3, 4, 4, 0, 0], [12, 3, 2, 2, 0, 0], [6, 2, 4, 4, 0, 0], [6, 2, 2, 2, 0, 0]])
        for name, row in zip(names, rows):
            report = json.loads((folder / f"{name}.jsonl").read_text())
            self.assertAlmostEqual(float(row["output_tokens_per_s"]), report["output_throughput"], delta=0.01)
            self.assertAlmostEqual(float(row["output_tokens_per_s_per_gpu"]), report["output_throughput"] / 2, delta=0.01)
            self.assertAlmostEqual(float(row["mean_ttft_ms"]), report["mean_ttft_ms"], delta=0.01)
            self.assertIn("Output token throughput (tok/s):", (folder / f"{name}.log").read_text())
        self.assertIn(f"in {folder.name}: a file of each run, and summary.csv\n", out)
        self.assertEqual(len(re.findall(r"^ +(12|6) +(3|2) +(4|2) ", out, re.MULTILINE)), 4)
        out = subprocess.run([*command, "--sweep-dir", "here/there", "--json"], cwd=self.folder.name, capture_output=True, text=True,
                             check=True, timeout=240).stdout
        self.assertEqual(out, pathlib.Path(self.folder.name, "here/there/summary.csv").read_text())

    def test_simulated_routing_is_named(self):
        server = Server("--simulate-routing", "balanced-ranks:8").wait_ready()
        self.addCleanup(server.stop)
        out, _ = self.bench(server.port, "--num-prompts", "2")
        self.assertIn("The server simulates routing: balanced-ranks:8.\n", out)
        self.assertEqual(self.lines()[0]["simulated_routing"], "balanced-ranks:8")
        out, _ = self.bench(MadeUp().port, "--num-prompts", "2")
        self.assertNotIn("simulate", out)
        self.assertNotIn("simulated_routing", self.lines()[1])

    def test_bad_input_is_one_line(self):
        port = MadeUp().port
        for arguments, status, words in (
                (["--port", "1"], 1, "no answer from http://127.0.0.1:1/v1/models: Connection refused: start the server"),
                (["--base-url", f"http://127.0.0.1:{port}/elsewhere"], 1, "/elsewhere/v1/models answers 404 Not Found"),
                (["--base-url", "https://127.0.0.1"], 2, "must begin with http://"),
                (["--host", "no.such.host.invalid"], 1, "cannot find the host no.such.host.invalid"),
                (["--backend", "trt"], 2, "--backend trt: must be one of sglang, "),
                (["--dataset-name", "mmmu"], 2, "--dataset-name mmmu"),
                (["--dataset-name", "random"], 2, "give --dataset-path"),
                (["--dataset-name", "random", "--dataset-path", "/no/such"], 2, "/no/such"),
                (["--tokenizer", "/no/such"], 2, "give --tokenizer"),
                (["--num-prompts", "0"], 2, "--num-prompts 0"),
                (["--request-rate", "0"], 2, "--request-rate 0"),
                (["--random-range-ratio", "2"], 2, "--random-range-ratio 2"),
                (["--concurrency", "50"], 2, "--num-prompts 50"),
                (["--extra-request-body", "[1]"], 2, "must be a JSON object"),
                (["--output-file", "/no/such/folder/f"], 2, "--output-file /no/such/folder/f: cannot be written"),
                (["--plot", "x.svg"], 2, "needs --concurrency or --slo-tps-user")):
            out, err = self.bench(port, *arguments, status=status)
            self.assertIn(words, err)
            self.assertEqual(len(err.splitlines()), 1, err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
