"""Sends many concurrent streams to a running `tandem serve` and reads them as strictly as the common benchmark does.

    python3 tools/serve_load.py HOST:PORT [--streams 2000] [--prompt-words 16] [--tokens 64] [--rate inf]

Prints how many succeeded with exactly the requested tokens, tokens a second, and times to the first token and between
tokens. Exit status 1 unless all succeeded.
"""
import argparse
import asyncio
import json
import random
import resource
import sys
import time


async def stream(host, port, prompt, n_tokens, result):
    body = json.dumps({"prompt": prompt, "temperature": 0.0, "best_of": 1, "max_tokens": n_tokens, "stream": True, "ignore_eos": True})
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    status = await reader.readline()
    assert status.startswith(b"HTTP/1.1 200"), status
    while (await reader.readline()).strip():
        pass
    tokens, last, done = 0, 0.0, False
    async for line in reader:  # chunk sizes are on separate lines
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            done = True
            break
        data = json.loads(line[6:])
        if data["choices"][0]["text"]:
            now = time.perf_counter()
            if last:
                result["itl"].append(now - last)
            else:
                result["ttft"].append(now - started)
            last = now
            tokens = data["usage"]["completion_tokens"]
    writer.close()
    assert done and tokens == n_tokens, f"{tokens} tokens of {n_tokens}"
    result["tokens"] += tokens


def percentile(values, p):
    return sorted(values)[min(len(values) - 1, int(len(values) * p / 100))] * 1e3 if values else float("nan")


async def main(options):
    host, port = options.address.rsplit(":", 1)
    rng = random.Random(options.seed)
    result = {"ttft": [], "itl": [], "tokens": 0}
    tasks = []
    started = time.perf_counter()
    for _ in range(options.streams):
        prompt = " ".join(str(rng.randrange(1000)) for _ in range(options.prompt_words))
        tasks.append(asyncio.create_task(stream(host, int(port), prompt, options.tokens, result)))
        if options.rate != float("inf"):
            await asyncio.sleep(rng.expovariate(options.rate))
    failures = [e for e in await asyncio.gather(*tasks, return_exceptions=True) if e is not None]
    seconds = time.perf_counter() - started
    print(f"{options.streams - len(failures)} of {options.streams} streams with exactly {options.tokens} tokens in {seconds:.2f} s: "
          f"{result['tokens'] / seconds:.0f} tokens/s")
    for name in ("ttft", "itl"):
        print(f"{name} ms: median {percentile(result[name], 50):.1f}, P99 {percentile(result[name], 99):.1f}")
    for failure in failures[:5]:
        print("failed:", repr(failure))
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--prompt-words", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    sys.exit(asyncio.run(main(parser.parse_args())))
