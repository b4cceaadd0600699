"""Injects faults into expert workers while many streams are answered, and checks every answer and the gaps between tokens.

    python3 tools/worker_faults.py build/release/tandem [--faults 200] [--streams 64] [--seed 1] [--interval 1]
        [--report faults.json] [--picture faults.svg]

Four workers of the embedded model stand in a ring, so that each expert has two owners: neighbours share experts. A fault
begins at a random worker whose neighbours are well, so one owner of every expert stays; that is what one replica can
survive. Two workers that share no expert may fail at the same time. Every worker is behind a link that can be cut.

    kill      SIGKILL; the worker is started again after a while
    stop      SIGSTOP, and SIGCONT after a while
    cut       the link closes its connections and refuses new ones for a while
    silence   the link holds back all bytes for a while and delivers them afterwards
    drain     SIGTERM, which must give status 0; the worker is started again after a while
    restart   SIGTERM, and started again at once

Each kind comes equally often, in random order. Every answer is compared with that of a server without workers. Beside the
faults, streams are measured for as long without faults, one half before and one after them. Exit status 1 if an answer was
lost or differs, or a worker did not end or return as it should.
"""
import argparse
import asyncio
import bisect
import collections
import json
import os
import pathlib
import random
import re
import signal
import sys
import time

import plot_worker_faults
from faulty_links import Links

EXPERTS = ("0-7", "4-11", "8-15", "0-3,12-15")  # of each worker
KINDS = ("kill", "stop", "cut", "silence", "drain", "restart")
MOST_SECONDS = 60  # without a byte of an answer, and for a worker to return
BIN_SECONDS = 0.1
Fault = collections.namedtuple("Fault", "kind worker seconds")
Answer = collections.namedtuple("Answer", "question begin end times n_tokens text error")


def neighbours(worker):
    """The workers that share experts with a worker."""
    return {(worker - 1) % len(EXPERTS), (worker + 1) % len(EXPERTS)}


def questions(n):
    rng = random.Random(30)
    forms = ("What is {} + {}?", "What is {} - {}?", "Add {1} and {0}.", "Subtract {1} from {0}.")
    found = {}
    while len(found) < n:
        b, a = sorted(rng.sample(range(10, 2000), 2))
        found[rng.choice(forms).format(a, b)] = None
    return list(found)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", metavar="TANDEM")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--interval", type=float, default=1, help="seconds between faults in the mean")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--seconds", type=float, nargs=2, default=(0.2, 2), metavar=("LEAST", "MOST"), help="that a fault lasts")
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--deadline", type=float, default=500, help="the server's --worker-deadline, ms")
    parser.add_argument("--patience", type=float, default=10, help="the server's --worker-patience, s")
    parser.add_argument("--report", metavar="REPORT.json", type=pathlib.Path)
    parser.add_argument("--picture", metavar="PICTURE.svg", type=pathlib.Path)
    options = parser.parse_args(arguments)
    report = asyncio.run(measure(options))
    if options.report:
        options.report.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(plot_worker_faults.table(report))
    if options.picture:
        plot_worker_faults.plot(report, options.picture)
    for problem in report["problems"][:20]:
        print("failed:", problem)
    return 1 if report["problems"] else 0


async def measure(options):
    """The report of a run."""
    processes = []
    links = Links(len(EXPERTS))
    try:
        alone = await start_server(options, processes, [])
        references = await read_references(alone, questions(options.questions))
        await end(alone.process)
        workers = [Worker(options, processes, experts) for experts in EXPERTS]
        for number, worker in enumerate(workers):
            await worker.start()
            worker.link = await links.connect(number, worker.port)
        server = await start_server(options, processes, ["--workers", ",".join(f"127.0.0.1:{worker.link}" for worker in workers),
                                                         "--worker-deadline", f"{options.deadline:g}",
                                                         "--worker-patience", f"{options.patience:g}"])
        run = Run(options, workers, links, server, references)
        return await run.report()
    finally:
        links.end()
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def end(process):
    process.send_signal(signal.SIGTERM)
    return await asyncio.wait_for(process.wait(), MOST_SECONDS)


async def read_references(server, asked):
    """The answer to each question; a question without one is left out."""
    references, left = {}, list(asked)

    async def ask_all():
        while left:
            question = left.pop()
            answer = await server.ask(question)
            if answer.error:
                raise RuntimeError(f"the server without workers: {question}: {answer.error}")
            references[question] = answer.text
    await asyncio.gather(*(ask_all() for _ in range(16)))
    return references


class Worker:
    def __init__(self, options, processes, experts):
        self.command = [options.tandem, "worker", "--experts", experts, "--threads", "1", "--listen"]
        self.processes, self.port, self.process, self.link = processes, 0, None, None

    async def start(self):
        self.process = await asyncio.create_subprocess_exec(*self.command, f"127.0.0.1:{self.port}",
                                                            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
        self.processes.append(self.process)
        line = await asyncio.wait_for(self.process.stdout.readline(), MOST_SECONDS)
        listening = re.fullmatch(rb"listening on 127\.0\.0\.1:(\d+)\n", line)
        if not listening:
            raise RuntimeError(f"a worker printed {line!r}")
        self.port = int(listening[1])


async def start_server(options, processes, arguments):
    process = await asyncio.create_subprocess_exec(options.tandem, "serve", "--port", "0", "--threads", "1", *arguments,
                                                   stderr=asyncio.subprocess.PIPE)
    processes.append(process)
    lines = []
    while not (lines and lines[-1].startswith("ready")):
        line = (await asyncio.wait_for(process.stderr.readline(), MOST_SECONDS)).decode()
        if not line:
            raise RuntimeError("the server ended: " + "".join(lines))
        lines.append(line)
    return Server(process, int(re.search(r"http://[^:]+:(\d+)", "".join(lines))[1]), lines)


class Server:
    def __init__(self, process, port, lines):
        self.process, self.port, self.lines = process, port, lines
        self.reader = asyncio.create_task(self.read_lines())

    async def read_lines(self):
        async for line in self.process.stderr:
            self.lines.append(line.decode())

    async def ask(self, question):
        """An answer as a stream. Lost: another status, an error event, an end without [DONE], or too long a silence."""
        body = json.dumps({"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True,
                           "stream_options": {"continuous_usage_stats": True}})
        begin = time.monotonic()
        stream = Stream(f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}")
        error = ""
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", self.port)
            error = await stream.ended()
            transport.abort()
        except OSError as lost:
            error = str(lost)
        return stream.answer(question, begin, error)

    async def metrics(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return text


class Stream(asyncio.Protocol):
    """Keeps the bytes and when they came; they are read when the answer has ended."""

    def __init__(self, request):
        self.request, self.data, self.parts, self.heard = request.encode(), bytearray(), [], time.monotonic()
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        transport.write(self.request)

    def data_received(self, data):
        self.heard = time.monotonic()
        self.data += data
        self.parts.append((len(self.data), self.heard))

    def connection_lost(self, exc):
        if not self.closed.done():
            self.closed.set_result(str(exc) if exc else "")

    async def ended(self):
        """Why it has ended, if not as it should."""
        while True:
            done, _ = await asyncio.wait([self.closed], timeout=MOST_SECONDS / 4)
            if done:
                return self.closed.result()
            if time.monotonic() - self.heard > MOST_SECONDS:
                return f"no byte for {MOST_SECONDS} s"

    def answer(self, question, begin, error):
        times, counts, text, n_tokens, is_done, at = [], [], {}, 0, False, 0
        if not error and not self.data.startswith(b"HTTP/1.1 200"):
            error = self.data.split(b"\r\n\r\n")[0].decode(errors="replace").split("\r\n")[0] or "no answer"
        ends = [end for end, _ in self.parts]
        for line in self.data.split(b"\n"):
            at += len(line) + 1
            line = line.strip()
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                is_done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                error = error or event["error"]["message"]
                continue
            for choice in event["choices"]:
                for name in ("reasoning_content", "content"):
                    text[name] = text.get(name, "") + (choice["delta"].get(name) or "")
                if choice.get("finish_reason"):
                    text["finish_reason"] = choice["finish_reason"]
            total = (event.get("usage") or {}).get("completion_tokens", n_tokens)
            if total > n_tokens:
                times.append(self.parts[min(bisect.bisect_left(ends, at - 1), len(ends) - 1)][1])
                counts.append(total - n_tokens)
                n_tokens = total
        if not error and not is_done:
            error = "the stream ended without [DONE]"
        return Answer(question, begin, self.heard, times, counts, text, error)


class Run:
    """Streams and faults on one server."""

    def __init__(self, options, workers, links, server, references):
        self.options, self.workers, self.links, self.server, self.references = options, workers, links, server, references
        self.answers, self.faults, self.problems, self.unwell, self.over = [], [], [], set(), False
        self.draw = random.Random(options.seed)
        self.turn = 0

    async def report(self):
        clients = [asyncio.create_task(self.ask_again_and_again()) for _ in range(self.options.streams)]
        await asyncio.sleep(2)  # until the server has learnt its micro-batches and drafts
        begin = time.monotonic()
        await asyncio.sleep(self.options.faults * self.options.interval / 2)
        first = time.monotonic()
        await self.inject()
        last = time.monotonic()
        await asyncio.sleep(max(0, last - first - (first - begin)))
        finish = time.monotonic()
        self.over = True
        await asyncio.gather(*clients)
        await self.end_all()
        return self.counted(begin, first, last, finish)

    async def ask_again_and_again(self):
        asked = list(self.references)
        while not self.over:
            question = asked[self.turn % len(asked)]
            self.turn += 1
            answer = await self.server.ask(question)
            self.answers.append(answer)
            if answer.error:
                self.problems.append(f"lost: {question}: {answer.error}")
                await asyncio.sleep(0.1)
            elif answer.text != self.references[question]:
                self.problems.append(f"differs: {question}: {answer.text} is not {self.references[question]}")

    async def inject(self):
        """Injects the faults, and returns when all workers are well again."""
        tasks = []
        kinds = [self.options.kinds[i % len(self.options.kinds)] for i in range(self.options.faults)]
        self.draw.shuffle(kinds)
        for kind in kinds:
            pause = asyncio.create_task(asyncio.sleep(self.options.interval * self.draw.uniform(0.5, 1.5)))
            while not (can_fail := self.can_fail()):
                await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
            worker = self.draw.choice(can_fail)
            fault = Fault(kind, worker, self.draw.uniform(*self.options.seconds))
            self.unwell.add(worker)
            tasks.append(asyncio.create_task(self.fail(fault)))
            await pause
        await asyncio.gather(*tasks)

    def can_fail(self):
        return [w for w in range(len(self.workers)) if w not in self.unwell and not neighbours(w) & self.unwell]

    async def fail(self, fault):
        begin = time.monotonic()
        record = {"kind": fault.kind, "worker": fault.worker, "begin": begin}
        self.faults.append(record)
        try:
            await getattr(self, fault.kind)(fault)
            record["over"] = time.monotonic()
            record["used"] = await self.until_used(fault.worker)
        except (RuntimeError, OSError, asyncio.TimeoutError) as error:
            self.problems.append(f"{fault.kind} of worker {fault.worker}: {error!r}")
        record.setdefault("over", time.monotonic())
        record.setdefault("used", time.monotonic())
        self.unwell.discard(fault.worker)

    async def kill(self, fault):
        worker = self.workers[fault.worker]
        worker.process.kill()
        await worker.process.wait()
        await asyncio.sleep(fault.seconds)
        await worker.start()

    async def stop(self, fault):
        worker = self.workers[fault.worker]
        worker.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        worker.process.send_signal(signal.SIGCONT)

    async def cut(self, fault):
        self.links.set(fault.worker, "cut")
        await asyncio.sleep(fault.seconds)
        self.links.set(fault.worker, "open")

    async def silence(self, fault):
        self.links.set(fault.worker, "silent")
        await asyncio.sleep(fault.seconds)
        self.links.set(fault.worker, "open")

    async def drain(self, fault):
        worker = self.workers[fault.worker]
        await self.end_worker(worker)
        await asyncio.sleep(fault.seconds)
        await worker.start()

    async def restart(self, fault):
        worker = self.workers[fault.worker]
        await self.end_worker(worker)
        await worker.start()

    async def end_worker(self, worker):
        status = await end(worker.process)
        if status:
            self.problems.append(f"a worker ended with status {status} after SIGTERM")

    async def until_used(self, number):
        """When the worker answered requests again, once it is sure to stay up: one that was silent for less than the
        deadline may still be taken for lost."""
        address = f"127.0.0.1:{self.workers[number].link}"
        begin = time.monotonic()
        at_first = used = None
        while time.monotonic() < begin + MOST_SECONDS:
            text = await self.server.metrics()
            found = {name: float(value) for name, value in
                     re.findall(rf'^tandem:worker_(\w+){{[^}}]*worker="{address}"}} (\S+)$', text, re.M)}
            if not found["up"]:
                at_first = used = None
            elif at_first is None:
                at_first = found["round_trip_seconds_total"]
            elif used is None and found["round_trip_seconds_total"] > at_first:
                used = time.monotonic()
            elif used is not None and time.monotonic() > used + self.options.deadline / 1e3:
                return used
            await asyncio.sleep(0.05)
        raise RuntimeError("it is not used again")

    async def end_all(self):
        for name, process in [("the server", self.server.process)] + [("a worker", worker.process) for worker in self.workers]:
            if process.returncode is not None:
                self.problems.append(f"{name} has ended with status {process.returncode}")
            elif status := await end(process):
                self.problems.append(f"{name} ended with status {status} after SIGTERM")

    def counted(self, begin, first, last, finish):
        faulty = [gap for gap in self.gaps() if first < gap[1] and gap[0] < last]
        quiet = [gap for gap in self.gaps() if begin <= gap[0] and gap[1] <= first or last <= gap[0] and gap[1] <= finish]
        n_bins = int((finish - begin) / BIN_SECONDS) + 1
        tokens, longest = [0] * n_bins, [0] * n_bins
        n_tokens = collections.Counter()
        for answer in self.answers:
            for at, n in zip(answer.times, answer.n_tokens):
                n_tokens["faults" if first <= at <= last else "quiet" if begin <= at <= finish else ""] += n
                if begin <= at < finish:
                    tokens[int((at - begin) / BIN_SECONDS)] += n
        for since, at in self.gaps():
            if begin <= at < finish:
                longest[int((at - begin) / BIN_SECONDS)] = max(longest[int((at - begin) / BIN_SECONDS)], round(at - since, 4))
        least = 2 * self.options.deadline / 1e3
        windows = [(fault["begin"], max(fault["over"], fault["begin"] + least)) for fault in self.faults]
        for fault, (since, until) in zip(self.faults, windows):
            fault["longest_gap"] = max((gap[1] - gap[0] for gap in faulty if gap[0] < until and gap[1] > since), default=0)
            for name in ("begin", "over", "used"):
                fault[name] = round(fault[name] - begin, 3)
        return {
            "streams": self.options.streams, "seed": self.options.seed, "interval": self.options.interval,
            "processor": processor(), "load": round(os.getloadavg()[1], 1), "deadline_ms": self.options.deadline,
            "answers": len(self.answers), "answers_under_faults": sum(first < a.end and a.begin < last for a in self.answers),
            "lost": sum(bool(a.error) for a in self.answers),
            "different": sum(not a.error and a.text != self.references[a.question] for a in self.answers),
            "quiet": {"seconds": first - begin + finish - last, "tokens": n_tokens["quiet"], **spread([b - a for a, b in quiet])},
            "under_faults": {"seconds": last - first, "tokens": n_tokens["faults"], **spread([b - a for a, b in faulty])},
            "first_fault": round(first - begin, 3), "last_fault": round(last - begin, 3),
            "faults": self.faults, "bin_seconds": BIN_SECONDS, "tokens": tokens, "longest_gaps": longest,
            "problems": self.problems,
        }

    def gaps(self):
        """From the request to the first token, from each to the next, and from the last to the end of an answer that is lost."""
        for answer in self.answers:
            times = [answer.begin, *answer.times, *([answer.end] if answer.error else [])]
            yield from zip(times, times[1:])


def spread(gaps):
    gaps.sort()
    if not gaps:
        return {"gaps": 0}
    at = lambda share: gaps[min(len(gaps) - 1, int(len(gaps) * share))]
    return {"gaps": len(gaps), "median": at(0.5), "p99": at(0.99), "p999": at(0.999), "longest": gaps[-1]}


def processor():
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    return (f"{names.get('model name', 'unknown')}, family {names.get('cpu family')}, model {names.get('model')}, "
            f"{os.cpu_count()} cores")


if __name__ == "__main__":
    sys.exit(main())
