"""Runs `tandem serve` as a process for tests, and sends requests. The first argument of the test is the program."""
import atexit
import http.client
import json
import os
import pathlib
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

TANDEM = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "build/tandem")
ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = str(ROOT / "models" / "tiny-r1")
QUESTION = "What is 478 + 356?"
THINKING = "Let me add 478+356.\nones 8+6+0=14 got 4\ntens 7+5+1=13 got 34\nhundreds 4+3+1=8 got 834"
ANSWER = "The answer is 834."


class Server:
    def __init__(self, *arguments, certificate=None, limit_of_files=None, before=()):
        self.trusted = ssl.create_default_context(cafile=certificate) if certificate else None
        self.process = subprocess.Popen([*before, TANDEM, "serve", TINY, "--port", "0", *arguments], stderr=subprocess.PIPE, text=True,
                                        preexec_fn=limit_of_files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit_of_files,) * 2)))
        atexit.register(self.process.kill)  # a test that fails leaves no process running
        self.lines = []
        for line in self.process.stderr:  # an MPI launcher may say something before
            if listening := re.search(r"https?://[^:]+:(\d+)", line):
                break
            self.lines.append(line)
        else:
            raise AssertionError("".join(self.lines))
        self.port = int(listening[1])
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()

    def wait_ready(self):
        for _ in range(600):
            if self.get("/health")[0] == 200:
                return self
            time.sleep(0.05)
        raise AssertionError("not ready")

    def wait_listening(self):
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("not listening")

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/statm", encoding="utf-8") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def connect(self, timeout):
        if self.trusted:
            return http.client.HTTPSConnection("localhost", self.port, timeout=timeout, context=self.trusted)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers=None, timeout=60):
        connection = self.connect(timeout)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path, **more):
        status, headers, body = self.request("GET", path, **more)
        return status, json.loads(body) if "json" in headers.get("Content-Type", "") else body.decode()

    def post(self, path, json_body, **more):
        body = json_body if isinstance(json_body, (bytes, str)) else json.dumps(json_body)
        status, _, answer = self.request("POST", path, body, **more)
        return status, json.loads(answer)

    def ok(self, path, json_body):
        status, answer = self.post(path, json_body)
        assert status == 200, answer
        return answer

    def events(self, path, json_body):
        """The objects of a stream, read line by line as the benchmark does; all lines must be `data: ` lines."""
        connection = self.connect(120)
        try:
            connection.request("POST", path, json.dumps(json_body))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.getheader("Content-Type").startswith("text/event-stream")
            done = failed = False
            for line in response:
                line = line.strip()
                if not line:
                    continue
                assert not done and not failed, "something follows [DONE] or an error"
                assert line.startswith(b"data: "), line
                data = line.removeprefix(b"data: ")
                if data == b"[DONE]":
                    done = True
                else:
                    event = json.loads(data)
                    failed = "error" in event
                    yield event
            assert done or failed, "no [DONE]"
        finally:
            connection.close()

    def metric(self, name):
        _, text = self.get("/metrics")
        return float(re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.M)[1])

    def wait_idle(self):
        for _ in range(400):
            if self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0:
                return
            time.sleep(0.02)
        raise AssertionError("still busy")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=60)
        self.reader.join()
        self.process.stderr.close()
        return status


def chat(text=QUESTION, **more):
    return {"model": TINY, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}
