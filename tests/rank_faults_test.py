"""Kills and stops ranks at random times: all processes of the job are gone within 30 seconds, an error names the rank, and
nothing is left in shared memory.

    python3 tests/rank_faults_test.py PATH_OF_TANDEM [--faults 50] [--seed 1] [--only 7] [--at-once 3] [--device cuda]

A fault is SIGKILL or SIGSTOP of one of the four ranks of a server or a run of the embedded model, in a grid, under an MPI
launcher or `--ranks`, while the job starts, computes a prompt, decodes, is idle or ends. All of it follows from the seed and
the number of the fault. Without --faults TANDEM_RANK_FAULTS says how many there are.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import ranks_test
from mpi_launcher import LAUNCHERS, is_alive, launch

N_RANKS = 4
MOST_SECONDS = 30
GRIDS = ([], ["--dp", "4"], ["--dp", "2", "--ep-dispatch", "all-to-all"], ["--pp", "2"], ["--pp", "2", "--dp", "2"],
         ["--dp", "4", "--ep-dispatch", "low-latency", "--micro-batches", "2"])
PHASES = {"serve": ("start", "prompt", "decode", "idle", "end"), "run": ("start", "prompt", "decode", "end")}
# Seconds from the begin of a phase to the fault, at most.
LATEST = {"start": 1.5, "prompt": 0.6, "decode": 1.0, "idle": 6, "end": 0.2}
Fault = collections.namedtuple("Fault", "number signal rank command phase seconds grid launcher way")


def fault_of(number, seed):
    """`way`: "mpi", under the launcher; "alone", where Open MPI's does not end the other ranks when one is killed; "self",
    --ranks. Only a launcher ends a rank that is stopped."""
    draw = random.Random(seed * 1000 + number)
    command = draw.choice(("serve", "serve", "run"))
    phase = draw.choice(PHASES[command])
    kind = draw.choice((signal.SIGKILL, signal.SIGSTOP))
    fault = Fault(number, kind, draw.randrange(N_RANKS), command, phase, draw.random() * LATEST[phase], draw.choice(GRIDS),
                  draw.choice(LAUNCHERS), draw.choice(("mpi", "alone", "self")))
    can_be_alone = kind == signal.SIGKILL and fault.launcher == "mpirun.openmpi"
    return fault if can_be_alone or fault.way != "alone" else fault._replace(way="mpi")


def text_of(fault):
    return (f"{fault.number}: {fault.signal.name} to rank {fault.rank} of {fault.command} {' '.join(fault.grid)} "
            f"({fault.launcher}, {fault.way}), {fault.seconds:.2f} s after {fault.phase}")


class Job:
    """A server or a run on four ranks, with what it writes in files of `folder`."""

    def __init__(self, fault, folder, device):
        self.fault = fault
        self.device = device
        self.folder = pathlib.Path(folder)
        self.mark = f"{os.getpid()}-fault-{fault.number}"
        serve = ["serve", "--port", "0", "--max-batch", "8", "--ctx", "8192"]
        arguments = [*(serve if fault.command == "serve" else self.run_arguments()), *fault.grid, "--device", device]
        if fault.way == "self":
            command, environment = self.started_by_itself([*arguments, "--ranks", str(N_RANKS)])
        else:
            command, environment = launch(fault.launcher, [(N_RANKS, [ranks_test.TANDEM, *arguments])], folder)
        if fault.way == "alone":
            command[1:1] = ["--enable-recovery"]
        self.out, self.errors = self.folder / "out", self.folder / "errors"
        with self.out.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, env=dict(environment, RANKS_TEST=self.mark), stdout=out, stderr=errors,
                                            stdin=subprocess.DEVNULL)

    def run_arguments(self):
        few = self.fault.phase == "end"
        words = "a " * (3000 if self.fault.phase == "prompt" else 1)
        return ["run", "--temp", "0", "--raw", "--ignore-eos", "--ctx", "65536", "-n", "8" if few else "60000", "-p", words]

    def started_by_itself(self, arguments):
        programs = self.folder / "programs"
        programs.mkdir()
        program = programs / "mpirun"
        program.write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]}\nexec {self.fault.launcher} "$@"\n')
        program.chmod(0o755)
        return [ranks_test.TANDEM, *arguments], dict(os.environ, PATH=str(programs), TMPDIR=str(self.folder),
                                                     XDG_CACHE_HOME=str(self.folder), HWLOC_SYNTHETIC=f"numa:1 core:{N_RANKS} pu:1")

    def wait_for(self, path, pattern, seconds=120):
        """What `pattern` finds in a file, once it is there."""
        for _ in range(seconds * 50):
            found = re.search(pattern, path.read_text(errors="replace"))
            if found or self.process.poll() is not None:
                return found
            time.sleep(0.02)
        raise AssertionError(f"no {pattern} in {path.read_text()!r}")

    def ranks(self):
        """The processes of the ranks by number, of those that have begun."""
        found = {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANKS_TEST={self.mark}".encode() not in environment:
                continue
            for entry in environment:
                name, _, value = entry.partition(b"=")
                if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
                    found[int(value)] = int(folder.name)
        return found

    def processes(self):
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if f"RANKS_TEST={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass
        return [p for p in found if is_alive(p)]

    def await_phase(self):
        """Returns when the phase begins."""
        fault = self.fault
        if fault.phase == "start":
            for _ in range(1000):
                if fault.rank in self.ranks():
                    return
                time.sleep(0.01)
            raise AssertionError("the ranks do not start")
        if fault.command == "run":
            if fault.phase == "prompt":
                for _ in range(1000):
                    if len(self.ranks()) == N_RANKS:
                        break
                    time.sleep(0.01)
                time.sleep(1)  # until the models are loaded
            else:
                self.wait_for(self.out, ".")
            return
        self.wait_for(self.errors, "(?m)^ready")
        if fault.phase == "idle":
            return
        address = self.wait_for(self.errors, r"listening on (\S+)")[1]
        if fault.phase == "end":
            os.kill(self.ranks()[0], signal.SIGTERM)
            return
        body = {"prompt": "a " * (6000 if fault.phase == "prompt" else 1), "max_tokens": 2000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        first = threading.Event()
        threading.Thread(target=self.read_answer, args=(request, first), daemon=True).start()
        if fault.phase == "decode":
            first.wait(60)

    @staticmethod
    def read_answer(request, first):
        try:
            with urllib.request.urlopen(request, timeout=90) as response:
                response.readline()
                first.set()
                response.read()
        except (OSError, ValueError, http.client.HTTPException):  # the server is lost
            pass


def shared_memory():
    """Names in /dev/shm. MPICH itself leaves its file where a rank is lost while MPI begins."""
    return {path.name for path in pathlib.Path("/dev/shm").iterdir() if not path.name.startswith("mpich_shar_tmp")}


def is_mapped(name):
    """Whether a process has it in memory: another MPI program of this host, since the jobs of this one have ended."""
    for maps in pathlib.Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if f"/dev/shm/{name}" in maps.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def problems_after(fault, folder, device):
    """What is wrong after the fault, and the seconds until all processes were gone."""
    job = Job(fault, folder, device)
    try:
        job.await_phase()
        time.sleep(fault.seconds)
        victim = job.ranks().get(fault.rank)
        if victim is None:
            return (["the job ended before the fault"] if fault.phase != "end" else []), 0
        os.kill(victim, fault.signal)
        # Open MPI's launcher may wait without end for a lock of its own (PMIx_server_finalize) when a rank was lost
        # before MPI had begun. The ranks are gone then, and --ranks kills it.
        may_hang = fault.launcher == "mpirun.openmpi" and fault.way != "self" and fault.phase == "start"
        begin = time.monotonic()
        alone = None  # since when the launcher has no ranks any more
        while job.process.poll() is None or job.processes():
            now = time.monotonic()
            if may_hang and job.processes() == [job.process.pid]:
                alone = alone or now
                if now > alone + 10:
                    job.process.kill()
            if now > begin + MOST_SECONDS + 30:
                break
            time.sleep(0.05)
        seconds = (alone or time.monotonic()) - begin
        left = job.processes()
        errors = job.errors.read_text(errors="replace")
        problems = []
        if seconds > MOST_SECONDS:
            problems.append(f"gone after {seconds:.0f} s, alive {left}")
        status = job.process.poll()
        if status == 0 and fault.phase != "end" and fault.way != "alone":
            problems.append("status 0")
        # A rank that is stopped once all have said that they leave is no error of theirs.
        all_done = fault.phase == "end" and fault.signal == signal.SIGSTOP
        if status != 0 and not all_done and not names_rank(fault, victim, errors + job.out.read_text(errors="replace")):
            problems.append(f"no error names rank {fault.rank} (process {victim}): status {status}, {errors[-1500:]!r}")
        return problems, seconds
    finally:
        for process in job.processes():
            os.kill(process, signal.SIGKILL)
        job.process.kill()
        job.process.wait()


def names_rank(fault, victim, text):
    """Before MPI has begun the ranks have no way to tell who is missing. MPICH's launcher ends all at once where one is
    killed, and names that process, or one in which MPICH has found it out."""
    by_mpich = fault.launcher == "mpirun.mpich" and fault.way == "mpi" and fault.signal == signal.SIGKILL
    return (re.search(rf"\brank {fault.rank} (does not answer|\(process \d+\) was killed|with PID)", text)
            or by_mpich and "BAD TERMINATION" in text
            or fault.phase == "start" and "for MPI to begin: another" in text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PATH_OF_TANDEM")
    parser.add_argument("--faults", type=int, default=int(os.environ.get("TANDEM_RANK_FAULTS", "5")))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="number of the one fault to test")
    parser.add_argument("--at-once", type=int, default=3, help="jobs at the same time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: emulated GPUs, of a program that has those")
    args = parser.parse_args()
    ranks_test.TANDEM = os.path.realpath(args.program)
    if not LAUNCHERS:
        print("skipped: no MPI launcher is installed")
        return 77
    before = shared_memory()
    numbers = range(args.faults) if args.only is None else [args.only]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        def test(number):
            fault = fault_of(number, args.seed)
            with tempfile.TemporaryDirectory() as folder:
                return (fault, *problems_after(fault, folder, args.device))
        for fault, problems, seconds in pool.map(test, numbers):
            print(f"{'FAILED' if problems else 'ok'} {seconds:5.1f} s  {text_of(fault)}", *problems, sep="\n    ", flush=True)
            failed += bool(problems)
    left = {name for name in shared_memory() - before if not is_mapped(name)} & shared_memory()
    if left:
        print(f"left in /dev/shm: {sorted(left)}")
    print(f"{len(numbers) - failed} of {len(numbers)} faults ended as they should")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
