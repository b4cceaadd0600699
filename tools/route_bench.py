"""Measures what `tandem route` adds to a request, against the same backend without it.

    python3 tools/route_bench.py build/tandem [--requests 2000] [--rounds 5] [--clients 32]

Starts a backend that answers at once with a few bytes (JSON, or a stream of two events of which the second comes 20 ms
after the first), and a router in front of it. Each round measures both in turn, so that other load on the machine meets
both. Prints medians of one client's requests, of the time to the first event of a stream, and requests a second of many
clients; client, backend and router share the machine.
"""
import argparse
import asyncio
import json
import multiprocessing
import re
import socket
import statistics
import subprocess
import time

JSON = b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"
MODELS = b'{"data": [{"id": "m"}]}'


class Backend(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.data = transport, b""

    def data_received(self, data):
        self.data += data
        while b"\r\n\r\n" in self.data:
            head, _, rest = self.data.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            n = int(length[1]) if length else 0
            if len(rest) < n:
                return
            body, self.data = rest[:n], rest[n:]
            if b'"stream"' in body:
                self.transport.write(STREAM + CHUNK)
                asyncio.get_running_loop().call_later(0.02, self.transport.write, CHUNK + END)
            else:
                answer = MODELS if b"/v1/models" in head else JSON
                self.transport.write(HEAD % len(answer) + answer)


def backend(connection):
    async def run():
        server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", 0)
        connection.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()
    asyncio.run(run())


def request(stream):
    body = json.dumps({"prompt": "What is 2 + 2?", **({"stream": True} if stream else {})}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def one_client(port, n, stream):
    """Seconds from each request to the first bytes of its body."""
    asked, seconds = request(stream), []
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(n):
            start = time.perf_counter()
            client.sendall(asked)
            data = client.recv(65536)
            while b"choices" not in data:
                data += client.recv(65536)
            seconds.append(time.perf_counter() - start)
            while stream and not data.endswith(END):
                data += client.recv(65536)
    return seconds


class Client(asyncio.Protocol):
    def __init__(self, counter):
        self.counter, self.asked, self.seen = counter, request(False), b""

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.asked)

    def data_received(self, data):
        self.seen += data
        if self.seen.endswith(JSON):
            self.seen = b""
            self.counter[0] += 1
            self.transport.write(self.asked)


async def many_clients(port, n_clients, seconds):
    """Requests a second."""
    counter, loop = [0], asyncio.get_running_loop()
    transports = [(await loop.create_connection(lambda: Client(counter), "127.0.0.1", port))[0] for _ in range(n_clients)]
    await asyncio.sleep(0.2)
    begun, start = counter[0], time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (counter[0] - begun) / (time.perf_counter() - start)
    for transport in transports:
        transport.abort()
    return rate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=backend, args=(there,), daemon=True)
    process.start()
    direct = here.recv()
    router = subprocess.Popen([options.tandem, "route", "--port", "0", "--backends", f"http://127.0.0.1:{direct}"], stderr=subprocess.PIPE, text=True)
    routed = int(re.search(r":(\d+)$", router.stderr.readline().strip())[1])
    assert "is up" in router.stderr.readline()
    results = {what: ([], []) for what in ("request", "first event", "rate")}
    for _ in range(options.rounds):
        for i, port in enumerate((direct, routed)):
            results["request"][i].append(statistics.median(one_client(port, options.requests, False)))
            results["first event"][i].append(statistics.median(one_client(port, options.requests // 20, True)))
            results["rate"][i].append(asyncio.run(many_clients(port, options.clients, 2)))
    router.terminate()
    assert router.wait() == 0
    for what in ("request", "first event"):
        a, b = (statistics.median(values) * 1e6 for values in results[what])
        print(f"{what}: direct {a:.0f} us, routed {b:.0f} us: {b - a:.0f} us more, {b / a:.2f} times")
    a, b = (statistics.median(values) for values in results["rate"])
    print(f"{options.clients} clients: direct {a:.0f} requests/s, routed {b:.0f}: {b / a:.2f} times")


if __name__ == "__main__":
    main()
