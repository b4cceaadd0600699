"""The program on several ranks under mpirun, or started by itself: the same tokens as one process, output and errors
of one rank only, ranks that are killed, and signals.

    python3 tests/ranks_test.py PATH_OF_TANDEM
"""
import concurrent.futures
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

from mpi_launcher import AS_SRUN, LAUNCHERS, is_alive, launch

TANDEM = ""
GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
QUESTION = ["run", "--temp", "0", "-n", "60", "--json", "-p", "What is 478 + 356?"]


def run(launcher, parts, standard_input="", before=()):
    """Runs the program on n ranks for each (n, arguments) of `parts`, by the command `before`."""
    with tempfile.TemporaryDirectory() as folder:
        command, environment = launch(launcher, [(n, [*before, TANDEM, *arguments]) for n, arguments in parts], folder)
        return subprocess.run(command, env=environment, input=standard_input, capture_output=True, text=True, timeout=300)


def alone(arguments, standard_input=""):
    return subprocess.run([TANDEM, *arguments], input=standard_input, capture_output=True, text=True, timeout=300, check=True)


def ranks_of(launcher_process, n):
    """The processes of the ranks, once there are n."""
    for _ in range(400):
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                if os.readlink(folder / "exe") == os.path.realpath(TANDEM) and f"RANKS_TEST={launcher_process}".encode() in environment:
                    found.append(int(folder.name))
            except OSError:
                pass
        if len(found) == n:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{found} instead of {n} ranks")


def ranks_of_number(processes, number):
    """The process of these that is the rank of this number."""
    for process in processes:
        environment = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if any(f"{name}={number}".encode() in environment for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")):
            return process
    raise AssertionError(f"no rank {number}")


def answer_of(address, question, most=80):
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": most}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        message = json.loads(response.read())["choices"][0]["message"]
    return message


class OnRanks(unittest.TestCase):
    def test_the_same_tokens(self):
        expected = json.loads(alone(QUESTION).stdout)
        for launcher in LAUNCHERS:
            for n in (1, 2, 4):
                with self.subTest(launcher=launcher, n=n):
                    done = run(launcher, [(n, QUESTION)])
                    self.assertEqual(done.returncode, 0, done.stderr)
                    got = json.loads(done.stdout)  # one object: of rank 0
                    self.assertEqual(got["token_ids"], expected["token_ids"])
                    self.assertLessEqual(got["model_bytes"], expected["model_bytes"])
                    if n > 1:
                        self.assertLess(got["model_bytes"], expected["model_bytes"])

    def test_under_srun(self):
        """Ranks of a host divide its cores, though the launcher does not say which are on a host."""
        expected = json.loads(alone(QUESTION).stdout)
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                done = run(launcher, [(2, QUESTION)], before=AS_SRUN)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                got = json.loads(done.stdout)
                self.assertEqual(got["token_ids"], expected["token_ids"])
                self.assertEqual(got["threads"], max(1, expected["threads"] // 2))

    def test_standard_input_is_that_of_rank_0(self):
        arguments = ["run", "--temp", "0", "-n", "40", "-q", "-f", "-"]
        expected = alone(arguments, "What is 3 + 4?").stdout
        for launcher in LAUNCHERS:
            done = run(launcher, [(2, arguments)], "What is 3 + 4?")
            self.assertEqual((done.stdout, done.returncode), (expected, 0), done.stderr)

    def test_eval_and_logits(self):
        model = str(GOLDEN / "v3_fp8")
        with tempfile.TemporaryDirectory() as folder:
            for name, start in (("alone", lambda a: alone(a)), ("ranks", lambda a: run(LAUNCHERS[0], [(3, a)]))):
                out = f"{folder}/{name}.npy"
                done = start(["logits", model, "--tokens", "3,1,4,1,5", "--out", out, "--json"])
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(json.loads(done.stdout)["out"], out)
            first, second = (pathlib.Path(f"{folder}/{name}.npy").read_bytes() for name in ("alone", "ranks"))
            self.assertEqual(len(first), len(second))
        text = str(pathlib.Path(__file__).resolve().parent.parent / "README.md")
        results = [json.loads(start(["eval", "-f", text, "--ctx", "256", "--json"]).stdout)["perplexity"]
                   for start in (alone, lambda a: run(LAUNCHERS[0], [(2, a)]))]
        self.assertAlmostEqual(results[0], results[1], delta=1e-3 * results[0])

    def test_routing_is_recorded(self):
        with tempfile.TemporaryDirectory() as folder:
            counts = []
            for name, start in (("alone", alone), ("ranks", lambda arguments: run(LAUNCHERS[0], [(2, arguments)]))):
                file = pathlib.Path(folder) / name
                done = start([*QUESTION, "--record-routing", str(file)])
                self.assertEqual(done.returncode, 0, done.stderr)
                counts.append(json.loads(file.read_text())["counts"])
            self.assertEqual(counts[0], counts[1])

    def test_chat(self):
        arguments = ["chat", "--temp", "0", "-q", "-n", "60"]
        lines = "What is 3 + 4?\nAnd 5 + 6?\n"
        expected = alone(arguments, lines).stdout
        self.assertGreater(len(expected.split()), 6)
        for launcher in LAUNCHERS:
            done = run(launcher, [(2, arguments)], lines)
            self.assertEqual((done.stdout, done.returncode), (expected, 0), done.stderr)

    def serving(self, start, n, mark, *options):
        """A server of n processes, those of its ranks and its address once it is ready."""
        batch = () if "--max-batch-size" in options else ("--max-batch", "8")
        command, environment = start([TANDEM, "serve", "--port", "0", *batch, *options])
        job = subprocess.Popen(command, env=dict(environment, RANKS_TEST=mark), stderr=subprocess.PIPE, text=True)
        self.addCleanup(job.stderr.close)
        self.addCleanup(job.kill)
        address = None
        for line in job.stderr:
            if line.startswith("listening on "):
                address = line.split()[-1]
            if line.startswith("ready"):
                return job, ranks_of(mark, n), address
        raise AssertionError("the server ended before it was ready")

    def test_serve(self):
        questions = [f"What is {17 * i % 89} + {29 * i % 97}?" for i in range(12)]

        def answers(start, n, mark):
            job, ranks, address = self.serving(start, n, mark)
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                got = list(pool.map(lambda question: answer_of(address, question), questions))
            os.kill(ranks_of_number(ranks, 0) if n > 1 else ranks[0], signal.SIGTERM)
            self.assertEqual(job.wait(30), 0, job.stderr.read())
            self.assertEqual([p for p in ranks if is_alive(p)], [])
            return got

        expected = answers(lambda command: (command, os.environ), 1, f"{os.getpid()}-alone")
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher), tempfile.TemporaryDirectory() as folder:
                got = answers(lambda command: launch(launcher, [(2, command)], folder), 2, f"{os.getpid()}-{launcher}")
                self.assertEqual(got, expected)

    def test_lmdeploys_command_line(self):
        """LMDeploy's command line of a benchmark on one host, with a router that it was told of; --backend and --log-level are
        refused by name."""
        question = "What is 3 + 4?"
        job, _, address = self.serving(lambda command: (command, os.environ), 1, f"{os.getpid()}-one")
        expected = answer_of(address, question)
        job.terminate()
        self.assertEqual(job.wait(30), 0)
        with subprocess.Popen([TANDEM, "route", "--accept-registration", "--port", "0"], stderr=subprocess.PIPE, text=True) as router, \
                tempfile.TemporaryDirectory() as folder:
            proxy = router.stderr.readline().split()[-1]
            options = ["--cache-max-entry-count", "0.8", "--max-prefill-token-num", "8192", "--dp", "2", "--ep", "2", "--max-batch-size", "128",
                       "--proxy-url", proxy, "--nnodes", "1", "--enable-microbatch", "--node-rank", "0"]
            job, _, _ = self.serving(lambda command: launch(LAUNCHERS[0], [(2, command)], folder), 2, f"{os.getpid()}-lmdeploy", *options)
            for _ in range(200):
                try:
                    self.assertEqual(answer_of(proxy, question), expected)
                    break
                except urllib.error.HTTPError:  # the server has not registered yet
                    time.sleep(0.1)
            else:
                self.fail("the router has no server")
            job.terminate()
            job.wait(30)
            router.terminate()

    def test_replicas_serve(self):
        questions = [f"What is {17 * i % 89} + {29 * i % 97}?" for i in range(240 if "TANDEM_LONG_TEST" in os.environ else 16)]

        def answers(address):
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                return list(pool.map(lambda question: answer_of(address, question), questions))

        job, _, address = self.serving(lambda command: (command, os.environ), 1, f"{os.getpid()}-one")
        expected = answers(address)
        job.terminate()
        self.assertEqual(job.wait(30), 0)
        for launcher, options in ((LAUNCHERS[0], ["--dp", "3", "--ep-dispatch", "all-to-all", "--micro-batches", "2"]), (LAUNCHERS[-1], ["--dp", "2", "--pp", "2"])):
            replicas = int(options[1])
            n = 3 if replicas == 3 else 4
            with self.subTest(launcher=launcher), tempfile.TemporaryDirectory() as folder:
                job, ranks, address = self.serving(lambda command: launch(launcher, [(n, command)], folder), n,
                                                   f"{os.getpid()}-replicas-{launcher}", *options)
                self.assertEqual(answers(address), expected)

                def read(path):
                    with urllib.request.urlopen(address + path, timeout=60) as response:
                        return response.read().decode()

                self.assertEqual(json.loads(read("/health")), {"status": "ready", "ranks": n, "replicas": replicas})
                info = json.loads(read("/server_info"))
                self.assertEqual((info["dp_size"], info["tp_size"]), (replicas, 1))
                metrics = read("/metrics")
                for replica in range(replicas):  # each has computed prompts
                    line = next(line for line in metrics.splitlines()
                                if line.startswith("tandem:replica_prompt_tokens_total{") and f'replica="{replica}"' in line)
                    self.assertGreater(float(line.split()[-1]), 0)
                os.kill(ranks_of_number(ranks, 0), signal.SIGTERM)
                self.assertEqual(job.wait(30), 0, job.stderr.read())
                self.assertEqual([p for p in ranks if is_alive(p)], [])

    def test_uses_of_experts(self):
        with tempfile.TemporaryDirectory() as folder:
            alone([*QUESTION, "--attention", "absorb", "--record-routing", f"{folder}/r.json"])
            want = json.loads(pathlib.Path(f"{folder}/r.json").read_text())

        def uses(n, launcher, *options):
            with tempfile.TemporaryDirectory() as job_folder:
                job, ranks, address = self.serving(lambda command: launch(launcher, [(n, command)], job_folder), n,
                                                   f"{os.getpid()}-uses-{options}", "--draft", "off", *options)
                answer_of(address, QUESTION[-1], 60)
                with urllib.request.urlopen(f"{address}/experts", timeout=60) as response:
                    got = json.loads(response.read())
                with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
                    metrics = response.read().decode()
                os.kill(ranks_of_number(ranks, 0), signal.SIGTERM)
                self.assertEqual(job.wait(30), 0, job.stderr.read())
            self.assertEqual([layer["counts"] for layer in got["layers"]], want["counts"], options)
            self.assertEqual(got["tokens"], want["tokens"])
            self.assertEqual(sum(got["load"]), sum(map(sum, want["counts"])))
            for rank in range(n):
                self.assertRegex(metrics, rf'\ntandem:rank_expert_load_share{{[^}}]*rank="{rank}"}} [01]')
            return got

        dealt = [[expert % 2] for expert in range(16)]
        for options in (("--ranks", "2"), ("--dp", "2"), ("--dp", "2", "--micro-batches", "2")):
            got = uses(2, LAUNCHERS[0], *options)
            self.assertEqual([layer["ranks"] for layer in got["layers"]], [dealt, dealt])
            for layer in got["layers"]:
                rows = [sum(layer["counts"][rank::2]) for rank in range(2)]
                self.assertAlmostEqual(layer["balancedness"], sum(rows) / 2 / max(rows))
            self.assertEqual(got["load"], [sum(sum(layer["counts"][rank::2]) for layer in got["layers"]) for rank in range(2)])
        got = uses(2, LAUNCHERS[-1], "--pp", "2")
        for layer in got["layers"]:
            self.assertEqual((len({rank for ranks in layer["ranks"] for rank in ranks}), layer["balancedness"]), (1, 1))

    def rebalance(self, address, method="POST"):
        """Status and answer of /rebalance."""
        request = urllib.request.Request(f"{address}/rebalance", b"" if method == "POST" else None, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]

    def test_experts_move_while_serving(self):
        questions = [f"What is {17 * i % 89} + {29 * i % 97}?" for i in range(12)]
        moving = ["--rebalance", "on-request", "--balance-window", "64", "--draft", "off"]
        for launcher, options in ((LAUNCHERS[0], []), (LAUNCHERS[-1], ["--dp", "2", "--ep-dispatch", "all-to-all"])):
            with self.subTest(options=options), tempfile.TemporaryDirectory() as folder:
                job, ranks, address = self.serving(lambda command: launch(launcher, [(2, command)], folder), 2,
                                                   f"{os.getpid()}-moving-{options}", *moving, *options)
                status, answer = self.rebalance(address)
                self.assertEqual((status, answer["code"]), (409, "nothing_counted"))
                self.assertEqual(self.rebalance(address, "GET")[1]["state"], "none")
                with concurrent.futures.ThreadPoolExecutor(6) as pool:
                    expected = list(pool.map(lambda question: answer_of(address, question), questions))
                    before = json.loads(urllib.request.urlopen(f"{address}/experts", timeout=60).read())
                    got = pool.map(lambda question: answer_of(address, question), questions)
                    status, answer = self.rebalance(address)
                    self.assertEqual((status, answer["number"]), (202, 1))
                    while (report := self.rebalance(address, "GET")[1])["state"] in ("planning", "loading"):
                        status, answer = self.rebalance(address)
                        self.assertIn((status, answer.get("code")), ((409, "in_progress"), (202, None)))
                    self.assertEqual(list(got), expected)
                self.assertEqual(report["state"], "done")
                after = json.loads(urllib.request.urlopen(f"{address}/experts", timeout=60).read())
                moved = sum(a != b for old, new in zip(before["layers"], after["layers"]) for a, b in zip(old["ranks"], new["ranks"]))
                self.assertGreater(moved, 0)
                self.assertLess(before["balancedness"], after["balancedness"])
                os.kill(ranks_of_number(ranks, 0), signal.SIGTERM)
                self.assertEqual(job.wait(30), 0, job.stderr.read())
                self.assertEqual([p for p in ranks if is_alive(p)], [])

    def all_end_without(self, lost, ranks, job):
        """A rank of a server is killed."""
        os.kill(ranks_of_number(ranks, lost), signal.SIGKILL)
        begin = time.monotonic()
        self.assertNotEqual(job.wait(60), 0)
        self.assertLess(time.monotonic() - begin, 30)
        time.sleep(0.5)
        self.assertEqual([p for p in ranks if is_alive(p)], [])

    def test_a_rank_that_is_lost_while_experts_move(self):
        for lost, seconds in ((1, 0), (0, 0.01), (1, 0.03)):  # it is planned, loaded or moved then
            with self.subTest(lost=lost, seconds=seconds), tempfile.TemporaryDirectory() as folder:
                job, ranks, address = self.serving(lambda command: launch(LAUNCHERS[0], [(2, command)], folder), 2,
                                                   f"{os.getpid()}-lost-{seconds}", "--rebalance", "on-request")
                answer_of(address, QUESTION[-1])
                self.assertEqual(self.rebalance(address)[0], 202)
                time.sleep(seconds)
                self.all_end_without(lost, ranks, job)

    def test_a_rank_that_is_lost_while_a_server_is_idle(self):
        for lost in range(2):
            with self.subTest(lost=lost), tempfile.TemporaryDirectory() as folder:
                job, ranks, _ = self.serving(lambda command: launch(LAUNCHERS[0], [(2, command)], folder), 2,
                                             f"{os.getpid()}-idle-{lost}", *(["--dp", "2"] if lost == 1 else []))
                self.all_end_without(lost, ranks, job)

    def refused(self, parts, *words):
        for launcher in LAUNCHERS:
            done = run(launcher, parts)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            self.assertEqual(len(errors), 1, done.stderr)
            for word in words:
                self.assertIn(word, errors[0])
            self.assertEqual(done.returncode, 2)
            self.assertEqual(done.stdout.replace("\n", "")[:1].strip("-= P"), "", done.stdout)

    def test_errors_are_reported_once(self):
        cases = [([(3, ["run", "/none", "-p", "x"])], "/none"),
                 ([(2, ["run", "--no-such-option"])], "--no-such-option"),
                 ([(2, ["run", "--dense-products", "onednn", "-p", "x"])], "--dense-products onednn", "ranks may choose"),
                 ([(2, ["run", "--placement", "p.json", "-p", "x"])], "p.json"),
                 ([(2, ["run", "--ctx", "16", "-p", "word " * 500])], "--ctx"),
                 ([(2, ["plan", "r1"])], "only run, chat, serve, eval, logits, bench comm and bench overlap"),
                 ([(2, ["serve", "--port", "70000"])], "--port 70000"),
                 ([(2, ["serve", "--pp", "2", "--rebalance", "auto"])], "--rebalance", "a pipeline stage has one rank")]
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:  # launchers mostly wait
            for done in [pool.submit(self.refused, *case) for case in cases]:
                done.result()

    def test_ranks_that_differ_are_refused(self):
        self.refused([(1, QUESTION), (1, QUESTION + ["--ctx", "512"])], "command line of rank 1", "--ctx 512")

    def test_a_killed_rank_ends_all(self):
        for launcher in LAUNCHERS:
            for lost in range(2):
                with self.subTest(launcher=launcher, lost=lost), tempfile.TemporaryDirectory() as folder:
                    many = ["run", "--temp", "0", "-n", "4000", "--ctx", "8192", "--raw", "--ignore-eos", "-p", "a"]
                    command, environment = launch(launcher, [(2, [TANDEM, *many])], folder)
                    mark = f"{os.getpid()}-{launcher}-{lost}"
                    with subprocess.Popen(command, env=dict(environment, RANKS_TEST=mark), stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True) as job:
                        processes = ranks_of(mark, 2)
                        job.stdout.read(1)  # it generates
                        os.kill(processes[lost], signal.SIGKILL)
                        begin = time.monotonic()
                        job.communicate(timeout=60)
                        self.assertLess(time.monotonic() - begin, 30)
                        self.assertNotEqual(job.returncode, 0)
                    time.sleep(0.5)
                    self.assertEqual([p for p in processes if is_alive(p)], [])


class StartedByItself(unittest.TestCase):
    """`--ranks N`, and placements of several hosts, without mpirun on the command line."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def environment(self, launcher, cores=2):
        """One in which `launcher`, or none, is the only one found; a machine of so many cores, on which no thread is pinned."""
        programs = pathlib.Path(self.folder.name) / f"programs-{launcher}"
        if not programs.exists():
            programs.mkdir()
            if launcher:
                (programs / "mpirun").write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]}\nexec {shutil.which(launcher)} "$@"\n')
                (programs / "mpirun").chmod(0o755)
                (programs / "mpiexec").mkdir()  # a folder is no program
        return dict(os.environ, PATH=f":/none:{programs}", HWLOC_SYNTHETIC=f"numa:1 core:{cores} pu:1",
                    TMPDIR=self.folder.name, OMPI_MCA_btl_vader_backing_directory=self.folder.name)

    def run_self(self, launcher, arguments, standard_input="", cores=2):
        return subprocess.run([TANDEM, *arguments], env=self.environment(launcher, cores), input=standard_input,
                              capture_output=True, text=True, timeout=120, check=False)

    def start(self, launcher, arguments, mark, **pipes):
        job = subprocess.Popen([TANDEM, *arguments], env=dict(self.environment(launcher), RANKS_TEST=mark), **pipes)
        self.addCleanup(job.wait)
        self.addCleanup(job.kill)
        return job

    def end(self, job, processes):
        """Its status, standard output and error; no process is left."""
        output, errors = job.communicate(timeout=60)
        begin = time.monotonic()
        while any(map(is_alive, processes)) and time.monotonic() < begin + 10:
            time.sleep(0.05)
        self.assertEqual([p for p in processes if is_alive(p)], [])
        return job.returncode, output, errors

    def test_the_same_tokens(self):
        expected = json.loads(alone(QUESTION).stdout)
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                done = self.run_self(launcher, [*QUESTION, "--ranks", "2"])
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                got = json.loads(done.stdout)
                self.assertEqual(got["token_ids"], expected["token_ids"])
                self.assertLess(got["model_bytes"], expected["model_bytes"])
        done = self.run_self(None, [*QUESTION, "--ranks", "1"])  # starts nothing
        self.assertEqual(json.loads(done.stdout)["model_bytes"], expected["model_bytes"], done.stderr)

    def test_standard_input_and_other_commands(self):
        for launcher in LAUNCHERS:
            for arguments, text in ((["run", "--temp", "0", "-n", "40", "-q", "-f", "-"], "What is 3 + 4?"),
                                    (["chat", "--temp", "0", "-q", "-n", "60"], "What is 3 + 4?\nAnd 5 + 6?\n")):
                expected = alone(arguments, text).stdout
                done = self.run_self(launcher, [*arguments, "--ranks", "2"], text)
                self.assertEqual((done.stdout, done.returncode), (expected, 0), done.stderr)
            text = "a text of some words " * 20
            done = self.run_self(launcher, ["eval", "-f", "-", "--ctx", "64", "--json", "--ranks", "2"], text)
            self.assertIn("perplexity", json.loads(done.stdout), done.stderr)
            out = f"{self.folder.name}/logits.npy"
            done = self.run_self(launcher, ["logits", "--tokens", "1,2", "--out", out, "--json", "--ranks", "2"])
            self.assertEqual(json.loads(done.stdout)["out"], out, done.stderr)

    def test_a_placement(self):
        def experts(first, last, host):
            return {"experts": f"{first}-{last}", "format": "fp8", "owners": [f"host{host}.cpu"]}

        hosts = ["host0.cpu", "host1.cpu"]
        placement = {"backbone": {"format": "fp8", "stages": [{"layers": "0-2", "devices": hosts, "tp": 2}]},
                     "embedding": {"on": "backbone"}, "head": {"on": "backbone", "replicated": False},
                     "kv": {"tokens": 512, "type": "bf16"},
                     "experts": {"layers": [{"layers": "1-2", "groups": [experts(0, 11, 0), experts(12, 15, 1)]}]},
                     "prefill": {"chunk_tokens": 512, "stream_from_tokens": 0}, "micro_batches": 1}
        file = pathlib.Path(self.folder.name) / "p.json"
        file.write_text(json.dumps(placement))
        expected = json.loads(alone(QUESTION).stdout)
        for launcher in LAUNCHERS:
            done = self.run_self(launcher, [*QUESTION, "--placement", str(file)])
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            got = json.loads(done.stdout)
            self.assertEqual(got["token_ids"], expected["token_ids"])
            self.assertLess(got["model_bytes"], expected["model_bytes"])
            done = self.run_self(launcher, ["run", "--temp", "0", "-n", "4", "-p", "a", "--placement", str(file)])
            self.assertIn(f"--placement {file}: starting its 2 ranks on this host\n", done.stderr)
        self.refused(LAUNCHERS[0], [*QUESTION, "--placement", str(file), "--ranks", "3"], 3, "3 ranks have the backbone")
        self.refused(LAUNCHERS[0], [*QUESTION, "--placement", str(file), "--ranks", "2", "--dp", "3", "--tp", "3", "--pp", "3"], 2, "error: --dp 3:")
        self.refused(LAUNCHERS[0], [*QUESTION, "--placement", str(file), "--ranks", "2", "--tp", "3", "--pp", "3"], 2, "error: --tp 3:")
        self.refused(LAUNCHERS[0], [*QUESTION, "--placement", str(file), "--ranks", "2", "--pp", "3"], 2, "error: --pp 3:")
        self.refused(LAUNCHERS[0], [*QUESTION, "--placement", str(file), "--ranks", "1"], 2, "on host1.cpu")
        self.refused(None, [*QUESTION, "--placement", str(file)], 2, f"--placement {file}", "mpirun")

    def refused(self, launcher, arguments, cores, *words):
        done = self.run_self(launcher, arguments, cores=cores)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        for word in ("error: ", *words):
            self.assertIn(word, done.stderr)

    def test_refusals(self):
        for n in ("0", "-1"):
            self.refused(None, [*QUESTION, "--ranks", n], 2, f"--ranks {n}: must be 1 or more")
        self.refused(LAUNCHERS[0], [*QUESTION, "--ranks", "6"], 5, "--ranks 6", "5 cores for 6 ranks")
        self.refused(None, [*QUESTION, "--ranks", "2"], 2, "--ranks 2", "neither mpirun nor mpiexec", "openmpi-bin")
        self.refused(LAUNCHERS[0], [*QUESTION, "--ranks", "2", "--dense-products", "onednn"], 2, "--dense-products onednn", "ranks may choose")
        for launcher in LAUNCHERS:  # what the ranks find is said once as well, and nothing by the launcher
            self.refused(launcher, ["run", "--ranks", "2", "-p", ""], 2, "the prompt is empty")
            self.refused(launcher, ["serve", "--ranks", "2", "--port", "70000"], 2, "--port 70000")

    def test_ranks_of_a_launcher_start_no_others(self):
        for launcher in LAUNCHERS:
            done = run(launcher, [(2, [*QUESTION, "--ranks", "2"])])
            self.assertEqual(json.loads(done.stdout)["generated_tokens"], 60, done.stderr)
            for n, asked in ((2, "4"), (2, "1"), (1, "2")):
                done = run(launcher, [(n, [*QUESTION, "--ranks", asked])])
                errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
                self.assertEqual(len(errors), 1, done.stderr)
                self.assertIn(f"--ranks {asked}: the MPI launcher started {n}", errors[0])
                self.assertEqual(done.returncode, 2)

    def test_bench_comm(self):
        bench = ["bench", "comm", "--config", str(GOLDEN.parent.parent / "models" / "tiny-r1"), "--seconds", "0.002",
                 "--bytes", "64,5000", "--tokens", "3"]
        calls = ["broadcast", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
        modes = ["exchange gather", "exchange all-to-all", "exchange low-latency"]
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                done = self.run_self(launcher, [*bench, "--ranks", "2", "--json"])
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                rows = [json.loads(line) for line in done.stdout.splitlines()]
                self.assertEqual([row["operation"] for row in rows], ["barrier", *calls, *calls, *modes, *modes])
                for row in rows:
                    self.assertEqual(row["ranks"], 2)
                    self.assertTrue(row["mpi"].startswith("libmpi"))
                    self.assertGreater(min(row["seconds"], row["raw_seconds"], row["seconds_over_raw"]), 0)
                # Ranks of one host are no hosts, unless the user says so.
                file = pathlib.Path(self.folder.name) / "machine.json"
                file.write_text((GOLDEN.parent.parent / "machines" / "desktop-192gb.json").read_text())
                before = json.loads(file.read_text())
                done = self.run_self(launcher, [*bench, "--ranks", "2", "--out", str(file)])
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertIn("all ranks are on one host", done.stderr)
                self.assertEqual(json.loads(file.read_text()), before)
                done = self.run_self(launcher, [*bench, "--ranks", "2", "--out", str(file), "--as-network"])
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertEqual(done.stdout.count("between hosts"), 2)
                machine = json.loads(file.read_text())
                network = machine.pop("network")
                self.assertEqual(machine, before)
                self.assertGreater(network["bytes_per_second"], 1e6)
                self.assertTrue(0 < network["latency_seconds"] < 1)
                file.write_text("{}")
                done = self.run_self(launcher, [*bench, "--ranks", "2", "--out", str(file), "--as-network", "--json"])
                self.assertEqual((done.returncode, done.stderr.count("error:"), file.read_text()), (2, 1, "{}"), done.stderr)
        self.refused(None, bench, 2, "bench comm: --bytes is about several ranks", "--ranks 2")
        self.refused(None, [*bench, "--as-network", "--out", "x"], 2, "bench comm: --as-network is about several ranks")
        self.refused(None, ["bench", "overlap"], 2, "bench overlap measures several ranks", "--ranks 2")
        self.refused(LAUNCHERS[0], [*bench, "--ranks", "2", "--as-network"], 2, "--as-network")

    def test_bench_comm_alone(self):
        bench = ["bench", "comm", "--config", str(GOLDEN.parent.parent / "models" / "tiny-r1"), "--seconds", "0.002", "--tokens", "4,1"]
        file = pathlib.Path(self.folder.name) / "one.json"
        file.write_text((GOLDEN.parent.parent / "machines" / "office-4090-3x256gb.json").read_text())
        before = json.loads(file.read_text())
        done = self.run_self(None, [*bench, "--json", "--out", str(file)])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        names = ["request to a worker", "encrypted request", "request by UCX"][:len(rows) // 2]  # the last one where it is installed
        self.assertGreaterEqual(len(names), 2)
        self.assertEqual([(row["operation"], row["tokens"], row["there"], row["back"]) for row in rows],
                         [(name, n, "bf16", "f32") for name in names for n in (4, 1)])
        self.assertTrue(all(row["raw_seconds"] > 0 and row["bytes_per_second"] > 0 for row in rows))
        machine = json.loads(file.read_text())
        self.assertEqual(machine.pop("request_seconds"), min(row["seconds"] for row in rows[:2]))
        self.assertEqual(machine, before)
        text = self.run_self(None, bench)
        self.assertEqual((text.returncode, text.stdout.count("| request to a worker  |"), text.stdout.count("| encrypted request    |")), (0, 2, 2))
        self.assertIn("a backbone and a worker on this host, beside TCP", text.stdout)
        self.refused(None, [*bench[:-1], "8193"], 2, "--tokens", "8192")

    def test_bench_overlap(self):
        timeline = pathlib.Path(self.folder.name) / "timeline.json"
        done = self.run_self(LAUNCHERS[0], ["bench", "overlap", "--ranks", "2", "--tokens", "8,24", "--seconds", "0.01",
                                            "--simulate-delay", "2", "--timeline", str(timeline), "--json"])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([(row["step"], row["tokens"]) for row in rows],
                         [("decode", 8), ("decode", 24), ("prompt", 8), ("prompt", 24)])
        self.assertGreater(min(row["seconds_1"] for row in rows), 0.008)
        trace = json.loads(timeline.read_text())["traceEvents"]
        self.assertEqual([e["args"]["name"].split(" on ")[0] for e in trace if e["name"] == "process_name"], ["rank 0", "rank 1"])
        events = [e for e in trace if e["ph"] == "X" and e["args"]["step"] > 1]
        self.assertEqual({e["pid"] for e in events}, {0, 1})
        self.assertEqual({(e["name"], e["args"]["step"], e["args"]["half"]) for e in events},
                         {(name, step, half) for name in ("backbone", "experts", "rows", "sums")
                          for step, half in ((2, 0), (3, 0), (3, 1))})

    def test_a_timeline_of_all_ranks(self):
        """One file, on one axis of time: no rank has ended a step before another one begins it."""
        for launcher in LAUNCHERS:
            timeline = pathlib.Path(self.folder.name) / "timeline.json"
            done = self.run_self(launcher, [*QUESTION, "--dp", "2", "--timeline", str(timeline)])
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(json.loads(done.stdout)["generated_tokens"], 60)
            spans = {}
            for event in json.loads(timeline.read_text())["traceEvents"]:
                if event["ph"] == "X":
                    begin, end = spans.get((event["args"]["step"], event["pid"]), (1e18, 0))
                    spans[event["args"]["step"], event["pid"]] = (min(begin, event["ts"]), max(end, event["ts"] + event["dur"]))
            steps = {step for step, _ in spans}
            self.assertGreater(len(steps), 5)
            for step in steps:
                self.assertLess(spans[step, 0][0], spans[step, 1][1])
                self.assertLess(spans[step, 1][0], spans[step, 0][1])
        self.refused(LAUNCHERS[0], [*QUESTION, "--ranks", "2", "--timeline", str(timeline)], 2, "--timeline", "--dp")

    def test_micro_batches_are_of_ranks_that_exchange_rows(self):
        self.refused(None, [*QUESTION, "--micro-batches", "2"], 2, "--micro-batches 2", "leave it out")
        self.refused(LAUNCHERS[0], [*QUESTION, "--micro-batches", "2"], 2, "--micro-batches 2", "leave it out")
        self.refused(None, [*QUESTION, "--simulate-delay", "1"], 2, "--simulate-delay 1")
        self.refused(None, [*QUESTION, "--micro-batches", "5"], 2, "--micro-batches 5")

    def test_a_server_finishes_its_answers_after_sigterm(self):
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                mark = f"{os.getpid()}-drain-{launcher}"
                job = self.start(launcher, ["serve", "--ranks", "2", "--port", "0"], mark, stderr=subprocess.PIPE, text=True)
                address = None
                for line in job.stderr:
                    if line.startswith("listening on "):
                        address = line.split()[-1]
                    if line.startswith("ready"):
                        break
                processes = ranks_of(mark, 3)  # and the one that started them
                body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
                request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(),
                                                 {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as response:
                    response.readline()
                    job.send_signal(signal.SIGTERM)
                    self.assertIn("[DONE]", response.read().decode())
                status, _, errors = self.end(job, processes)
                self.assertEqual((status, errors), (0, ""))

    ENDLESS = ["run", "--ranks", "2", "--temp", "0", "--raw", "--ignore-eos", "-n", "100000", "--ctx", "200000", "-p", "a"]

    def test_signals(self):
        """SIGINT ends the answer, as in one process; SIGTERM and the loss of a rank end all. When what started the ranks is
        killed they end too."""
        for launcher in LAUNCHERS:
            for name, send in (("SIGINT", lambda job, ranks: job.send_signal(signal.SIGINT)),
                               ("SIGTERM", lambda job, ranks: job.send_signal(signal.SIGTERM)),
                               ("a lost rank", lambda job, ranks: os.kill(ranks_of_number(ranks, 1), signal.SIGKILL)),
                               ("killed", lambda job, ranks: job.kill())):
                with self.subTest(launcher=launcher, name=name):
                    mark = f"{os.getpid()}-{name}-{launcher}"
                    job = self.start(launcher, self.ENDLESS, mark, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                    job.stdout.read(1)  # it generates
                    processes = ranks_of(mark, 3)
                    send(job, [p for p in processes if p != job.pid])
                    status, _, errors = self.end(job, processes)
                    if name == "SIGINT":
                        self.assertEqual(status, 0, errors)
                        self.assertIn("tokens at", errors)
                    else:
                        self.assertNotEqual(status, 0)
                        named = re.search(r"error: rank 1 \(process \d+\) was killed or has crashed", errors)
                        self.assertEqual(bool(named), name == "a lost rank", errors)

    def test_a_terminal(self):
        """Lines reach rank 0, Ctrl-C ends an answer and not the ranks, Ctrl-D ends them."""
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                process, terminal = pty.fork()
                if process == 0:
                    os.execve(TANDEM, [TANDEM, "chat", "--ranks", "2", "--temp", "0", "-q", "-n", "40"], self.environment(launcher))

                def shown(until, terminal=terminal):
                    text = ""
                    while until not in text and select.select([terminal], [], [], 30)[0]:
                        text += os.read(terminal, 4096).decode()
                    return text

                try:
                    os.write(terminal, b"What is 3 + 4?\n")
                    self.assertIn("The answer is 7.", shown("is 7."))
                    time.sleep(0.5)  # until the answer has ended
                    os.write(terminal, b"\x03")
                    time.sleep(0.5)  # signals and lines take different ways
                    os.write(terminal, b"What is 2 + 3?\n")
                    self.assertIn("got 5", shown("got 5"))
                    os.write(terminal, b"\x04")
                    self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), 0)
                finally:
                    os.close(terminal)  # hangs up


def main():
    global TANDEM
    TANDEM = os.path.realpath(sys.argv.pop(1))
    if not LAUNCHERS:
        print("skipped: no MPI launcher is installed")
        return 77
    os.environ["XDG_CACHE_HOME"] = "/no/such"  # as if this machine was never measured: no plan for --ranks
    return 0 if unittest.main(exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
