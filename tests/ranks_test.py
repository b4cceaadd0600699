"""The program on several ranks under mpirun: the same tokens as one process, output and errors of one rank only, and
ranks that are killed.

    python3 tests/ranks_test.py PATH_OF_TANDEM
"""
import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

from mpi_launcher import LAUNCHERS, is_alive, launch

TANDEM = ""
GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
QUESTION = ["run", "--temp", "0", "-n", "60", "--json", "-p", "What is 478 + 356?"]


def run(launcher, parts, standard_input=""):
    """Runs the program on n ranks for each (n, arguments) of `parts`."""
    with tempfile.TemporaryDirectory() as folder:
        command, environment = launch(launcher, [(n, [TANDEM, *arguments]) for n, arguments in parts], folder)
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


def answer_of(address, question):
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 80}
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

    def serving(self, start, n, mark):
        """A server of n processes, those of its ranks and its address once it is ready."""
        command, environment = start([TANDEM, "serve", "--port", "0", "--max-batch", "8"])
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

    def test_a_rank_that_is_lost_while_a_server_is_idle(self):
        for lost in range(2):
            with self.subTest(lost=lost), tempfile.TemporaryDirectory() as folder:
                job, ranks, _ = self.serving(lambda command: launch(LAUNCHERS[0], [(2, command)], folder), 2,
                                             f"{os.getpid()}-idle-{lost}")
                os.kill(ranks_of_number(ranks, lost), signal.SIGKILL)
                begin = time.monotonic()
                self.assertNotEqual(job.wait(60), 0)
                self.assertLess(time.monotonic() - begin, 30)
                time.sleep(0.5)
                self.assertEqual([p for p in ranks if is_alive(p)], [])

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
        self.refused([(3, ["run", "/none", "-p", "x"])], "/none")
        self.refused([(2, ["run", "--no-such-option"])], "--no-such-option")
        self.refused([(2, ["run", "--device", "cuda", "-p", "x"])], "several ranks", "--device cpu")
        self.refused([(2, ["run", "--placement", "p.json", "-p", "x"])], "p.json")
        self.refused([(2, ["run", "--ctx", "16", "-p", "word " * 500])], "--ctx")
        self.refused([(2, ["plan", "r1"])], "only run, chat, serve, eval and logits")
        self.refused([(2, ["serve", "--port", "70000"])], "--port 70000")

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


def main():
    global TANDEM
    TANDEM = sys.argv.pop(1)
    if not LAUNCHERS:
        print("skipped: no MPI launcher is installed")
        return 77
    return 0 if unittest.main(exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
