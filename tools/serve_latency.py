"""Measures how other requests' prompts delay a client of a running `tandem serve` (on an idle machine, with a
vocabulary of 512 tokens or more):

    python3 tools/serve_latency.py PORT prefix [--prompt 4096] [--times 3]    time to first token of a prompt, new and repeated
    python3 tools/serve_latency.py PORT mixed [--prompt 8192] [--streams 8] [--chunk 512] [--times 4]
        gaps of running streams while prompts arrive, compared with a step of one chunk (the server's --chunk) without other requests
"""
import argparse
import http.client
import json
import random
import statistics
import threading
import time


class Client:
    def __init__(self, port):
        self.port = port
        self.rng = random.Random()

    def prompt(self, n):
        return [self.rng.randrange(10, 480) for _ in range(n)]

    def stream(self, prompt, n_tokens, times, stop=None):
        """Appends the time of every piece of text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True,
                                                                  "stream": True}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.perf_counter())
            if stop and stop.is_set():
                break
        connection.close()

    def first_token(self, prompt):
        times, start = [], time.perf_counter()
        self.stream(prompt, 2, times)
        return times[0] - start


def prefix(client, options):
    for _ in range(options.times):
        prompt = client.prompt(options.prompt)
        first = client.first_token(prompt)
        again = statistics.median(client.first_token(prompt) for _ in range(4))
        print(f"{options.prompt} tokens: first time {first:.4f} s, repeated {again:.4f} s: {again / first:.2%}")


def mixed(client, options):
    prompt = client.prompt(options.prompt)
    client.first_token(prompt[:-options.chunk])
    last = client.first_token(prompt)  # all earlier tokens are in the prefix cache
    mean = client.first_token(client.prompt(options.prompt)) / (options.prompt / options.chunk)
    stop, lists = threading.Event(), [[] for _ in range(options.streams)]
    streams = [threading.Thread(target=client.stream, args=(client.prompt(64), 6000, times, stop)) for times in lists]
    for thread in streams:
        thread.start()
    while not all(len(times) > 3 for times in lists):
        time.sleep(0.05)
    begin = time.perf_counter()
    for _ in range(options.times):
        client.first_token(client.prompt(options.prompt))
    end = time.perf_counter()
    stop.set()
    for thread in streams:
        thread.join()
    gaps = sorted(b - a for times in lists for a, b in zip(times, times[1:]) if a >= begin and b <= end)
    p99 = gaps[int(len(gaps) * 0.99)]
    print(f"a chunk of {options.chunk} alone: mean {mean * 1e3:.1f} ms, the prompt's last {last * 1e3:.1f} ms\n"
          f"{len(gaps)} gaps of {options.streams} streams: median {gaps[len(gaps) // 2] * 1e3:.1f} ms, P99 {p99 * 1e3:.1f} ms: "
          f"{p99 / mean:.2f} mean chunks, {p99 / last:.2f} last ones")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("what", choices=("prefix", "mixed"))
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--times", type=int, default=3)
    chosen = parser.parse_args()
    chosen.prompt = chosen.prompt or (4096 if chosen.what == "prefix" else 8192)
    (prefix if chosen.what == "prefix" else mixed)(Client(chosen.port), chosen)
