"""The program on several ranks with emulated GPUs, as processes under mpirun or started by itself: the tokens of one
process, placements that `tandem plan` wrote, a server, and ranks that are stopped or lack a GPU.

    python3 tests/gpu_ranks_test.py PATH_OF_TANDEM_WITH_THE_EMULATED_GPU
"""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import ranks_test
from mpi_launcher import AS_SRUN, LAUNCHERS, is_alive, launch
from ranks_test import alone, answer_of, ranks_of, ranks_of_number, run

# Few tokens: one takes the emulated GPU 50 ms.
QUESTION = ["run", "--temp", "0", "--device", "cuda", "--ctx", "512", "-n", "10", "--json", "-p", "What is 478 + 356?"]
AUTO = [a if a != "cuda" else "auto" for a in QUESTION]
GPU_BYTES = 1050000000  # of a small machine: 29 MB more than what is kept free
MACHINES = pathlib.Path(__file__).resolve().parent.parent / "machines"


class GpuProcesses(unittest.TestCase):
    def started(self, *arguments, **environment):
        return subprocess.run([ranks_test.TANDEM, *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
                              timeout=300, check=False)


class GpuRanks(GpuProcesses):
    def test_the_same_tokens(self):
        expected = json.loads(alone(QUESTION).stdout)
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                done = run(launcher, [(2, QUESTION)])
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                got = json.loads(done.stdout)
                self.assertEqual(got["token_ids"], expected["token_ids"])
                self.assertEqual(got["device"], "emulated GPU")
                self.assertLess(got["model_bytes"], expected["model_bytes"])

    def test_under_srun(self):
        """--gpus-per-task 1 gives each rank a list of one GPU."""
        expected = json.loads(alone(QUESTION).stdout)

        def with_lists(lists, question=QUESTION):
            parts = [(1, ["env", f"CUDA_VISIBLE_DEVICES={gpus}", *AS_SRUN, ranks_test.TANDEM, *question]) for gpus in lists]
            with tempfile.TemporaryDirectory() as folder:
                command, environment = launch(LAUNCHERS[0], parts, folder)
                return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

        done = with_lists(("3", "5"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(json.loads(done.stdout)["token_ids"], expected["token_ids"])
        done = with_lists(("4", "3", "4"))
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"\Aerror: ranks 0 and 2 of one host have the same GPU: give each one of its own .*\n")
        done = with_lists(("4", "4"), AUTO)  # the first one takes it
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(json.loads(done.stdout)["device"], "emulated GPU, other ranks on the cpu")
        self.assertEqual(json.loads(done.stdout)["token_ids"], expected["token_ids"])

    def plan(self, file, n_gpus, options, **changes):
        """The plan for a small machine of `n_gpus` GPUs, or of two hosts without, which it writes to the file."""
        machine = json.loads((MACHINES / "8xh200.json").read_text())
        machine["gpus"][0].update(count=n_gpus, memory_bytes=GPU_BYTES, read_bytes_per_second=changes.get("gpu", 4.8e12))
        machine["gpu_link"]["latency_seconds"] = changes.get("latency", 5e-6)
        machine["read_bytes_per_second"] = dict.fromkeys(("one_thread", "all", "cross"), changes.get("cpu", 5e11))
        if n_gpus == 0:
            del machine["gpus"], machine["gpu_link"]
            machine.update(hosts=2, network={"bytes_per_second": 1e11, "latency_seconds": 1e-7})
        described = file.with_suffix(".machine")
        described.write_text(json.dumps(machine))
        done = self.started("plan", "--machine", str(described), "--ctx", "512", "--prompt", "200", "--output", "200", *options,
                            "--out", str(file), "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([reason for reason in json.loads(done.stdout)["reasons"] if reason.startswith("not executed")], [])
        return json.loads(file.read_text())

    def test_planned_placements(self):
        """Plans for small machines run as they are written."""
        expected = json.loads(alone(QUESTION).stdout)["token_ids"]
        many = ["--objective", "throughput", "--concurrency"]
        cases = (("two replicas", 2, [*many, "0"], {}, [2], {"host0.gpu0", "host0.gpu1"}),
                 ("two stages", 2, [*many, "32"], {}, [1, 1], {"host0.gpu1"}),
                 ("experts also on the CPU", 2, [], {"gpu": 1e8, "latency": 1e-7, "cpu": 1e7}, [2],
                  {"host0.gpu0", "host0.gpu1", "host0.cpu"}),
                 ("two hosts without GPUs", 0, [], {"cpu": 1e8}, [2], {"host0.cpu", "host1.cpu"}))
        for name, n_gpus, options, changes, devices, owners in cases:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / "p.json"
                placement = self.plan(file, n_gpus, options, **changes)
                self.assertEqual([len(stage["devices"]) for stage in placement["backbone"]["stages"]], devices)
                groups = [group for layer in placement["experts"]["layers"] for group in layer["groups"]]
                self.assertEqual({owner for group in groups for owner in group["owners"]}, owners)
                question = [a if a != "cuda" or n_gpus else "cpu" for a in QUESTION]
                for micro_batches in (1, 2) if name == "two replicas" else (1,):
                    if micro_batches == 2:
                        file.write_text(json.dumps({**placement, "micro_batches": 2}))
                    done = self.started(*question, "--placement", str(file), TANDEM_GPU_MEMORY=str(GPU_BYTES))  # starts its ranks
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                    self.assertEqual(json.loads(done.stdout)["token_ids"], expected)

    def test_ranks_are_planned(self):
        """--ranks alone: a plan for as many GPUs or parts of the cores as were measured, which the ranks obey."""
        expected = json.loads(alone(QUESTION).stdout)["token_ids"]
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "cache" / "tandem" / f"machine-{socket.gethostname()}.json"
            file.parent.mkdir(parents=True)
            temporary = pathlib.Path(folder) / "temporary"
            temporary.mkdir()

            def ask(n_gpus, *arguments, memory=GPU_BYTES):
                machine = json.loads((MACHINES / "8xh200.json").read_text())
                machine["gpus"][0].update(count=n_gpus, memory_bytes=memory)
                file.write_text(json.dumps(machine))
                done = self.started(*arguments, TANDEM_GPU_MEMORY=str(GPU_BYTES), XDG_CACHE_HOME=str(file.parent.parent), TMPDIR=str(temporary))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(list(temporary.glob("tandem-placement*")), [], "the file of the placement is removed")
                return done

            done = ask(2, *QUESTION, "--ranks", "2")
            self.assertEqual((json.loads(done.stdout)["token_ids"], done.stderr), (expected, ""))
            question = [a for a in QUESTION if a != "--json"]
            planned = "--ranks 2: as planned, "
            self.assertIn(planned, ask(4, *question, "--ranks", "2").stderr)
            self.assertNotIn("--ranks 2:", ask(1, *question, "--ranks", "2").stderr, "there are too few GPUs")
            self.assertNotIn("planned", ask(2, *question, "--ranks", "2", "--tp", "2").stderr)
            on_cpus = ask(2, *[a if a != "cuda" else "cpu" for a in QUESTION], "--ranks", "2")
            self.assertEqual((json.loads(on_cpus.stdout)["token_ids"], on_cpus.stderr), (expected, ""))
            self.assertIn(planned, ask(2, *[a if a != "cuda" else "cpu" for a in question], "--ranks", "2").stderr)
            without = ask(2, *question, "--ranks", "2", memory=1022000000).stderr
            self.assertIn("--ranks 2: they divide each layer, as there is no plan: ", without)
            self.assertIn("does not fit", without)
            # A server's plan is for all its sequences.
            mark = f"{os.getpid()}-planned"
            environment = dict(os.environ, RANKS_TEST=mark, TANDEM_GPU_MEMORY=str(GPU_BYTES), XDG_CACHE_HOME=str(file.parent.parent), TMPDIR=str(temporary))
            ask(2, *question, "--ranks", "2")  # the description of two GPUs
            with subprocess.Popen([ranks_test.TANDEM, "serve", "--device", "cuda", "--ranks", "2", "--port", "0", "--ctx", "512", "--max-batch", "64"],
                                  env=environment, stderr=subprocess.PIPE, text=True) as server, contextlib.ExitStack() as ends:
                ends.callback(server.terminate)
                lines = [server.stderr.readline()]
                while not lines[-1].startswith("listening on "):
                    self.assertNotEqual(lines[-1], "")
                    lines.append(server.stderr.readline())
                self.assertIn(planned, lines[0])
                address = lines[-1].split()[-1]
                self.wait_ready(address)
                self.assertIn("content", answer_of(address, "What is 3 + 4?", 4))
                replicas, divided = re.search(r"(\d+) replica\(s\) x (\d+)-way", lines[0]).groups()
                with urllib.request.urlopen(address + "/server_info", timeout=60) as response:
                    info = json.load(response)
                self.assertEqual((info["dp_size"], info["tp_size"]), (int(replicas), int(divided)))
                placed = [b"--placement\0" in pathlib.Path(f"/proc/{process}/cmdline").read_bytes() for process in ranks_of(mark, 3)]
                self.assertEqual(placed.count(True), 2, "the ranks, not what has started them")
                server.terminate()
                self.assertEqual(server.wait(30), 0)

    def test_rows_as_planned(self):
        """How rows travel is planned, written, and obeyed unless the command line says otherwise."""
        many = ["--objective", "throughput", "--concurrency", "0"]
        for n_gpus, options, changes in ((2, many, {}), (0, [*many[:-1], "32"], {"cpu": 1e8})):
            with self.subTest(gpus=n_gpus), tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / "p.json"
                placement = self.plan(file, n_gpus, [*options, "--ep-rows", "fp8"], **changes)
                self.assertEqual(placement["experts"]["ep_rows"], "fp8")
                out, logits = pathlib.Path(folder) / "out.npy", []
                # One exchange: which one auto measures to be the faster differs from run to run, and with it the sums' rounding.
                for rows in ([], ["--ep-rows", "fp8"], ["--ep-rows", "exact"]):
                    done = self.started("logits", "--tokens", "1,2,3,4", "--ctx", "512", "--out", str(out), "--placement", str(file), *rows,
                                        "--ep-dispatch", "all-to-all", "--device", "cuda" if n_gpus else "cpu", TANDEM_GPU_MEMORY=str(GPU_BYTES))
                    self.assertEqual(done.returncode, 0, done.stderr)
                    logits.append(out.read_bytes())
                    out.unlink()
                self.assertEqual(logits[0], logits[1])
                self.assertNotEqual(logits[0], logits[2])
                again = self.started("plan", "--machine", str(file.with_suffix(".machine")), "--placement", str(file), "--ep-rows", "fp8")
                self.assertEqual((again.returncode, again.stdout), (2, ""))
                self.assertIn("both --placement and --ep-rows", again.stderr)

    def test_serve(self):
        self.serve("--ranks", "2")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "p.json"
            self.plan(file, 2, ["--objective", "throughput", "--concurrency", "0"])
            self.serve("--placement", str(file))

    def serve(self, *divided):
        with tempfile.TemporaryDirectory() as folder:
            many = ["serve", "--device", "cuda", *divided, "--port", "0", "--ctx", "512", "--max-batch", "4"]
            mark = f"{os.getpid()}-gpu-serve"
            with subprocess.Popen([ranks_test.TANDEM, *many], env=dict(os.environ, RANKS_TEST=mark, TMPDIR=folder, TANDEM_GPU_MEMORY=str(GPU_BYTES)),
                                  stderr=subprocess.PIPE, text=True) as server:
                line = server.stderr.readline()
                while "http://" not in line:
                    self.assertNotEqual(line, "")
                    line = server.stderr.readline()
                address = line[line.index("http://"):].split()[0]
                self.wait_ready(address)
                with concurrent.futures.ThreadPoolExecutor(2) as pool:
                    answers = list(pool.map(lambda q: answer_of(address, q), ["What is 3 + 4?", "What is 12 + 7?"]))
                for answer, text in zip(answers, ("is 7.", "is 19.")):
                    self.assertIn(text, json.dumps(answer))
                with urllib.request.urlopen(f"{address}/experts", timeout=60) as response:
                    experts = json.loads(response.read())
                self.assertGreater(experts["tokens"], 50)
                for layer in experts["layers"][:2]:  # each token of each replica is counted once
                    self.assertEqual(sum(layer["counts"]), 4 * experts["tokens"])
                    self.assertEqual(layer["ranks"], [[0], [1]] * 8)
                server.send_signal(signal.SIGTERM)
                server.communicate(timeout=60)
                self.assertEqual(server.returncode, 0)

    def wait_ready(self, address):
        for _ in range(200):
            try:
                return answer_of(address, "What is 1 + 1?", 1)
            except OSError:
                time.sleep(0.1)
        raise AssertionError("not ready")


class GpuCalls(GpuProcesses):
    def test_what_gpus_do_together_is_measured(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "measured.json"
            out.write_text((MACHINES / "8xh200.json").read_text(encoding="utf-8"), encoding="utf-8")
            command = ["bench", "comm", "--ranks", "2", "--device", "cuda", "--bytes", "1024,65536", "--tokens", "4",
                       "--config", "v2-lite", "--seconds", "0.01", "--json"]
            done = self.started(*command, "--out", str(out))
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            rows = [json.loads(line) for line in done.stdout.splitlines()]
            exchanges = ["exchange gather", "exchange all-to-all", "exchange low-latency"]
            calls = ["broadcast", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
            self.assertEqual([row["operation"] for row in rows], [*calls, *calls, *exchanges, *exchanges, "within hosts", "within hosts"])
            self.assertEqual({(row["gpu"], row["ranks"], row["hosts"]) for row in rows}, {("emulated GPU", 2, 1)})
            link = json.loads(out.read_text(encoding="utf-8"))["gpu_link"]
            self.assertEqual(link["latency_seconds"], rows[-2]["seconds"])
            self.assertGreaterEqual(link["bytes_per_second"] * 1.001, rows[-1]["bytes_per_second"])
            planned = self.started("plan", "r1", "--machine", str(out))
            self.assertEqual((planned.returncode, planned.stderr), (0, ""))
            done = self.started(*command, "--out", folder + "/none/m.json")
            self.assertEqual((done.returncode, done.stderr.count("error:"), done.stderr.count("\n")), (2, 1, 1), done.stderr)
            done = self.started(*command, TANDEM_GPU_COUNT="1")
            self.assertEqual(done.returncode, 2)
            self.assertRegex(done.stderr, r"\Aerror: rank 1, which is number 1 on its host, needs a GPU of its own: .*\n")
            done = self.started("bench", "comm", "--device", "cuda")
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn("--device cuda is about the GPUs of several ranks", done.stderr)


class GpuRanksLost(GpuProcesses):
    def test_a_stopped_rank_is_named(self):
        """The GPUs of the others wait for it, and no call of MPI would tell."""
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # most of the time is waiting
            list(pool.map(self.stop, [0, 1, 0, 1], ["--tp", "--dp", "--dp", "--tp"], [2, 2, 1, 1]))

    def stop(self, lost, division, n_gpus):
        """Of two ranks, which have a GPU each or only the first."""
        with tempfile.TemporaryDirectory() as folder:
            many = ["run", "--device", "cuda" if n_gpus == 2 else "auto", division, "2", "--temp", "0", "-n", "4000", "--ctx", "8192", "--raw", "--ignore-eos", "-p", "a"]
            command, environment = launch(LAUNCHERS[0], [(2, [ranks_test.TANDEM, *many])], folder)
            mark = f"{os.getpid()}-gpu-{lost}-{n_gpus}"
            with subprocess.Popen(command, env=dict(environment, RANKS_TEST=mark, TANDEM_GPU_COUNT=str(n_gpus)), stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) as job:
                processes = ranks_of(mark, 2)
                victim = ranks_of_number(processes, lost)
                job.stdout.read(1)  # it generates
                os.kill(victim, signal.SIGSTOP)
                begin = time.monotonic()
                try:
                    _, errors = job.communicate(timeout=60)
                    self.assertLess(time.monotonic() - begin, 30)
                finally:
                    os.kill(victim, signal.SIGKILL)
                self.assertNotEqual(job.returncode, 0)
                self.assertIn(f"error: rank {lost} does not answer", errors)
            time.sleep(0.5)
            self.assertEqual([p for p in processes if is_alive(p)], [])

    def test_ranks_without_a_gpu(self):
        done = self.started(*QUESTION, "--ranks", "2", TANDEM_GPU_COUNT="1")
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"\Aerror: rank 1, which is number 1 on its host, needs a GPU of its own: .*\n")
        expected = json.loads(alone(QUESTION).stdout)
        for grid, device in [(["--tp", "2"], "emulated GPU, other ranks on the cpu"), (["--pp", "2"], "emulated GPU, other ranks on the cpu"),
                             (["--dp", "2"], "emulated GPU, experts also on the cpu, other ranks on the cpu")]:
            with self.subTest(grid=grid):
                done = self.started(*AUTO, *grid, TANDEM_GPU_COUNT="1")
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                got = json.loads(done.stdout)
                self.assertEqual((got["device"], got["token_ids"]), (device, expected["token_ids"]))
        done = self.started(*AUTO, "--dp", "2", "--micro-batches", "2", TANDEM_GPU_COUNT="1")
        self.assertEqual(json.loads(done.stdout)["device"], "cpu")
        self.assertEqual(done.stderr, "warning: running on the CPUs: not every rank has a GPU of its own, and --micro-batches needs ranks of one kind\n")


if __name__ == "__main__":
    sys.exit(ranks_test.main())
