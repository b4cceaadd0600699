"""Runs `tandem route` as a process for tests, in front of backends that a test plays."""
import atexit
import json
import re
import socket
import ssl
import subprocess
import threading
import time
import unittest

from free_address import free_port
from running_server import TANDEM, Server

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}
FAST = ("--check-interval", "0.05", "--check-timeout", "1")


def until(condition, what, seconds=20):
    """Polls until the condition holds; returns its value."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(what)


def whole(body, status="200 OK", fields=""):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{fields}\r\n".encode() + body


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(text):
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text):
    return chunk(f"data: {json.dumps({'choices': [{'text': text}]})}\n\n")


class Backend:
    """Answers checks, and calls `answer(socket, head, body)` for every other request. When that returns False the connection ends. `tls`:
    a context of a server with a certificate for localhost and 127.0.0.1."""

    def __init__(self, answer=lambda client, head, body: client.sendall(whole({"ok": True})), models=MODELS, port=None, tls=None, host="127.0.0.1"):
        self.answer, self.models, self.healthy, self.tls = answer, models, True, tls
        self.requests, self.clients, self.n_connections = [], set(), 0
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind((host, port or free_port()))
        self.listener.listen(256)
        self.port = self.listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.clients.add(client)
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, accepted):
        client = accepted
        data, used = b"", False
        try:
            if self.tls:
                client = self.tls.wrap_socket(client, server_side=True)
            while True:
                while b"\r\n\r\n" not in data:
                    piece = client.recv(65536)
                    if not piece:
                        return
                    data += piece
                head, _, data = data.partition(b"\r\n\r\n")
                head = head.decode()
                length = re.search(r"content-length: (\d+)", head, re.I)
                while len(data) < int(length[1] if length else 0):
                    data += client.recv(65536)
                body, data = data[:int(length[1] if length else 0)], data[int(length[1] if length else 0):]
                path = head.split(" ")[1]
                if path == "/health":
                    client.sendall(whole({}, "200 OK" if self.healthy else "503 Service Unavailable"))
                elif path == "/v1/models":
                    client.sendall(whole(self.models))
                else:
                    self.n_connections += not used
                    used = True
                    self.requests.append((head, body))
                    if self.answer(client, head, body) is False:
                        return
        except OSError:
            pass
        finally:
            self.clients.discard(accepted)
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            client.close()

    def stop(self):
        """Like a process that is killed."""
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has stopped
        self.listener.close()
        for client in list(self.clients):
            try:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Router(Server):
    def __init__(self, *arguments, backends=(), port=0, certificate=None):
        listed = ("--backends", ",".join(b if isinstance(b, str) else b.url for b in backends)) if backends else ()
        self.trusted = ssl.create_default_context(cafile=certificate) if certificate else None
        fast = () if "--check-timeout" in arguments else FAST
        self.process = subprocess.Popen([TANDEM, "route", "--port", str(port), *fast, *listed, *arguments], stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)
        self.lines = []
        line = self.process.stderr.readline()
        listening = re.search(r"https?://[^:]+:(\d+)", line)
        if not listening:
            raise AssertionError(line + self.process.stderr.read())
        self.port = int(listening[1])
        self.url = f"https://localhost:{self.port}" if certificate else f"http://127.0.0.1:{self.port}"
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()

    def state(self, backend, **more):
        url = backend if isinstance(backend, str) else backend.url
        return next((b for b in self.get("/backends", **more)[1]["backends"] if b["url"] == url), {"state": "unknown"})

    def wait_state(self, state, *backends, **more):
        for backend in backends:
            until(lambda: self.state(backend, **more)["state"] == state, f"{state}: {self.get('/backends', **more)[1]}")
        return self

    def wait_up(self, *backends, **more):
        return self.wait_state("up", *backends, **more)

    def number(self, name, backend):
        _, text = self.get("/metrics")
        return float(re.search(rf'^tandem:router_{name}{{backend="{re.escape(backend.url)}"}} (\S+)$', text, re.M)[1])


class WithRouter(unittest.TestCase):
    def setUp(self):
        self.routers = []

    def tearDown(self):
        for router in self.routers:
            self.assertIsNone(router.process.poll(), "the router has ended")
            self.assertEqual(router.stop(), 0)

    def router(self, *options, **more):
        """A router that has to run until the end of the test."""
        self.routers.append(Router(*options, **more))
        return self.routers[-1]

    def start(self, *answers, options=()):
        """Backends with these answers, and a router that knows that they are up."""
        backends = [Backend(answer) for answer in answers]
        for backend in backends:
            self.addCleanup(backend.stop)
        return self.router(*options, backends=backends).wait_up(*backends), backends
