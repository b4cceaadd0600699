"""tandem route as a process: in front of backends that a test plays, and of several `tandem serve`.

    python3 tests/route_test.py PATH_OF_TANDEM
"""
import concurrent.futures
import http.client
import itertools
import json
import os
import pathlib
import queue
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from free_address import free_address, free_port
from running_router import END, MODELS, STREAM, Backend, Router, WithRouter, chunk, event, until, whole
from running_server import ANSWER, ROOT, TANDEM, TINY, Server, chat

CERTIFICATE, KEY = ROOT / "tests" / "tls" / "localhost.crt", ROOT / "tests" / "tls" / "localhost.key"


def hang_up(client, head, body):
    return False


def reset(client, head, body):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return False


class Forwarding(WithRouter):
    def test_everything_of_a_request_arrives(self):
        answer = whole(b"\x00binary\xff", "418 I'm a teapot", "X-Answer: 7\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n")
        router, (backend,) = self.start(lambda client, head, body: client.sendall(answer))
        body = bytes(range(256)) * 1000
        status, fields, got = router.request("POST", "/v1/things/%2F?a=b&c", body, {"X-Mine": "1", "Authorization": "Bearer k", "Connection": "X-Gone",
                                                                                 "X-Gone": "2", "Content-Type": "x/y"})
        self.assertEqual((status, got, fields["X-Answer"]), (418, b"\x00binary\xff", "7"))
        self.assertNotIn("X-Hop", fields)
        head, received = backend.requests[0]
        self.assertTrue(head.startswith("POST /v1/things/%2F?a=b&c HTTP/1.1\r\n"), head)
        self.assertEqual(received, body)
        for line in ("X-Mine: 1", "Authorization: Bearer k", "Content-Type: x/y", f"Host: 127.0.0.1:{backend.port}", f"Content-Length: {len(body)}"):
            self.assertIn(line, head.split("\r\n"))
        self.assertNotIn("X-Gone", head)
        status, fields, got = router.request("HEAD", "/version")
        self.assertEqual((status, got, fields["Content-Length"]), (418, b"", "8"))

    def test_connections_to_backends_are_used_again(self):
        router, (backend,) = self.start(lambda client, head, body: client.sendall(whole({})))
        for _ in range(10):
            self.assertEqual(router.post("/v1/completions", {"prompt": "a"})[0], 200)
        self.assertEqual((len(backend.requests), backend.n_connections), (10, 1))

    def test_a_kept_connection_that_the_backend_closes(self):
        """It reads the second request of a connection and closes, as when its time limit ends meanwhile."""
        answered = set()

        def answer(client, head, body):
            if client in answered:
                return False
            answered.add(client)
            client.sendall(whole({}))
        router, (backend,) = self.start(answer)
        for _ in range(3):
            self.assertEqual(router.post("/v1/completions", {"prompt": "a"})[0], 200)
        self.assertEqual((len(backend.requests), router.number("backend_failures_total", backend)), (5, 0))

    def test_a_client_of_http_10(self):
        router, _ = self.start(lambda client, head, body: client.sendall(STREAM + event("a") + END))
        with socket.create_connection(("127.0.0.1", router.port), timeout=20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
            received = b""
            while block := client.recv(65536):
                received += block
        head, _, body = received.partition(b"\r\n\r\n")
        self.assertEqual(body, b'data: {"choices": [{"text": "a"}]}\n\n')
        self.assertNotIn(b"transfer-encoding", head.lower())

    def test_a_stream_arrives_chunk_by_chunk(self):
        got = queue.Queue()

        def answer(client, head, body):
            client.sendall(STREAM)
            for i in range(5):
                client.sendall(event(str(i)))
                self.assertEqual(got.get(timeout=20), i)  # the client has it before the next is sent
            client.sendall(chunk("data: [DONE]\n\n") + END)
        router, _ = self.start(answer)
        texts = []
        for e in router.events("/v1/completions", {"prompt": "a", "stream": True}):
            texts.append(e["choices"][0]["text"])
            got.put(int(texts[-1]))
        self.assertEqual(texts, list("01234"))

    def test_many_streams_at_once(self):
        def answer(client, head, body):
            client.sendall(STREAM)
            for i in range(20):
                client.sendall(event(json.loads(body)["prompt"] + str(i)))
            client.sendall(chunk("data: [DONE]\n\n") + END)
        router, backends = self.start(answer, answer)

        def ask(n):
            return [e["choices"][0]["text"] for e in router.events("/v1/completions", {"prompt": f"{n}:", "stream": True})]
        with concurrent.futures.ThreadPoolExecutor(30) as pool:
            for n, texts in enumerate(pool.map(ask, range(90))):
                self.assertEqual(texts, [f"{n}:{i}" for i in range(20)])
        self.assertGreater(min(len(b.requests) for b in backends), 5)
        self.assertEqual([router.state(b)["running"] for b in backends], [0, 0])
        self.assertGreater(router.state(backends[0])["tokens_per_second"], 0)

    def test_a_client_that_leaves_ends_its_request(self):
        ended = threading.Event()

        def answer(client, head, body):
            if b"stream" in body:
                client.sendall(STREAM + event("a"))
            if client.recv(1) == b"":
                ended.set()
            return False
        router, _ = self.start(answer)
        for body in (b'{"stream": true}', b"{}"):
            ended.clear()
            with socket.create_connection(("127.0.0.1", router.port), timeout=20) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                if b"stream" in body:
                    client.recv(10)
                else:
                    until(lambda: any(b["running"] for b in router.get("/backends")[1]["backends"]), "no request")
            self.assertTrue(ended.wait(20), body)

    def test_requests_follow_their_beginning(self):
        router, backends = self.start(*[lambda client, head, body: client.sendall(whole({}))] * 3)
        for n in range(6):
            before = [len(b.requests) for b in backends]
            for i in range(4):
                router.ok("/v1/chat/completions", chat(f"{n} " + "x" * 5000 + str(i), model="m"))
            self.assertEqual(sorted(len(b.requests) - old for b, old in zip(backends, before)), [0, 0, 4])
        self.assertEqual(sorted(len(b.requests) for b in backends), [8, 8, 8])

    def test_models(self):
        one, two = Backend(), Backend(models={"data": [{"id": "m"}, {"id": "a/b", "root": "r"}]})
        router = self.router(backends=(one, two)).wait_up(one, two)
        self.assertEqual(router.get("/v1/models")[1]["data"], [MODELS["data"][0], {"id": "a/b", "root": "r"}])
        for path in ("/v1/models/a/b", "/v1/models/a%2Fb"):
            self.assertEqual(router.get(path)[1]["root"], "r")
        self.assertEqual(router.get("/v1/models/c")[1]["error"]["code"], "model_not_found")
        for _ in range(4):
            self.assertEqual(router.post("/v1/completions", {"model": "a/b", "prompt": "x"})[0], 200)
        self.assertEqual((len(one.requests), len(two.requests)), (0, 4))
        status, answer = router.post("/v1/completions", {"model": "c", "prompt": "x"})
        self.assertEqual((status, answer["error"]["code"], answer["error"]["param"]), (404, "model_not_found", "model"))
        two.stop()
        self.assertEqual(router.post("/v1/completions", {"model": "a/b", "prompt": "x"})[0], 503)

    def test_paths_of_one_backend(self):
        router, (one, two) = self.start(*[lambda client, head, body: client.sendall(whole({}))] * 2)
        self.assertEqual(router.post("/flush_cache", b"")[0], 400)
        for backend in (one, two):
            self.assertEqual(router.post(f"/flush_cache?backend={backend.url}", b"")[0], 200)
            self.assertEqual(len(backend.requests), 1)
        self.assertEqual(router.post("/flush_cache?backend=http://127.0.0.1:1", b"")[0], 404)
        self.assertEqual(router.request("GET", "/backends/drain")[0], 405)
        self.assertEqual(router.request("PUT", "/nodes/status")[1]["Allow"], "GET, HEAD")


class Failures(WithRouter):
    ok = staticmethod(lambda client, head, body: client.sendall(whole({"ok": True})))

    def all_answered(self, bad, n=20, stream=False):
        router, (first, second) = self.start(bad, self.ok)
        for _ in range(n):
            self.assertEqual(router.post("/v1/completions", {"prompt": "a", "stream": stream}), (200, {"ok": True}))
        self.assertGreater(len(first.requests), 0)
        self.assertGreater(router.number("backend_retries_total", first), 0)
        return router, first, second

    def test_what_fails_before_the_first_byte_is_asked_elsewhere(self):
        for bad in (hang_up, reset, lambda c, h, b: c.sendall(b"SSH-2.0\r\n\r\n") or False, lambda c, h, b: c.sendall(STREAM) or False,
                    lambda c, h, b: c.sendall(whole({"ok": False})[:-2]) or False,
                    lambda c, h, b: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\n") or False,
                    lambda c, h, b: c.sendall(STREAM + b"zz\r\n") or False,
                    lambda c, h, b: c.sendall(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100000) or False):
            router, first, _ = self.all_answered(bad, n=4)
            self.assertGreater(router.number("backend_failures_total", first), 0)
            until(lambda: any(f"backend {first.url} is down" in line for line in router.lines), "a report")
            router.wait_up(first)  # its checks are good

    def test_refusals_are_asked_elsewhere(self):
        for status in ("429 Too Many Requests", "503 Service Unavailable"):
            router, first, _ = self.all_answered(lambda c, h, b, s=status: c.sendall(whole({"error": {"code": "busy"}}, s, "Retry-After: 9\r\n")), n=4)
            self.assertEqual((router.number("backend_failures_total", first), router.state(first)["state"]), (0, "up"))

    def test_the_last_refusal_is_passed_on(self):
        def busy(client, head, body):
            client.sendall(whole({"error": {"code": "busy"}}, "429 Too Many Requests", "Retry-After: 9\r\n"))
        router, backends = self.start(busy, busy)
        status, fields, body = router.request("POST", "/v1/completions", "{}")
        self.assertEqual((status, fields["Retry-After"], json.loads(body)["error"]["code"]), (429, "9", "busy"))
        self.assertEqual([len(b.requests) for b in backends], [1, 1])

    def test_other_errors_are_passed_on(self):
        router, backends = self.start(*[lambda c, h, b: c.sendall(whole({"error": {}}, "500 Internal Server Error"))] * 2)
        self.assertEqual(router.request("POST", "/v1/completions", "{}")[0], 500)
        self.assertEqual(sum(len(b.requests) for b in backends), 1)

    def test_a_stream_that_has_begun_ends_with_an_error_event(self):
        for part in (b"", b"20\r\ndata: {"):
            def answer(client, head, body, end=part):
                client.sendall(STREAM + event("a") + event("b") + end)
                return False
            router, _ = self.start(answer, answer)
            connection = router.connect(20)
            connection.request("POST", "/v1/completions", '{"stream": true}')
            response = connection.getresponse()
            text = response.read().decode()
            events = [json.loads(e.removeprefix("data: ")) for e in text.strip().split("\n\n") if not e.endswith("{")]
            self.assertEqual([e["choices"][0]["text"] for e in events[:2]], ["a", "b"])
            self.assertEqual((events[2]["error"]["code"], events[2]["error"]["type"]), ("backend_failed", "server_error"))
            self.assertEqual(len(events), 3)
            connection.close()

    def test_another_answer_that_breaks_off_is_not_whole(self):
        def answer(client, head, body):
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 500000)
            return False
        router, _ = self.start(answer)
        with self.assertRaises(http.client.IncompleteRead):
            router.request("GET", "/large")

    def test_nothing_is_up(self):
        router, (backend,) = self.start(hang_up)
        status, fields, body = router.request("POST", "/v1/completions", "{}")
        self.assertEqual((status, json.loads(body)["error"]["code"]), (503, "no_backend"))
        self.assertGreater(int(fields["Retry-After"]), 0)
        backend.stop()
        router.wait_state("down", backend)
        self.assertEqual(router.request("POST", "/v1/completions", "{}")[0], 503)
        self.assertEqual(router.get("/health")[0], 503)
        self.assertEqual(router.number("backend_up", backend), 0)
        again = Backend(port=backend.port)
        self.addCleanup(again.stop)
        router.wait_up(again)
        self.assertEqual(router.get("/health")[1]["backends_up"], 1)
        self.assertEqual(router.post("/v1/completions", {})[0], 200)
        self.assertTrue(any(f"backend {backend.url} is down" in line for line in router.lines), router.lines)

    def test_unhealthy_backends_get_nothing_and_end_what_they_have(self):
        release, begun = threading.Event(), threading.Event()

        def answer(client, head, body):
            begun.set()
            release.wait(20)
            client.sendall(whole({"ok": True}))
        router, (backend,) = self.start(answer)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(router.post, "/v1/completions", {})
            begun.wait(20)
            backend.healthy = False
            router.wait_state("down", backend)
            self.assertEqual(router.post("/v1/completions", {})[0], 503)
            release.set()
            self.assertEqual(running.result()[0], 200)

    def test_a_backend_that_does_not_answer_even_checks(self):
        """Its process hangs: connections stay open and nothing comes."""
        router, (bad, _) = self.start(self.ok, self.ok, options=("--check-interval", "0.05", "--check-timeout", "0.3"))
        over = threading.Event()
        self.addCleanup(over.set)
        bad.serve = lambda client: over.wait(20)
        for _ in range(4):
            self.assertEqual(router.post("/v1/completions", {})[0], 200)
        self.assertEqual((router.number("backend_requests_total", bad), router.number("backend_failures_total", bad)), (1, 1))
        self.assertEqual(router.state(bad)["state"], "down")

    def test_a_time_limit_of_the_first_byte(self):
        stuck = threading.Event()
        self.addCleanup(stuck.set)
        router, (bad, _) = self.start(lambda c, h, b: stuck.wait(20) and False, self.ok, options=("--first-byte-timeout", "0.2"))
        for _ in range(3):
            self.assertEqual(router.post("/v1/completions", {})[0], 200)
        self.assertGreater(len(bad.requests), 0)

    def test_random_answers_end_neither_the_router_nor_its_clients(self):
        rng = random.Random(1)
        good = [STREAM + event("a") + event("b") + END, whole({"a": 1}), b"HTTP/1.0 200 OK\r\n\r\nabc", b"HTTP/1.1 100 Continue\r\n\r\n" + whole({})]

        def answer(client, head, body):
            data = bytearray(rng.choice(good))
            for _ in range(rng.randrange(4)):
                data[rng.randrange(len(data))] = rng.choice(b"\r\n :;0123456789abcdefHTP/\xff")
            for i in range(0, len(data), 40):
                client.sendall(data[i:i + 40])
            return False
        router, backends = self.start(answer, answer)

        def ask(_):
            try:
                return router.request("POST", "/v1/completions", "{}", timeout=20)[0]
            except (http.client.HTTPException, ConnectionError):
                return 0
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(ask, range(300)))
        self.assertIn(200, statuses)
        self.assertEqual(sum(router.state(b)["running"] for b in backends), 0)


class Administration(WithRouter):
    def test_draining(self):
        release, begun = threading.Event(), threading.Event()

        def slow(client, head, body):
            if body == b"slow":
                begun.set()
                release.wait(20)
            client.sendall(whole({}))
        router, (one, two) = self.start(slow, slow)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(router.request, "POST", "/v1/completions", b"slow")
            begun.wait(20)
            busy, other = (one, two) if one.requests else (two, one)
            status, state = router.post(f"/backends/drain?backend={busy.url}", b"")
            self.assertEqual((status, state["draining"], state["running"]), (200, True, 1))
            for _ in range(5):
                self.assertEqual(router.post("/v1/completions", {})[0], 200)
            self.assertEqual((len(busy.requests), len(other.requests)), (1, 5))
            release.set()
            self.assertEqual(running.result()[0], 200)
        router.post(f"/backends/drain?backend={other.url}", b"")
        self.assertEqual(router.post("/v1/completions", {})[0], 503)
        self.assertFalse(router.post(f"/backends/undrain?backend={busy.url}", b"")[1]["draining"])
        self.assertEqual(router.post("/v1/completions", {})[0], 200)
        self.assertEqual(len(busy.requests), 2)
        self.assertEqual(router.post("/backends/drain?backend=http://127.0.0.1:1", b"")[0], 404)
        self.assertEqual(router.post("/backends/drain", b"")[0], 400)

    def test_term_lets_answers_end(self):
        release, begun = threading.Event(), threading.Event()

        def answer(client, head, body):
            client.sendall(STREAM + event("a"))
            begun.set()
            release.wait(20)
            client.sendall(event("b") + chunk("data: [DONE]\n\n") + END)
        backend = Backend(answer)
        router = Router(backends=(backend,)).wait_up(backend)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: [e["choices"][0]["text"] for e in router.events("/v1/completions", {"stream": True})])
            begun.wait(20)
            router.process.send_signal(signal.SIGTERM)

            def refused():
                with socket.socket() as late:
                    return late.connect_ex(("127.0.0.1", router.port)) != 0
            until(refused, "new connections")
            release.set()
            self.assertEqual(running.result(), ["a", "b"])
        self.assertEqual(router.process.wait(timeout=20), 0)
        router.process.stderr.close()

    def test_a_file_of_backends(self):
        one, two = Backend(), Backend()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "backends.txt")
            path.write_text(f"# one\n{one.url}\n", encoding="utf-8")
            router = self.router("--backends-file", str(path)).wait_up(one)
            path.write_text(f"{one.url}\nnonsense\n", encoding="utf-8")
            until(lambda: any("line 2" in line for line in router.lines), "a warning")
            self.assertEqual(router.state(one)["state"], "up")  # the list stays as it was
            path.write_text(f"{two.url}\n", encoding="utf-8")
            router.wait_up(two)
            self.assertEqual(router.state(one)["state"], "unknown")
            self.assertEqual(router.post("/v1/completions", {})[0], 200)
            self.assertEqual((len(one.requests), len(two.requests)), (0, 1))

    def test_keys(self):
        backend = Backend()
        router = self.router("--api-key", "secret", "--backend-api-key", "inner", "--accept-registration", "--cors-origin", "https://a.example",
                             backends=(backend,))
        key = {"Authorization": "Bearer secret"}
        router.wait_up(backend, headers=key)
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/backends"), ("POST", "/backends/drain"), ("POST", "/nodes/add"),
                             ("POST", "/nodes/remove"), ("GET", "/nodes/status"), ("GET", "/server_info")):
            self.assertEqual(router.request(method, path, "{}")[0], 401, path)
            self.assertEqual(router.request(method, path, "{}", {"Authorization": "Bearer wrong"})[0], 401, path)
        for path in ("/health", "/ping", "/metrics", "/version"):
            self.assertEqual(router.request("GET", path)[0], 200, path)
        status, fields, _ = router.request("POST", "/v1/completions", "{}", {**key, "Origin": "https://a.example"})
        self.assertEqual((status, fields["Access-Control-Allow-Origin"]), (200, "https://a.example"))
        self.assertIn("Authorization: Bearer inner", backend.requests[-1][0])
        self.assertNotIn("secret", backend.requests[-1][0])

    def test_https_for_clients(self):
        backend = Backend(lambda client, head, body: client.sendall(STREAM + event("a") + event("b") + chunk("data: [DONE]\n\n") + END))
        router = self.router("--cert", str(CERTIFICATE), "--key", str(KEY), backends=(backend,), certificate=CERTIFICATE).wait_up(backend)
        self.assertEqual([e["choices"][0]["text"] for e in router.events("/v1/completions", {"stream": True})], ["a", "b"])

    def test_nodes_as_lmdeploy_has_them(self):
        backend, listed = Backend(), Backend()
        router = self.router("--accept-registration", backends=(listed,)).wait_up(listed)
        self.assertEqual(router.post("/nodes/add", {"url": backend.url, "status": {"models": ["m"]}}), (200, "Added successfully"))
        self.assertEqual(router.post("/nodes/add", {"url": backend.url + "/"})[0], 200)
        router.wait_up(backend)
        self.assertEqual(router.get("/nodes/status")[1][backend.url]["models"], ["m"])
        self.assertEqual(router.post(f"/nodes/remove?node_url={backend.url}", b""), (200, "Deleted successfully"))
        self.assertEqual(list(router.get("/nodes/status")[1]), [listed.url])
        self.assertEqual(router.post(f"/nodes/remove?node_url={listed.url}", b"")[0], 409)
        for body in ("", "{", "[]", '{"url": 5}', '{"url": "ftp://x"}'):
            self.assertEqual(router.post("/nodes/add", body)[0], 400, body)
        closed = self.router(backends=(listed,))
        self.assertEqual(closed.post("/nodes/add", {"url": backend.url})[0], 403)

    def test_bad_options(self):
        for options, words in (([], "no backends"), (["--backends", "127.0.0.1:1"], "http://HOST:PORT"), (["--backends-file", "/nowhere"], "/nowhere"),
                               (["--accept-registration", "--port", "99999"], "--port"), (["--accept-registration", "--check-interval", "0"], "--check-interval"),
                               (["--backends", "http://a:1", "--backends-file", "x"], "one of them")):
            result = subprocess.run([TANDEM, "route", *options], capture_output=True, text=True, check=False, timeout=30)
            self.assertEqual((result.returncode, result.stderr.count("error:"), result.stderr.count("\n")), (2, 1, 1), result.stderr)
            self.assertIn(words, result.stderr)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            result = subprocess.run([TANDEM, "route", "--accept-registration", "--port", str(taken.getsockname()[1])], capture_output=True, text=True,
                                    check=False, timeout=30)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("cannot listen", result.stderr)


class HttpsToBackends(WithRouter):
    def backend(self, *answer, host="127.0.0.1", certificate=CERTIFICATE, key=KEY):
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        backend = Backend(*answer, tls=tls, host=host)
        self.addCleanup(backend.stop)
        return backend

    def test_requests_and_streams(self):
        def answer(client, head, body):
            if b"stream" in body:
                client.sendall(STREAM + event("a"))
                time.sleep(0.05)
                client.sendall(event("b") + chunk("data: [DONE]\n\n") + END)
            else:
                client.sendall(whole({"length": len(body)}))
        backend = self.backend(answer)
        router = self.router("--backend-ca", str(CERTIFICATE), backends=(backend,)).wait_up(backend)
        long = {"prompt": "a" * 1_000_000}
        for _ in range(3):
            self.assertEqual(router.ok("/v1/completions", long)["length"], len(json.dumps(long)))
            self.assertEqual([e["choices"][0]["text"] for e in router.events("/v1/completions", {"stream": True})], ["a", "b"])
        self.assertEqual((backend.n_connections, router.number("backend_failures_total", backend)), (1, 0))
        self.assertIn(f"Host: 127.0.0.1:{backend.port}", backend.requests[-1][0])

    def test_only_trusted_backends_get_requests(self):
        backend, of_other_name, plain = self.backend(), self.backend(host="127.0.0.2"), Backend()
        self.addCleanup(plain.stop)

        def says(router, of, words):
            until(lambda: re.search(words, router.state(of)["error"] or ""), words)
        untrusting = self.router(backends=(backend,))
        says(untrusting, backend, "its certificate is not trusted for 127.0.0.1: self")
        self.assertEqual(untrusting.post("/v1/completions", {"prompt": "a"})[0], 503)
        by_name, no_tls = f"https://localhost:{backend.port}", f"https://localhost:{plain.port}"
        router = self.router("--backend-ca", str(CERTIFICATE), backends=(by_name, of_other_name, no_tls)).wait_up(by_name)
        says(router, of_other_name, "(?i)not trusted for 127.0.0.2: hostname mismatch")
        says(router, no_tls, "time limit exceeded")  # it waits for the end of a head
        for _ in range(3):
            self.assertEqual(router.post("/v1/completions", {"prompt": "a"})[0], 200)
        self.assertEqual((len(backend.requests), len(of_other_name.requests), len(plain.requests)), (3, 0, 0))

    def test_a_signed_certificate_or_its_authority_is_trusted(self):
        signed = ROOT / "tests" / "tls" / "signed.crt"
        backend = self.backend(certificate=signed, key=ROOT / "tests" / "tls" / "other.key")
        for file in (signed, CERTIFICATE):
            router = self.router("--backend-ca", str(file), backends=(backend,)).wait_up(backend)
            self.assertEqual(router.post("/v1/completions", {"prompt": "a"})[0], 200)

    def test_a_connection_with_bytes_behind_an_answer_is_not_used_again(self):
        answers = itertools.count()

        def answer(client, head, body):
            client.sendall(whole({"n": next(answers)}))
            client.sendall(whole({"n": "of nobody"}))
        backend = self.backend(answer)
        router = self.router("--backend-ca", str(CERTIFICATE), backends=(backend,)).wait_up(backend)
        for n in range(4):
            self.assertEqual(router.ok("/v1/completions", {"prompt": "a"})["n"], n)
            time.sleep(0.05)
        self.assertEqual(backend.n_connections, 4)

    def test_a_backend_that_changes_to_https(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "backends"
            backend = self.backend()
            plain = f"http://127.0.0.1:{backend.port}"
            file.write_text(plain)
            router = self.router("--backend-ca", str(CERTIFICATE), "--backends-file", str(file), "--accept-registration")
            self.assertEqual(router.post("/nodes/add", {"url": backend.url})[0], 409)
            file.write_text(backend.url)
            router.wait_up(backend)
            self.assertEqual(router.post("/v1/completions", {"prompt": "a"})[0], 200)
        registered = self.router("--backend-ca", str(CERTIFICATE), "--accept-registration")
        for url in (plain, backend.url):
            self.assertEqual(registered.post("/nodes/add", {"url": url})[0], 200)
        registered.wait_up(backend)

    def test_an_answer_that_ends_without_notice_is_not_whole(self):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: {}\n\n"

        def with_notice(client, _, body):
            client.sendall(head)
            client.unwrap()
            return False

        def without(client, _, body):
            client.sendall(head)
            return False
        for answer, ends in ((with_notice, False), (without, True)):
            backend = self.backend(answer)
            router = self.router("--backend-ca", str(CERTIFICATE), backends=(backend,)).wait_up(backend)
            text = router.request("POST", "/v1/completions", json.dumps({"stream": True}))[2]
            self.assertEqual(b"backend_failed" in text, ends, text)

    def test_bad_authorities(self):
        for file, words in (("/nowhere.crt", "/nowhere.crt"), (KEY, "PEM")):
            for command in (["route", "--accept-registration", "--backend-ca", str(file)], ["serve", "--proxy-url", "https://a", "--proxy-ca", str(file)]):
                result = subprocess.run([TANDEM, *command], capture_output=True, text=True, check=False, timeout=30)
                self.assertEqual((result.returncode, result.stderr.count("error:")), (2, 1), result.stderr)
                self.assertIn(words, result.stderr)

    def test_servers_register_over_https(self):
        files = ("--cert", str(CERTIFICATE), "--key", str(KEY))
        router = self.router(*files, "--accept-registration", "--backend-ca", str(CERTIFICATE), certificate=CERTIFICATE)
        for more in ((), ("--host", "0.0.0.0")):  # the address is known, or that of the connection to the router
            with self.subTest(options=more):
                server = Server(*files, *more, "--threads", "1", "--proxy-url", router.url, "--proxy-ca", str(CERTIFICATE),
                                certificate=CERTIFICATE).wait_ready()
                router.wait_up(f"https://127.0.0.1:{server.port}")
                request = {"prompt": "a", "max_tokens": 3, "temperature": 0}
                self.assertEqual(router.ok("/v1/completions", request)["choices"], server.ok("/v1/completions", request)["choices"])
                self.assertEqual(server.stop(), 0)
                self.assertEqual(router.get("/nodes/status")[1], {})


class RealServers(unittest.TestCase):
    def url(self, server):
        return f"http://127.0.0.1:{server.port}"

    def test_answers_are_the_same_and_a_killed_server_loses_none(self):
        servers = [Server("--threads", "1").wait_ready() for _ in range(2)]
        router = Router(backends=[self.url(s) for s in servers])
        try:
            router.wait_up(*[self.url(s) for s in servers])
            questions = [f"What is {100 + i} + {i}?" for i in range(6)]
            for question in questions:
                request = {"prompt": question, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 2}
                self.assertEqual(router.ok("/v1/completions", request)["choices"], servers[0].ok("/v1/completions", request)["choices"])
            deltas = [e["choices"][0]["delta"] for e in router.events("/v1/chat/completions", chat(stream=True)) if e["choices"]]
            self.assertEqual("".join(d.get("content") or "" for d in deltas), ANSWER)
            self.assertEqual(router.ok("/tokenize", {"prompt": "abc"}), servers[0].ok("/tokenize", {"prompt": "abc"}))
            self.assertIn("<html", router.get("/")[1])
            # Prompts that take a while, so that the server is killed before the first tokens.
            prompt = " ".join(str(i % 97) for i in range(300))

            def ask(i):
                return "".join(e["choices"][0]["text"] for e in router.events(
                    "/v1/completions", {"prompt": f"{i} {prompt}", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}))
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                answers = [pool.submit(ask, i) for i in range(6)]
                # The one that has most of them.
                killed = until(lambda: next((s for s in servers if router.state(self.url(s))["running"] >= 3), None), "requests")
                killed.process.kill()
                texts = [a.result() for a in answers]
            self.assertGreater(router.state(self.url(killed))["retries"], 0)
            other = servers[1 - servers.index(killed)]
            for i, text in enumerate(texts):
                direct = other.ok("/v1/completions", {"prompt": f"{i} {prompt}", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
                self.assertEqual(text, direct["choices"][0]["text"])
        finally:
            self.assertEqual(router.stop(), 0)
            for server in servers:
                server.process.kill()
                server.process.wait()
                server.process.stderr.close()

    def test_a_prefill_server_is_asked_where_nothing_else_answers(self):
        keys = free_address()
        prefill = Server("--role", "prefill", "--kv-listen", keys, "--threads", "1")
        decode = Server("--role", "decode", "--prefill", keys, "--prefill-from", "64", "--threads", "1").wait_ready()
        router = Router(backends=[self.url(prefill.wait_ready()), self.url(decode)])
        try:
            router.wait_up(self.url(prefill), self.url(decode))
            until(lambda: any("prefill server" in line and "is up" in line for line in decode.lines), "keys")
            self.assertEqual([router.state(self.url(s))["role"] for s in (prefill, decode)], ["prefill", "decode"])
            self.assertNotIn("role", router.get("/v1/models")[1]["data"][0])
            request = {"prompt": " ".join(str(i % 97) for i in range(200)), "max_tokens": 4, "temperature": 0}
            choices = [router.ok("/v1/completions", {**request, "user": str(i)})["choices"] for i in range(3)]
            self.assertEqual([router.state(self.url(s))["requests"] for s in (prefill, decode)], [0, 3])
            self.assertIn("tandem:fetched_prompt_tokens_total", decode.get("/metrics")[1])
            decode.process.kill()
            choices.append(router.ok("/v1/completions", request)["choices"])
            self.assertEqual(router.state(self.url(prefill))["requests"], 1)
            self.assertEqual(choices, [prefill.ok("/v1/completions", request)["choices"]] * 4)
        finally:
            self.assertEqual(router.stop(), 0)
            for server in (prefill, decode):
                server.process.kill()
                server.process.wait()
                server.process.stderr.close()

    def test_registration_in_either_order(self):
        port = free_port()
        options = ("--proxy-url", f"http://127.0.0.1:{port}", "--threads", "1")
        early = Server(*options, "--api-key", "key").wait_ready()
        until(lambda: any("not registered at" in line for line in early.lines), "a report")
        router = Router("--accept-registration", "--api-key", "key", port=port)
        key = {"Authorization": "Bearer key"}
        late = Server(*options, "--host", "0.0.0.0", "--proxy-api-key", "key", "--api-key", "key")
        router.wait_up(self.url(early), self.url(late), headers=key)
        self.assertEqual(router.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=key)[0], 200)
        self.assertEqual(router.stop(), 0)
        router = Router("--accept-registration", "--api-key", "key", port=port)  # started anew
        router.wait_up(self.url(early), self.url(late), headers=key)
        self.assertEqual(early.stop(), 0)
        until(lambda: list(router.get("/nodes/status", headers=key)[1]) == [self.url(late)], "it has left")
        self.assertEqual(late.stop(), 0)
        self.assertEqual(router.get("/nodes/status", headers=key)[1], {})
        self.assertEqual(router.stop(), 0)
        wrong = subprocess.run([TANDEM, "serve", TINY, "--proxy-url", "router:80"], capture_output=True, text=True, check=False, timeout=30)
        self.assertEqual((wrong.returncode, wrong.stderr.count("\n")), (2, 1), wrong.stderr)


if __name__ == "__main__":
    os.environ.pop("TANDEM_API_KEY", None)
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
