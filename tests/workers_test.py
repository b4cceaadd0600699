"""Expert workers as processes: they are killed, stopped, ended and started again while a server answers with their experts.

    python3 tests/workers_test.py PATH_OF_TANDEM

TANDEM_LONG_TEST=1 repeats the faults.
"""
import atexit
import concurrent.futures
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

from free_address import free_address
from running_server import ANSWER, QUESTION, ROOT, TANDEM, TINY, Server, chat

ROUNDS = 20 if os.environ.get("TANDEM_LONG_TEST") else 1
BACKBONE = ["--threads", "1"]  # arguments of every server with workers
OTHER_MODEL = str(ROOT / "tests" / "golden" / "v3_fp8")
QUESTIONS = [f"What is {17 * i + 3} + {401 - 9 * i}?" for i in range(12)]


class Worker:
    def __init__(self, experts="auto", model=TINY, arguments=(), errors=subprocess.DEVNULL, **env):
        chosen = ["--experts", experts] if experts else []  # else the arguments name a placement
        self.command = [TANDEM, "worker", model, *chosen, "--threads", "1", *arguments]
        self.address, self.errors = free_address(), errors
        self.start(**env)

    def start(self, **env):
        self.process = subprocess.Popen([*self.command, "--listen", self.address], stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True, env={**os.environ, **env})
        atexit.register(self.process.kill)
        line = self.process.stdout.readline()
        listening = re.fullmatch(r"listening on (127\.0\.0\.1:\d+)\n", line)
        if not listening:
            raise AssertionError(f"{line!r}, status {self.process.wait()}")
        self.address = listening[1]

    def send(self, number):
        self.process.send_signal(number)

    def wait(self):
        status = self.process.wait(timeout=60)
        self.process.stdout.close()
        return status

    def stop(self):
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self):
        self.send(signal.SIGKILL)
        return self.wait()


def server_of(workers, *arguments):
    return Server("--workers", ",".join(worker.address for worker in workers), *BACKBONE, *arguments).wait_ready()


def is_up(server, worker):
    _, text = server.get("/metrics")
    up = re.search(rf'^tandem:worker_up{{[^}}]*worker="{worker.address}"}} (\d)$', text, re.M)
    return up is not None and up[1] == "1"


def is_reported(server, worker):
    return f'worker="{worker.address}"' in server.get("/metrics")[1]


def metric_of(server, name, worker):
    _, text = server.get("/metrics")
    return float(re.search(rf'^tandem:worker_{name}{{[^}}]*worker="{worker.address}"}} (\S+)$', text, re.M)[1])


def wait_for(condition, what):
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not in 30 s: {what}")


def text_of(server, question):
    return server.ok("/v1/chat/completions", chat(question))["choices"][0]["message"]["content"]


class Streams:
    """Clients that ask without pause, each as a stream, and keep what they got."""

    def __init__(self, server, n):
        self.server, self.ends, self.answers = server, False, []
        self.pool = concurrent.futures.ThreadPoolExecutor(n)
        self.clients = [self.pool.submit(self.ask, i) for i in range(n)]

    def ask(self, client):
        for i in itertools.count(client):
            if self.ends:
                return
            question = QUESTIONS[i % len(QUESTIONS)]
            events = list(self.server.events("/v1/chat/completions", chat(question, stream=True)))
            errors = [event["error"] for event in events if "error" in event]
            deltas = [event["choices"][0]["delta"] for event in events if event.get("choices")]
            self.answers.append((question, errors, "".join(delta.get("content") or "" for delta in deltas)))

    def wait_for_more(self, n=8):
        """Until so many answers have begun and ended from now on."""
        enough = len(self.answers) + n + len(self.clients)
        wait_for(lambda: len(self.answers) >= enough or any(client.done() for client in self.clients), "more answers")

    def end(self):
        self.ends = True
        for client in self.clients:
            client.result(timeout=60)
        self.pool.shutdown()
        return self.answers


class TwoOwners(unittest.TestCase):
    """Every expert has two owners, so nothing is lost whichever one fails."""
    transport = ()

    def test_no_answer_is_lost(self):
        alone = Server("--threads", "1").wait_ready()
        want = {question: text_of(alone, question) for question in QUESTIONS}
        self.assertEqual(alone.stop(), 0)
        # The experts are three shards: 0-5, 6-9 and 10-15.
        workers = [Worker(experts, arguments=self.transport) for experts in ("0-9", "6-15", "0-5", "10-15")]
        server = server_of(workers, "--worker-deadline", "400", "--worker-patience", "30", *self.transport)
        streams = Streams(server, 4)
        draw = random.Random(1)
        n_kills = n_goodbyes = 0
        for round_number in range(ROUNDS):
            for fault in ("kill", "stop", "goodbye"):
                worker = draw.choice(workers)
                streams.wait_for_more()
                with self.subTest(round=round_number, fault=fault, experts=worker.command[4]):
                    failures = metric_of(server, "failures_total", worker)
                    if fault == "kill":
                        worker.kill()
                    elif fault == "stop":
                        worker.send(signal.SIGSTOP)
                    else:
                        self.assertEqual(worker.stop(), 0)
                    wait_for(lambda: not is_up(server, worker), "the worker is down")
                    streams.wait_for_more()
                    self.assertEqual(metric_of(server, "failures_total", worker) - failures, fault != "goodbye")
                    if fault == "stop":
                        worker.send(signal.SIGCONT)
                    else:
                        worker.start()
                    wait_for(lambda: is_up(server, worker), "the worker is up again")
                    requests = metric_of(server, "requests_total", worker)
                    wait_for(lambda: metric_of(server, "requests_total", worker) > requests, "the worker is used again")
        answers = streams.end()
        for question, errors, text in answers:
            self.assertEqual((errors, text), ([], want[question]))
        print(f"{len(answers)} answers, none lost, {3 * ROUNDS} faults")
        self.assertEqual(sum("is up, by UCX" in line for line in server.lines) >= 4 + 3 * ROUNDS, bool(self.transport))
        for worker in workers:
            self.assertGreater(metric_of(server, "round_trip_seconds_total", worker), 0)
        self.assertEqual(server.stop(), 0)
        for worker in workers:
            self.assertEqual(worker.stop(), 0)


class TwoOwnersByUcx(TwoOwners):
    """Rows travel by shared memory, and what is said before is encrypted."""
    encryption = ()

    @classmethod
    def setUpClass(cls):
        probe = subprocess.run([TANDEM, "worker", TINY, "--worker-transport", "ucx", "--listen", "nowhere"], capture_output=True, text=True)
        if "nowhere" not in probe.stderr:
            raise unittest.SkipTest(probe.stderr)
        cls.secret = tempfile.NamedTemporaryFile("w", suffix=".key")
        cls.secret.write("a secret of this test")
        cls.secret.flush()
        cls.transport = ("--worker-transport", "ucx", "--worker-secret", cls.secret.name, *cls.encryption)

    def test_a_worker_without_it_is_refused(self):
        worker = Worker("0-9", arguments=self.transport[2:])
        done = subprocess.run([TANDEM, "run", TINY, "-p", "a", "--workers", worker.address, *self.transport], capture_output=True, text=True)
        self.assertEqual((done.returncode != 0, done.stderr.count("error:")), (True, 1), done.stderr)
        self.assertIn(f"the worker {worker.address} is not reached by UCX: it was not started with --worker-transport ucx or auto", done.stderr)
        self.assertEqual(worker.stop(), 0)


class TwoOwnersByNetwork(TwoOwnersByUcx):
    """Rows travel by a network of UCX, which is one of sockets here."""
    encryption = ("--worker-encryption", "off")

    def test_no_answer_is_lost(self):
        with unittest.mock.patch.dict(os.environ, UCX_TLS="tcp"):
            super().test_no_answer_is_lost()


class TwoBackbones(unittest.TestCase):
    def test_one_that_is_stopped_holds_up_nobody(self):
        worker = Worker()
        servers = [server_of([worker], "--draft", "off") for _ in range(2)]
        want = {question: text_of(servers[1], question) for question in QUESTIONS}
        stopped, other = [Streams(server, 4) for server in servers]
        for streams in (stopped, other):
            streams.wait_for_more()
        servers[0].process.send_signal(signal.SIGSTOP)  # with requests under way, whose answers it does not take
        n_stopped, begin = len(stopped.answers), time.monotonic()
        gaps = []
        for _ in range(3):
            other.wait_for_more()
            gaps.append(time.monotonic() - begin)
            begin = time.monotonic()
        self.assertLess(max(gaps), 10, "seconds for a dozen answers")
        self.assertLessEqual(len(stopped.answers), n_stopped + 4)
        self.assertTrue(is_up(servers[1], worker))
        self.assertEqual(metric_of(servers[1], "failures_total", worker), 0)
        servers[0].process.send_signal(signal.SIGCONT)
        stopped.wait_for_more()
        for streams in (stopped, other):
            for question, errors, text in streams.end():
                self.assertEqual((errors, text), ([], want[question]))
        print(f"{len(other.answers)} answers of the other backbone, none lost")
        for server in servers:
            self.assertEqual(server.stop(), 0)
        self.assertEqual(worker.stop(), 0)


class OneOwner(unittest.TestCase):
    def test_answers_fail_after_the_patience_and_the_server_recovers(self):
        worker = Worker("4-11")
        server = server_of([worker], "--worker-deadline", "300", "--worker-patience", "1")
        want = text_of(server, QUESTION)
        self.assertEqual(want, ANSWER)
        for round_number in range(min(ROUNDS, 5)):
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
                streams = [pool.submit(lambda: list(server.events("/v1/completions", body))) for _ in range(3)]
                wait_for(lambda: server.metric("tandem:requests_running") == 3, "three answers run")
                begin = time.monotonic()
                if round_number % 2 == 0:
                    worker.kill()
                else:
                    worker.send(signal.SIGSTOP)
                for stream in streams:
                    events = stream.result(timeout=60)
                    self.assertIn(f"experts 4-11 have had no worker for 1 s: {worker.address}", events[-1]["error"]["message"])
                self.assertGreater(time.monotonic() - begin, 0.9)
            status, answer = server.post("/v1/chat/completions", chat())
            self.assertEqual(status, 500)
            self.assertIn("start one of them again", answer["error"]["message"])
            self.assertEqual(server.get("/health")[0], 200)
            if round_number % 2 == 0:
                worker.start()
            else:
                worker.send(signal.SIGCONT)
            wait_for(lambda: is_up(server, worker), "the worker is up again")
            self.assertEqual(text_of(server, QUESTION), want)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(worker.stop(), 0)

    def test_an_answer_waits_for_a_restart(self):
        worker = Worker("4-11")
        server = server_of([worker], "--worker-patience", "30")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True}
            want = server.ok("/v1/completions", {**body, "temperature": 0})["choices"][0]["text"]
            answer = pool.submit(server.ok, "/v1/completions", {**body, "temperature": 0})
            wait_for(lambda: server.metric("tandem:requests_running") == 1, "an answer runs")
            worker.kill()
            wait_for(lambda: not is_up(server, worker), "the worker is down")
            worker.start()
            self.assertEqual(answer.result(timeout=60)["choices"][0]["text"], want)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(worker.stop(), 0)


class Standby(unittest.TestCase):
    """The only owner of some experts is lost, and a standby loads them."""

    def test_no_answer_is_lost(self):
        for fault in ("kill", "stop", "goodbye"):
            with self.subTest(fault):
                worker, other, standby = Worker("0-7"), Worker("8-11"), Worker("standby")
                server = server_of([worker, other, standby], "--worker-deadline", "400", "--worker-patience", "30")
                self.assertEqual([metric_of(server, "standby", one) for one in (worker, other, standby)], [0, 0, 1])
                self.assertEqual([metric_of(server, "experts", one) for one in (worker, other, standby)], [8, 4, 0])
                want = {question: text_of(server, question) for question in QUESTIONS}
                streams = Streams(server, 8)
                streams.wait_for_more()
                if fault == "kill":
                    worker.kill()
                elif fault == "stop":
                    worker.send(signal.SIGSTOP)
                else:
                    self.assertEqual(worker.stop(), 0)
                wait_for(lambda: metric_of(server, "experts", standby) == 8, "the standby has loaded")
                streams.wait_for_more()
                self.assertEqual(metric_of(server, "loading", standby), 0)
                self.assertGreater(metric_of(server, "requests_total", standby), 0)
                said = f"experts 0-7 have no worker that is up: the standby {standby.address} loads them"
                self.assertEqual(sum(said in line for line in server.lines), 1)
                if fault == "stop":
                    worker.send(signal.SIGCONT)
                else:
                    worker.start()
                wait_for(lambda: is_up(server, worker), "the worker is back")
                requests = metric_of(server, "requests_total", worker)
                wait_for(lambda: metric_of(server, "requests_total", worker) > requests, "the worker is used again")
                answers = streams.end()
                for question, errors, text in answers:
                    self.assertEqual((errors, text), ([], want[question]))
                print(f"{len(answers)} answers, none lost, when a standby took over ({fault})")
                self.assertEqual(server.stop(), 0)
                for one in (worker, other, standby):
                    self.assertEqual(one.stop(), 0)


class ComeAndGo(unittest.TestCase):
    def test_a_list_that_changes(self):
        alone = Server("--threads", "1").wait_ready()
        want = {question: text_of(alone, question) for question in QUESTIONS}
        self.assertEqual(alone.stop(), 0)
        first, second, third = Worker("4-11"), Worker("4-11"), Worker()
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/workers"

            def write(*lines):
                with open(file, "w", encoding="utf-8") as out:
                    out.write("# the workers of this test\n" + "".join(f"{line}\n" for line in lines))

            write(first.address)
            server = Server("--workers-file", file, "--worker-patience", "30", *BACKBONE).wait_ready()
            streams = Streams(server, 8)
            streams.wait_for_more()
            with self.subTest("a newcomer shares the load"):
                write(first.address, second.address)
                wait_for(lambda: is_up(server, second), "the newcomer is up")
                self.assertEqual(metric_of(server, "joined", first), 0)
                self.assertEqual(metric_of(server, "joined", second), 1)
                before = [metric_of(server, "requests_total", worker) for worker in (first, second)]
                streams.wait_for_more()
                both = [metric_of(server, "requests_total", worker) - n for worker, n in zip((first, second), before)]
                self.assertLess(abs(both[0] - both[1]), 0.5 * max(both), both)
            with self.subTest("it takes over from one that is killed"):
                first.kill()
                wait_for(lambda: not is_up(server, first), "the first worker is down")
                streams.wait_for_more()
            with self.subTest("what is wrong is told, and changes nothing"):
                write(second.address, "127.0.0.1")
                wait_for(lambda: any("line 3: 127.0.0.1: an address is HOST:PORT" in line for line in server.lines), "the error is told")
                self.assertTrue(is_reported(server, first))
            with self.subTest("one that is not listed is forgotten, and may end"):
                write(second.address, third.address)
                wait_for(lambda: is_up(server, third) and not is_reported(server, first), "the list is used")
                write(third.address)
                wait_for(lambda: not is_reported(server, second), "the second worker is left")
                streams.wait_for_more()
                self.assertEqual(second.stop(), 0)
                streams.wait_for_more()
            with self.subTest("the last owner stays"):
                write("127.0.0.1:1")
                said = f"worker {third.address} is not listed any more, but no other worker that is up has experts 4-11"
                wait_for(lambda: any(said in line for line in server.lines), "the last owner is named")
                streams.wait_for_more()
                self.assertTrue(is_up(server, third))
            answers = streams.end()
            for question, errors, text in answers:
                self.assertEqual((errors, text), ([], want[question]))
            print(f"{len(answers)} answers while workers came and went, none lost")
            self.assertEqual(server.stop(), 0)
        self.assertEqual(third.stop(), 0)


def machine_with_workers():
    """A host, and two others for experts, whose own network is too slow for a pipeline."""
    def host(**more):
        return {"cpu": "cpu", "isa": "avx2", "sockets": 1, "numa_nodes": 1, "cores": 8, "memory_bytes": 8 * 10**9,
                "read_bytes_per_second": {"one_thread": 5e8, "all": 4e9},
                "peak_ops_per_second": {"fp32": 4e10, "bf16": None, "int8": None}, **more}

    fast, slow = {"bytes_per_second": 1e11, "latency_seconds": 1e-9}, {"bytes_per_second": 1e6, "latency_seconds": 1}
    return {"name": "small", "request_seconds": 1e-9, "network": fast,
            "kinds": [host(kind="front", hosts=1, network=fast), host(kind="box", hosts=2, network=slow)]}


def arguments_of(command, *without):
    """The host, the verb and the arguments of a command that `tandem plan` prints, without some options and their values."""
    host, _, line = command.partition(": ")
    words = shlex.split(line)
    assert words[0] == "tandem", command
    kept = [word for before, word in zip(words[2:], words[3:]) if word not in without and before not in without]
    return host, words[1], kept


class Program(unittest.TestCase):
    def run_tandem(self, *arguments, status=0):
        done = subprocess.run([TANDEM, *arguments], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def refused(self, *arguments, status=2):
        error = self.run_tandem(*arguments, status=status).stderr
        self.assertEqual(len(re.findall("^error: .*$", error, re.M)), 1, error)
        self.assertTrue(error.strip().split("\n")[-1].startswith("error: "), error)
        return error


class Placed(Program):
    """Workers and a backbone that are started by the commands of `tandem plan --out`."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.machine, self.placement = f"{folder.name}/machine.json", f"{folder.name}/placement.json"
        with open(self.machine, "w", encoding="utf-8") as out:
            json.dump(machine_with_workers(), out)
        plan = ["plan", TINY, "--machine", self.machine, "--ctx", "4096", "--json"]
        report = json.loads(self.run_tandem(*plan, "--out", self.placement).stdout)
        with open(self.placement, encoding="utf-8") as file:
            self.placed = json.load(file)
        self.assertEqual(self.placed, report["placement"])
        self.commands = report["commands"]
        self.explicit = json.loads(self.run_tandem(*plan).stdout)["commands"]
        self.groups = {group["owners"][0]: group["experts"] for group in self.placed["experts"]["layers"][0]["groups"]}
        self.assertEqual(list(self.groups), ["host0.cpu", "host1.cpu", "host2.cpu"])
        self.same = ["run", TINY, "-p", QUESTION, "--temp", "0", "--threads", "1"]

    def write(self, edit):
        placed = json.loads(json.dumps(self.placed))
        edit(placed)
        with open(self.placement, "w", encoding="utf-8") as out:
            json.dump(placed, out)

    def workers(self, commands):
        """Those that the commands start, with what they say."""
        started = []
        for command in commands:
            host, verb, arguments = arguments_of(command, "--listen", "--worker-secret")
            self.assertEqual(verb, "worker")
            worker = Worker(None, arguments=arguments, errors=tempfile.TemporaryFile("w+"))
            self.addCleanup(worker.errors.close)
            self.addCleanup(worker.stop)
            worker.errors.seek(0)
            self.assertIn(f"experts {self.groups[host + '.cpu']} in memory\n", worker.errors.read())
            started.append(worker)
        return started

    def test_answers_are_those_of_one_process(self):
        want = self.run_tandem(*self.same, "-q").stdout
        for commands in (self.commands, self.explicit):
            workers = self.workers(commands[:-1])
            _, verb, arguments = arguments_of(commands[-1], "--workers", "--worker-secret", TINY)
            self.assertEqual(verb, "serve")
            self.assertEqual("--placement" in arguments, commands is self.commands)
            addresses = ",".join(worker.address for worker in workers)
            done = self.run_tandem(*self.same, *arguments, "--workers", addresses)
            self.assertEqual(done.stdout, want)
            for experts, owner in zip(self.groups.values(), ["this process", *addresses.split(",")]):
                self.assertIn(f"experts {experts}: {owner}\n", done.stderr)
            server = Server(*arguments, "--workers", addresses, "--threads", "1").wait_ready()
            self.assertEqual(text_of(server, QUESTION), ANSWER)
            self.assertEqual([metric_of(server, "experts", worker) for worker in workers], [5, 5])
            self.assertEqual(server.stop(), 0)

    def test_a_list_of_workers_in_a_file(self):
        workers = self.workers(self.commands[:-1])
        with tempfile.NamedTemporaryFile("w") as listed:
            listed.write("".join(f"{worker.address}\n" for worker in workers))
            listed.flush()
            more = ["-q", "--placement", self.placement, "--workers-file", listed.name]
            self.assertEqual(self.run_tandem(*self.same, *more).stdout, self.run_tandem(*self.same, "-q").stdout)

    def test_the_format_and_the_rows_are_the_placements(self):
        def edit(placed):
            placed["prefill"]["chunk_tokens"] = 700
            for group in placed["experts"]["layers"][0]["groups"]:
                group["format"] = "int8"

        self.write(edit)
        workers = self.workers(self.commands[:-1])
        placed = ["-q", "--placement", self.placement, "--workers", ",".join(worker.address for worker in workers)]
        self.assertEqual(self.run_tandem(*self.same, *placed).stdout, self.run_tandem(*self.same, "-q", "--experts", "int8").stdout)
        with_fp8 = Worker(self.groups["host1.cpu"], arguments=("--chunk", "700"))
        self.assertRegex(self.refused(*self.same, *placed[:-1], f"{placed[-1]},{with_fp8.address}"),
                         r"would compute different sums \(\"kernels \w+, experts int8, .*\" and \"kernels \w+, experts as stored")
        with_fp8.stop()

    def test_what_a_backbone_refuses(self):
        worker, other = self.workers(self.commands[:-1])
        placed = [*self.same, "-q", "--placement", self.placement]
        self.assertEqual(self.refused(*placed),
                         f"error: {self.placement} has experts on workers (host1.cpu, host2.cpu): start `tandem worker --placement "
                         f"{self.placement}` there, and name their addresses with --workers\n")
        self.assertEqual(self.refused(*placed, "--workers", worker.address),
                         f"error: placement: experts {self.groups['host2.cpu']} are on host2.cpu, and no worker of --workers has them: start it "
                         "there with `tandem worker --placement`, and name its address too\n")
        every = Worker()
        self.assertEqual(self.refused(*placed, "--workers", every.address),
                         f"error: placement: experts {self.groups['host0.cpu']} are on the backbone's host, and workers of --workers have them too: "
                         "start these with `tandem worker --placement`, or leave them out\n")
        every.stop()
        both = ["--workers", f"{worker.address},{other.address}"]

        def on_two_devices(placed):
            placed["backbone"]["stages"][0].update({"devices": ["host0.cpu", "host3.cpu"], "tp": 2})

        def alone(placed):
            for group in placed["experts"]["layers"][0]["groups"]:
                group["owners"] = ["host0.cpu"]

        for edit, said in ((on_two_devices, "with workers this program runs the backbone on one device"), (alone, f"--workers: {self.placement} has no experts on workers")):
            self.write(edit)
            with self.subTest(said):
                self.assertIn(said, self.refused(*placed, *both))

    def test_what_a_worker_refuses(self):
        placed = ["worker", TINY, "--listen", "127.0.0.1:0", "--placement", self.placement]
        self.assertIn("the placement has the workers host1.cpu, host2.cpu: name one of them with --host", self.refused(*placed))
        self.assertIn("--host host0: the placement has the workers host1.cpu, host2.cpu", self.refused(*placed, "--host", "host0"))
        for option, value in (("--experts", "auto"), ("--device", "cpu"), ("--format", "fp8")):
            self.assertEqual(self.refused(*placed, "--host", "host1", option, value),
                             f"error: --placement {self.placement} and {option} {value}: the placement says it: leave one of them out\n")
        self.assertIn("--host host1: it names a worker of --placement", self.refused("worker", TINY, "--host", "host1"))
        self.assertIn("cannot open", self.refused("worker", TINY, "--host", "host1", "--placement", "/none"))
        self.assertIn("layer 1: expert", self.refused("worker", OTHER_MODEL, "--host", "host1", "--placement", self.placement))
        self.write(lambda placed: placed["backbone"]["stages"][0].update({"devices": ["host0.cpu", "host3.cpu"], "tp": 2}))
        self.assertIn("with workers this program runs the backbone on one device", self.refused(*placed, "--host", "host1"))


class Commands(Program):
    def test_run_and_logits_with_a_secret(self):
        with tempfile.TemporaryDirectory() as folder:
            key, other = f"{folder}/key", f"{folder}/other"
            for file, text in ((key, "a secret of this test\n"), (other, "another one of this test\n")):
                with open(file, "w", encoding="utf-8") as out:
                    out.write(text)
            worker = Worker(arguments=("--worker-secret", key))
            same = ["run", TINY, "-p", QUESTION, "--temp", "0", "-q"]
            known = ["--workers", worker.address, "--worker-secret", key]
            self.assertEqual(self.run_tandem(*same, *known).stdout, self.run_tandem(*same).stdout)
            for name, more in (("a.npy", known), ("b.npy", [])):
                self.run_tandem("logits", TINY, "--tokens", "5,6,7", "--all", "--out", f"{folder}/{name}", *more)
            with open(f"{folder}/a.npy", "rb") as a, open(f"{folder}/b.npy", "rb") as b:
                self.assertEqual(a.read(), b.read(), "one shard has the bits of one process")
            self.assertIn("has another secret", self.refused(*same, "--workers", worker.address, "--worker-secret", other))
            self.assertIn("has a secret, and this program none", self.refused(*same, "--workers", worker.address))
            self.assertEqual(worker.stop(), 0)

    def test_drafts_of_the_layer_for_multi_token_prediction(self):
        workers = [Worker(experts, arguments=("--draft", "mtp")) for experts in ("0-7", "8-15")]
        without = Worker("8-15")
        same = ["run", TINY, "-p", QUESTION, "--temp", "0", "-q", "--json", "--threads", "1"]
        addresses = ",".join(worker.address for worker in workers)
        reports = []
        for more in (["--draft", "mtp"], ["--draft", "mtp", "--workers", addresses], ["--draft", "off"]):
            report = json.loads(self.run_tandem(*same, *more).stdout)
            reports.append([report.get(name) for name in ("text", "accepted_drafts", "rejected_drafts")])
        self.assertEqual(reports[1], reports[0])
        self.assertGreater(reports[1][1], 5)
        self.assertEqual(reports[2][0], reports[0][0])
        some = f"{workers[0].address},{without.address}"
        self.assertIn(f"the worker {without.address} has no experts of the layer for multi-token prediction",
                      self.refused(*same, "--draft", "mtp", "--workers", some))
        self.assertEqual(json.loads(self.run_tandem(*same, "--workers", some).stdout)["text"], reports[0][0])
        for worker in (*workers, without):
            self.assertEqual(worker.stop(), 0)

    def test_refusals(self):
        worker = Worker(model=OTHER_MODEL)
        same = ["run", TINY, "-p", QUESTION, "-q"]
        self.assertIn(f"the worker {worker.address} has another model than {TINY}",
                      self.refused(*same, "--workers", worker.address))
        self.assertEqual(worker.stop(), 0)
        for model, said in ((OTHER_MODEL, "has another model than"), (TINY, "all workers are standbys, which only take over")):
            standby = Worker("standby", model=model)
            self.assertIn(said, self.refused(*same, "--workers", standby.address))
            self.assertEqual(standby.stop(), 0)
        self.assertIn("does not answer: Connection refused",
                      self.refused(*same, "--workers", worker.address, "--worker-patience", "0.2", status=1))
        self.assertIn("an address is HOST:PORT", self.refused(*same, "--workers", "nonsense"))
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/workers"
            self.assertIn("cannot open", self.refused(*same, "--workers-file", file))
            with open(file, "w", encoding="utf-8") as out:
                out.write("# one\n\nhttp://127.0.0.1:1\n")
            self.assertIn(f"{file} line 3: http://127.0.0.1:1: an address is HOST:PORT",
                          self.refused(*same, "--workers-file", file))
            self.assertIn(f"--workers a:1 and --workers-file {file}: give one of them",
                          self.refused(*same, "--workers-file", file, "--workers", "a:1"))
        self.assertIn("--worker-deadline 1: must be", self.refused(*same, "--worker-deadline", "1"))
        self.assertIn("--worker-patience -1: must be", self.refused(*same, "--worker-patience", "-1"))
        for arguments, said in (
                (["--experts", "0-16"], "--experts 0-16: the model has experts 0 to 15"),
                (["--experts", "int4"], "--experts int4: name experts such as 0-127"),
                (["--experts", "standby,3"], "--experts standby,3: name experts such as 0-127"),
                (["--listen", "0.0.0.0:0"], "other machines can connect to it: give the worker and its backbones the same --worker-secret FILE"),
                (["--listen", "127.0.0.1"], "an address is HOST:PORT"),
                (["--chunk", "0"], "--chunk 0: must be between"),
                (["--draft", "lookup"], "--draft lookup: choose off, auto or mtp"),
                (["--worker-secret", "/none"], "/none: cannot be read")):
            self.assertIn(said, self.refused("worker", TINY, "--listen", "127.0.0.1:0", *arguments)
                          if "--listen" not in arguments else self.refused("worker", TINY, *arguments))

    def test_an_idle_worker_ends_at_once(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            worker = Worker()
            begin = time.monotonic()
            worker.send(number)
            self.assertEqual(worker.wait(), 0)
            self.assertLess(time.monotonic() - begin, 5)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
