"""tandem serve as a process: options, keys, TLS, pages of other origins, signals.

    python3 tests/serve_process_test.py PATH_OF_TANDEM
"""
import concurrent.futures
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from free_address import free_port
from running_server import ANSWER, ROOT, TANDEM, TINY, Server, chat

CERTIFICATES = ROOT / "tests" / "tls"


class Tls(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        files = ["--cert", str(CERTIFICATES / "localhost.crt"), "--key", str(CERTIFICATES / "localhost.key")]
        cls.server = Server(*files, certificate=CERTIFICATES / "localhost.crt").wait_ready()

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0

    def raw(self):
        plain = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        return self.server.trusted.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False)

    def test_answers_and_streams(self):
        self.assertEqual(self.server.ok("/v1/chat/completions", chat())["choices"][0]["message"]["content"], ANSWER)
        deltas = [e["choices"][0]["delta"] for e in self.server.events("/v1/chat/completions", chat(stream=True)) if e["choices"]]
        self.assertEqual("".join(d.get("content") or "" for d in deltas), ANSWER)

    def test_requests_one_after_another_and_the_end(self):
        with self.raw() as client:
            self.assertIn(client.version(), ("TLSv1.2", "TLSv1.3"))
            body = json.dumps({"prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": True})
            request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            # The second request arrives while the first is answered.
            client.sendall(request)
            received = client.recv(100)
            client.sendall(request.replace(b"1.1\r\n", b"1.1\r\nConnection: close\r\n"))
            while block := client.recv(1 << 16):  # TLS ends regularly, or Python would raise an exception
                received += block
        self.assertEqual(received.count(b"HTTP/1.1 200 OK"), 2)
        self.assertEqual(received.count(b"data: [DONE]"), 2)

    def test_crowd(self):
        def ask(i):
            return self.server.ok("/v1/completions", {"prompt": f"What is {i} + 7?", "max_tokens": 30, "ignore_eos": True})["usage"]["completion_tokens"]
        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            self.assertEqual(set(pool.map(ask, range(120))), {30})

    def test_clients_that_go_away_leave_room(self):
        body = json.dumps({"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True})
        for _ in range(5):
            with self.raw() as client:
                client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                client.recv(1000)
        self.server.wait_idle()

    def test_who_does_not_speak_tls(self):
        for sent in (b"GET /health HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(range(256)), b"\x00" * 500):
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as client:
                client.sendall(sent)
                received = b""
                try:
                    while block := client.recv(1 << 16):
                        received += block
                except ConnectionResetError:
                    pass
                if sent.startswith(b"GET"):
                    self.assertIn(b"https://", received)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as silent, self.raw() as half:
            half.sendall(b"GET /hea")
            self.assertEqual(self.server.get("/health")[0], 200)
            silent.close()

    def test_bad_certificates(self):
        good, key = str(CERTIFICATES / "localhost.crt"), str(CERTIFICATES / "localhost.key")
        for options, words in ((["--cert", good], "--key"), (["--key", key], "--cert"), (["--cert", "/nowhere.crt", "--key", key], "/nowhere.crt"),
                               (["--cert", key, "--key", key], "PEM"), (["--cert", good, "--key", good], "private key"),
                               (["--cert", good, "--key", str(CERTIFICATES / "other.key")], "other.key"),
                               (["--cert", good, "--key", key, "--proxy-url", "http://127.0.0.1:1", "--node-url", "http://a:1"],
                                "--node-url http://a:1: this server speaks TLS (--cert): write https://a:1")):
            result = subprocess.run([TANDEM, "serve", TINY, "--port", "0", *options], capture_output=True, text=True, check=False, timeout=30)
            self.assertEqual(result.returncode, 2, options)
            self.assertIn(words, result.stderr)
            self.assertEqual(result.stderr.count("error:"), 1)


class Placed(unittest.TestCase):
    def test_the_context_is_as_placed(self):
        """Without --ctx a sequence may be as long as the placement's cache, not longer."""
        host = ["host0.cpu"]
        placement = {"backbone": {"format": "fp8", "stages": [{"layers": "0-2", "devices": host}]},
                     "embedding": {"on": "cpu"}, "head": {"on": "cpu", "replicated": True}, "kv": {"tokens": 512, "type": "bf16"},
                     "experts": {"layers": [{"layers": "1-2", "groups": [{"experts": "0-15", "format": "fp8", "owners": host}]}]},
                     "prefill": {"chunk_tokens": 512, "stream_from_tokens": 0}, "micro_batches": 1}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(placement, file)
            file.flush()
            server = Server("--placement", file.name).wait_ready()
            try:
                self.assertEqual(server.get("/v1/models")[1]["data"][0]["max_model_len"], 512)
                self.assertEqual(server.ok("/v1/chat/completions", chat())["choices"][0]["message"]["content"], ANSWER)
            finally:
                self.assertEqual(server.stop(), 0)


class PagesOfOthers(unittest.TestCase):
    """The requests that a browser sends before a page may read an answer."""

    def heads(self, server, origin):
        asked = {"Origin": origin}
        preflight = {**asked, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
        stream = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True})
        return [server.request("OPTIONS", "/v1/chat/completions", headers=preflight), server.request("GET", "/health", headers=asked),
                server.request("POST", "/v1/completions", stream, {**asked, "Authorization": "Bearer secret"}),
                server.request("POST", "/v1/completions", "{", asked)]

    def test_origins(self):
        server = Server("--api-key", "secret", "--cors-origin", "https://a.example", "--cors-origin", "http://localhost:3000").wait_ready()
        try:
            for origin in ("https://a.example", "http://localhost:3000"):
                answers = self.heads(server, origin)
                self.assertEqual([a[0] for a in answers], [200, 200, 200, 401])
                self.assertEqual({(a[1].get("Access-Control-Allow-Origin"), a[1].get("Vary")) for a in answers}, {(origin, "Origin")})
                self.assertEqual(answers[0][1]["Access-Control-Allow-Headers"], "*, Authorization")
                self.assertIn("POST", answers[0][1]["Access-Control-Allow-Methods"])
            for origin in ("https://b.example", "https://a.example.org", "null", "*"):
                answers = self.heads(server, origin)
                self.assertEqual([a[0] for a in answers], [405, 200, 200, 401])
                self.assertFalse([h for a in answers for h in a[1] if h.startswith("Access-Control")])
        finally:
            self.assertEqual(server.stop(), 0)

    def test_any_and_none(self):
        for options, allowed in ((["--cors-origin", "*"], {"*"}), ([], {None})):
            server = Server(*options).wait_ready()
            self.assertEqual({a[1].get("Access-Control-Allow-Origin") for a in self.heads(server, "https://a.example")}, allowed)
            self.assertNotIn("Access-Control-Allow-Origin", server.request("GET", "/health")[1])
            self.assertEqual(server.stop(), 0)


class LifeCycle(unittest.TestCase):
    def test_key_and_name(self):
        server = Server("--api-key", "secret", "--served-model-name", "tiny").wait_ready()
        try:
            self.assertEqual(server.get("/v1/models")[0], 401)
            for key in ("", "Bearer", "Bearer secre", "Bearer secrets", "secret"):
                self.assertEqual(server.get("/v1/models", headers={"Authorization": key})[0], 401)
            self.assertEqual(server.get("/v1/models", headers={"Authorization": "Bearer secret"})[1]["data"][0]["id"], "tiny")
            self.assertEqual(server.get("/health")[0], 200)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_few_pages_change_no_text(self):
        questions = [f"What is {100 + i} + {900 - i}?" for i in range(12)]
        texts = []
        for options in (["--no-prefix-cache", "--no-async-output"],
                        ["--cache-max-entry-count", "0.01", "--max-prefill-token-num", "64", "--max-batch-size", "16"],
                        ["--ctx", "512", "--kv-tokens", "512", "--chunk", "64", "--max-batch", "16"]):
            server = Server(*options).wait_ready()
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                texts.append(list(pool.map(lambda q: server.ok("/v1/completions", {"prompt": q, "max_tokens": 200, "temperature": 0, "ignore_eos": True})
                                           ["choices"], questions)))
            preempted = server.metric("vllm:num_preemptions_total")
            self.assertEqual(server.stop(), 0)
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[0], texts[2])
        self.assertGreater(preempted, 0)

    def test_term_lets_answers_end(self):
        server = Server("--drain", "600").wait_ready()
        result = {}

        def ask():
            result["events"] = list(server.events("/v1/completions", {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}))
        client = threading.Thread(target=ask)
        client.start()
        while server.metric("vllm:num_requests_running") == 0:
            time.sleep(0.01)
        self.assertEqual(server.stop(), 0)
        client.join()
        self.assertEqual(result["events"][-1]["choices"][0]["finish_reason"], "length")

    def stream(self, server):
        """A client whose answer does not end soon."""
        client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        body = json.dumps({"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True})
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        client.recv(100)
        return client

    def test_a_second_signal_ends_at_once(self):
        for first, second in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)):
            server = Server("--drain", "600").wait_ready()
            with self.stream(server) as client:
                server.process.send_signal(first)
                while True:  # until the first signal is heard
                    with socket.socket() as late:
                        if late.connect_ex(("127.0.0.1", server.port)) != 0:
                            break
                self.assertGreater(len(client.recv(100)), 0, "the answer goes on")
                server.process.send_signal(second)
                self.assertEqual(server.process.wait(timeout=20), 0)
                server.process.stderr.close()

    def test_term_while_the_model_is_loaded(self):
        self.assertEqual(Server().stop(), 0)

    def test_says_what_it_has(self):
        def ready(*options):
            server = Server(*options, "--threads", "1", "--isa", "reference").wait_ready()
            self.assertEqual(server.stop(), 0)
            return server.lines
        rest = "1 threads, reference\n"
        self.assertEqual(ready("--ctx", "4096", "--kv-tokens", "200000"), [f"ready: context 4096, KV cache of 200000 tokens (0.38 GB), {rest}"])
        # At most every sequence at full length.
        self.assertEqual(ready("--ctx", "640", "--max-batch", "3"), [f"ready: context 640, KV cache of 1920 tokens (0.00 GB), {rest}"])

    def test_a_line_for_each_answer(self):
        server = Server("--log-requests").wait_ready()
        for n in (1, 2):
            server.ok("/v1/completions", {"prompt": ["ab" * 50, "b"], "n": n, "max_tokens": 3, "ignore_eos": True})
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "timeout": 0})
        self.assertEqual(server.stop(), 0)
        tokens = re.findall(r"prompt=(\d+)", "".join(server.lines))
        number = r"\d+\.\d{3}s"
        # A prompt that begins a step later than the other finds its first token.
        self.assertRegex("".join(server.lines[1:]), rf"^cmpl-[0-9a-f]{{32}} prompt={tokens[0]} cached=[01] generated=6 answers=2 first={number} total={number} length\n"
                         rf"cmpl-[0-9a-f]{{32}} prompt={tokens[0]} cached=\d+ generated=12 answers=4 first={number} total={number} length\n"
                         rf"cmpl-[0-9a-f]{{32}} prompt={tokens[2]} cached=0 generated=0 answers=1 first=0\.000s total={number} abort\n$")

    def test_term_ends_what_takes_too_long(self):
        server = Server("--drain", "0").wait_ready()
        s = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        body = json.dumps({"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True})
        s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        s.recv(100)
        started = time.time()
        self.assertEqual(server.stop(), 0)
        self.assertLess(time.time() - started, 5)
        s.close()

    def test_the_first_request_takes_no_longer_than_the_next(self):
        first, second = [], []
        for _ in range(20):  # other programs may disturb some rounds
            server = Server().wait_ready()
            self.assertEqual(server.metric("tandem:generated_tokens_total"), 0)  # tokens of the warm-up are not counted
            self.assertEqual(server.metric("vllm:prefix_cache_queries_total"), 0)
            taken = [0]
            for prompt in "ab":
                server.ok("/v1/completions", {"prompt": prompt, "max_tokens": 1, "ignore_eos": True})
                taken.append(server.metric("vllm:time_to_first_token_seconds_sum"))
            first.append(taken[1])
            second.append(taken[2] - taken[1])
            self.assertEqual(server.stop(), 0)
            if min(first) < 3 * min(second) + 0.0005:
                return
        self.fail((first, second))

    def test_a_log_that_cannot_be_written_ends_nothing(self):
        port = free_port()
        with open("/dev/full", "w", encoding="utf-8") as full:
            server = Server.__new__(Server)
            server.trusted, server.port = None, port
            server.process = subprocess.Popen([TANDEM, "serve", TINY, "--quiet", "--log-requests", "--port", str(port)], stderr=full)
        try:
            server.wait_listening()
            server.wait_ready()
            for _ in range(3):
                server.ok("/v1/completions", {"prompt": "a", "max_tokens": 2})
        finally:
            server.process.terminate()
            self.assertEqual(server.process.wait(timeout=60), 0)

    def test_memory_is_bounded_and_comes_back(self):
        server = Server().wait_ready()
        try:
            with open(f"/proc/{server.process.pid}/maps", encoding="utf-8") as maps:
                if re.search(r"lib[at]san", maps.read()):
                    self.skipTest("sanitizers keep memory")
            before = server.resident_bytes()
            body = b'{"prompt":[' + b'"",' * 5_000_000 + b'""]}'
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                self.assertEqual(set(pool.map(lambda _: server.post("/v1/completions", body)[0], range(4))), {400})
            self.assertLess(server.resident_bytes() - before, 100 << 20)
            # Bodies that are sent almost completely and never end: 300 MB, of which the server takes 256 MiB.
            clients = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {16 << 20}\r\n\r\n".encode()
            with concurrent.futures.ThreadPoolExecutor(20) as pool:
                list(pool.map(lambda client: client.sendall(head + bytes(15 << 20)), clients))
            refused = [c for c in clients if select.select([c], [], [], 0.5)[0]]
            self.assertTrue(2 <= len(refused) <= 4, len(refused))
            for client in refused:
                self.assertTrue(client.recv(4096).startswith(b"HTTP/1.1 503 "))
            self.assertEqual(server.ok("/v1/completions", {"prompt": "a", "max_tokens": 1})["usage"]["completion_tokens"], 1)
            for client in clients:
                client.close()
            self.assertEqual(server.post("/v1/completions", body)[0], 400)
            self.assertLess(server.resident_bytes() - before, 100 << 20)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_connections_leave_room_for_files(self):
        """Of the files that a process may open, 64 are not for connections; with few of them, 64 are."""
        for n_files, n_connections in ((100, 64), (128, 64), (129, 65), (160, 96)):
            server = Server(limit_of_files=n_files)
            clients = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(n_connections + 3)]
            answered = 0
            for client in clients:
                try:
                    client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                    answered += client.recv(8) == b"HTTP/1.1"
                except ConnectionResetError:
                    pass
            for client in clients:
                client.close()
            self.assertEqual(server.stop(), 0)
            self.assertEqual(answered, n_connections, n_files)

    def test_bad_options(self):
        for options, words in ((["--port", "99999"], "--port"), (["--max-batch", "0"], "--max-batch"), (["--ctx", "4096", "--kv-tokens", "64"], "--kv-tokens"),
                               (["--host", "256.1.1.1"], "256.1.1.1")):
            result = subprocess.run([TANDEM, "serve", TINY, *options], capture_output=True, text=True, check=False, timeout=30)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(words, result.stderr)
            self.assertNotIn("listening", result.stderr)
        result = subprocess.run([TANDEM, "serve", "--cors-origin", "https://a.example", "/nowhere"], capture_output=True, text=True, check=False, timeout=30)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("/nowhere", result.stderr)  # --cors-origin takes one word, so the model may follow it
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            result = subprocess.run([TANDEM, "serve", TINY, "--port", str(taken.getsockname()[1])], capture_output=True, text=True, check=False,
                                    timeout=30)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("cannot listen", result.stderr)


if __name__ == "__main__":
    os.environ.pop("TANDEM_API_KEY", None)
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
