"""Prefill and decode servers as processes: answers are those of one server, also when prefill servers are killed, stopped and
started again, and one may start before the other.

    python3 tests/prefill_test.py PATH_OF_TANDEM

TANDEM_LONG_TEST=1 repeats the faults.
"""
import concurrent.futures
import os
import random
import re
import signal
import subprocess
import tempfile
import time
import unittest

from free_address import free_address
from running_server import ROOT, TANDEM, TINY, Server
from workers_test import Worker

ROUNDS = 20 if os.environ.get("TANDEM_LONG_TEST") else 1
OTHER_MODEL = str(ROOT / "tests" / "golden" / "v3_fp8")


def prompt(number):
    sums = " ".join(f"What is {number * 50 + i} + {1000 - i}?" for i in range(40))
    return f"Tell me. {sums} What is 478 + 356?"


def prefill_server(address, *arguments, **more):
    return Server("--role", "prefill", "--kv-listen", address, "--threads", "1", *arguments, **more)


def decode_server(addresses, *arguments, **more):
    return Server("--role", "decode", "--prefill", ",".join(addresses), "--prefill-from", "64", "--threads", "1", *arguments, **more).wait_ready()


def answer(server, number):
    status, body = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt(number)}],
                                                        "temperature": 0, "max_tokens": 120})
    if status != 200:
        raise AssertionError(f"{status}: {body}")
    return body["choices"][0]["message"]


def fetched(server):
    _, text = server.get("/metrics")
    return int(re.search(r"^tandem:fetched_prompt_tokens_total{[^}]*} (\d+)$", text, re.M)[1])


def wait_for(condition, what):
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(what)


def says(server, text):
    return any(text in line for line in server.lines)


class Prefill(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        plain = Server("--threads", "1").wait_ready()
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            cls.expected = list(clients.map(lambda i: answer(plain, i), range(12)))
        plain.stop()

    def test_answers_are_those_of_one_server(self):
        address = free_address()
        decode = decode_server([address])  # it starts first
        self.assertEqual(answer(decode, 0), self.expected[0])
        self.assertEqual(fetched(decode), 0)
        prefill = prefill_server(address).wait_ready()
        wait_for(lambda: says(decode, f"prefill server {address} is up"), "it is up")
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            self.assertEqual(list(clients.map(lambda i: answer(decode, i), range(1, 12))), self.expected[1:])
        self.assertGreater(fetched(decode), 11 * 384)
        self.assertEqual(prefill.stop(), 0)
        wait_for(lambda: says(decode, f"prefill server {address} is down"), "it is down")
        self.assertEqual(answer(decode, 3), self.expected[3])
        self.assertEqual(decode.stop(), 0)

    def test_servers_whose_experts_workers_have(self):
        workers = [Worker("0-7"), Worker("0-7"), Worker("8-15"), Worker("standby")]
        address, of_workers = free_address(), ("--workers", ",".join(worker.address for worker in workers))
        prefill = prefill_server(address, *of_workers).wait_ready()
        decode = decode_server([address], *of_workers)
        wait_for(lambda: says(decode, f"prefill server {address} is up"), "it is up")
        self.assertFalse(says(decode, "answers may differ"), decode.lines)
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(answer, decode, i) for i in range(6)]
            workers[0].kill()
            self.assertEqual([got.result() for got in answers], self.expected[:6])
        self.assertGreater(fetched(decode), 3 * 384)
        self.assertEqual(answer(prefill, 6), self.expected[6])
        alone = decode_server([address])  # with its own experts
        wait_for(lambda: says(alone, f"prefill server {address} is up: it computes by kernels"), alone.lines)
        self.assertTrue(any(re.search(r", workers with experts 0-7 \(kernels [^)]*\), experts 8-15 \(kernels [^)]*\), and this server", line) for line in alone.lines),
                        alone.lines)
        self.assertEqual(answer(alone, 7), self.expected[7])
        self.assertGreater(fetched(alone), 384)
        for server in (alone, decode, prefill, *workers[1:]):
            self.assertEqual(server.stop(), 0)

    def test_lost_prefill_servers(self):
        addresses = [free_address(), free_address()]
        servers = [prefill_server(address).wait_ready() for address in addresses]
        decode = decode_server(addresses)
        chosen = random.Random(1)
        with concurrent.futures.ThreadPoolExecutor(6) as clients:
            for _ in range(ROUNDS):
                decode.request("POST", "/flush_cache", "{}")
                answers = [clients.submit(answer, decode, i) for i in range(12)]
                which = chosen.randrange(2)
                fault = chosen.choice([signal.SIGKILL, signal.SIGSTOP])
                time.sleep(chosen.uniform(0, 0.5))
                servers[which].process.send_signal(fault)
                for i, got in enumerate(answers):
                    self.assertEqual(got.result(timeout=120), self.expected[i])
                if fault == signal.SIGSTOP:
                    servers[which].process.send_signal(signal.SIGCONT)
                else:
                    servers[which].process.wait()
                    servers[which] = prefill_server(addresses[which]).wait_ready()
        for server in (decode, *servers):
            self.assertEqual(server.stop(), 0)

    def test_refusals(self):
        def refusal(*arguments):
            ended = subprocess.run([TANDEM, "serve", TINY, "--port", "0", *arguments], capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(ended.returncode, 2, ended.stderr)
            lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
            self.assertEqual(len(lines), 1, ended.stderr)
            return lines[0]

        self.assertIn("say with --prefill", refusal("--role", "decode"))
        self.assertIn("is for --role decode", refusal("--prefill", "127.0.0.1:1"))
        self.assertIn("--no-prefix-cache", refusal("--role", "decode", "--prefill", "127.0.0.1:1", "--no-prefix-cache"))
        self.assertIn("--kv-secret", refusal("--role", "prefill", "--kv-listen", "0.0.0.0:0"))
        self.assertIn("HOST:PORT", refusal("--role", "prefill", "--kv-listen", "nothing"))
        self.assertIn("HOST:PORT", refusal("--role", "decode", "--prefill", "nothing"))
        with tempfile.NamedTemporaryFile("w") as short:
            short.write("short")
            short.flush()
            self.assertIn("secret", refusal("--role", "prefill", "--kv-listen", "127.0.0.1:0", "--kv-secret", short.name))


if __name__ == "__main__":
    unittest.main(argv=["prefill_test"])
