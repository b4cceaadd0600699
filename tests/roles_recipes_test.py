"""The recipes of docs/roles.md: its very commands, on hosts that are network namespaces, with the embedded model.

    python3 tests/roles_recipes_test.py PATH_OF_TANDEM

What a command prints must be what the page says, answers are those of one process, and what the page says of lost hosts is
tried: the link of a host is taken down. All hosts are in namespaces of this process, which end with it. Skipped (exit status
77) where these are not allowed, or a program of the recipes is missing.

Not as on the page: ranges of experts, because the model has 16 of them and not 256; one thread for each process; 3 s of patience.
"""
import atexit
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import unittest

from running_server import ROOT, TANDEM, TINY, Server

SKIPPED = 77
HOSTS = pathlib.Path("/run/hosts")  # /run is a file system of this process
BOXES = ("box1", "box2", "box3", "box4")
PATIENCE = 3
PAGE = (ROOT / "docs" / "roles.md").read_text(encoding="utf-8")
QUESTIONS = [f"What is {17 * i + 3} + {401 - 9 * i}?" for i in range(6)]
LONG = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def prompt(number):
    """A prompt that is long enough to be fetched from another server."""
    return " ".join(f"What is {number * 50 + i} + {1000 - i}?" for i in range(40))


def enter_namespaces():
    """Starts this program again in namespaces of its own; they and all processes in them end with it."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    for program in ("unshare", "nsenter", "ip", "curl", "openssl", "seq", "bash"):
        if not shutil.which(program):
            print(f"skipped: {program} is not installed")
            sys.exit(SKIPPED)
    command = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--mount", "--pid", "--fork", "--kill-child",
               "--mount-proc"]
    trial = ("mount -t tmpfs tmpfs /run && ip netns add host && ip link add switch type bridge && "
             "ip link add near type veth peer name far netns host")
    tried = subprocess.run([*command, "sh", "-c", trial], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        print(f"skipped: no network namespaces: {tried.stderr.strip()}")
        sys.exit(SKIPPED)
    os.execvp("unshare", [*command, sys.executable, *sys.argv, "--in-namespaces"])


def make_hosts():
    """Four hosts, 10.0.0.1 to 10.0.0.4, on one switch. Each has a folder, with the checkpoint that the recipes name."""
    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    ip("link", "set", "lo", "up")
    ip("link", "add", "switch", "type", "bridge")
    ip("link", "set", "switch", "up")
    for i, box in enumerate(BOXES, 1):
        ip("netns", "add", box)
        ip("link", "add", box, "type", "veth", "peer", "name", "eth0", "netns", box)
        ip("link", "set", box, "master", "switch", "up")
        ip("-n", box, "address", "add", f"10.0.0.{i}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", box, "link", "set", device, "up")
        (HOSTS / box).mkdir(parents=True)
        (HOSTS / box / "DeepSeek-R1").symlink_to(TINY)
    programs = HOSTS / "programs"
    programs.mkdir()
    write_program(programs / "tandem", f'exec "{TANDEM}" "$@" --threads 1')
    write_program(programs / "scp", f'[ $# = 2 ] && cp "$1" {HOSTS}/box"$(echo "$2" | sed "s/^10[.]0[.]0[.]\\([2-4]\\):$/\\1/")"/')
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"


def write_program(file, text):
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)


def set_link(box, state):
    subprocess.run(["ip", "link", "set", box, state], check=True)


def of_this_model(text):
    """Ranges of 256 experts become those of 16."""
    return re.sub(r"\b(\d{1,3})-(\d{1,3})\b", lambda r: f"{int(r[1]) // 16}-{(int(r[2]) + 1) // 16 - 1}", text)


class Command:
    def __init__(self, box, text):
        self.box, self.text, self.prints = box, text, []

    def is_server(self):
        return bool(re.match(r"tandem (worker|serve) ", self.text))


def recipe(title):
    """The commands of the page's section that begins with a title, each with what it prints."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", PAGE, re.M | re.S)[1]
    commands = []
    for line in re.findall(r"^    (.*)$", section, re.M):
        if begins := re.match(r"(box\d)\$ (.*)", line):
            commands.append(Command(begins[1], begins[2]))
        elif line.startswith("  "):  # a command goes on
            commands[-1].text += "\n" + line
        else:
            commands[-1].prints.append(of_this_model(line))
    for command in commands:
        if command.is_server():
            command.text = of_this_model(command.text)
    return commands, " ".join(section.split())


def matches(expected, printed):
    """Whether a line is as expected, where `..` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, expected.split(".."))), printed, re.S) is not None


def on(box, command):
    """What a shell on a host executes, in the host's folder."""
    return {"args": ["nsenter", f"--net=/run/netns/{box}", "bash", "-c", command], "cwd": HOSTS / box, "text": True}


def shell(box, command, **more):
    done = subprocess.run(**on(box, command), capture_output=True, timeout=60, check=False, **more)
    if done.returncode != 0:
        raise AssertionError(f"{box}$ {command}\n{done.stdout}{done.stderr}status {done.returncode}")
    return done.stdout


class Process:
    """A worker or server in a terminal of its own on a host."""

    def __init__(self, command):
        self.name = f"{command.box}$ {command.text}"
        self.process = subprocess.Popen(**on(command.box, "exec " + command.text), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        atexit.register(self.process.kill)
        self.lines = []
        threading.Thread(target=lambda: self.lines.extend(line.rstrip("\n") for line in self.process.stdout), daemon=True).start()

    def wait_for_line(self, expected, at_most=30):
        wait_for(lambda: any(matches(expected, line) for line in self.lines), lambda: f"{expected}: {self.name} prints {self.lines}", at_most)

    def stop(self):
        self.process.terminate()
        return self.process.wait(timeout=30)


def wait_for(condition, what, at_most=30):
    end = time.monotonic() + at_most
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not in {at_most} s: {what()}")
        time.sleep(0.02)


def post(box, path, body):
    return json.loads(shell(box, f"curl -s localhost:8000{path} -d @-", input=json.dumps(body)))


def answer(box, question):
    body = post(box, "/v1/chat/completions", {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 120})
    if "error" in body:
        raise AssertionError(body)
    return body["choices"][0]["message"]


def metrics(box):
    return shell(box, "curl -s localhost:8000/metrics")


def is_up(box, kind, address):
    return re.search(rf'^tandem:{kind}_up{{.*"{address}"}} 1$', metrics(box), re.M) is not None


class Recipes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        make_hosts()
        alone = Server("--threads", "1").wait_ready()
        cls.questions = QUESTIONS + [prompt(i) for i in range(2)]
        body = {"temperature": 0, "max_tokens": 120}
        cls.expected = [alone.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": question}], **body})["choices"][0]["message"]
                        for question in cls.questions]
        cls.long_text = alone.ok("/v1/completions", LONG)["choices"][0]["text"]
        alone.stop()

    def setUp(self):
        self.processes = []

    def tearDown(self):
        for box in BOXES:
            set_link(box, "up")
        for process in self.processes:
            process.process.kill()
            process.process.wait()
        for box in BOXES:
            (HOSTS / box / "key").unlink(missing_ok=True)

    def follow(self, title, arguments=""):
        """Executes a recipe and returns its servers, the last one of which answers, and the section's text."""
        commands, section = recipe(title)
        self.assertGreater(len(commands), 3)
        for command in commands:
            if command.is_server():
                if command.text.startswith("tandem serve"):
                    command.text += arguments
                process = Process(command)
                self.processes.append(process)
                for line in command.prints or ["listening on 10.0.0..:9000"]:
                    process.wait_for_line(line)
                if command.text.startswith("tandem serve"):
                    process.wait_for_line("ready: ..")
            else:
                printed = shell(command.box, command.text)
                for line in command.prints:
                    self.assertTrue(any(matches(line, one) for one in [printed.strip(), *printed.splitlines()]),
                                    f"{command.box}$ {command.text}\nprints {printed!r}, not {line}")
        return self.processes, section

    def require_answers(self, box):
        self.assertEqual([answer(box, question) for question in self.questions], self.expected)

    def require_end(self):
        self.assertEqual([process.stop() for process in reversed(self.processes)], [0] * len(self.processes))

    def says(self, section, text):
        """The page has this text, and a process is to print it as it is for this model."""
        self.assertIn(f"`{text}`", section)
        return of_this_model(text)

    def test_two_boxes(self):
        (_, server), section = self.follow("Two boxes: a GPU in one, memory in the other", f" --worker-patience {PATIENCE}")
        self.require_answers("box1")
        error = self.says(section, "experts 0-191 have had no worker for 10 s: 10.0.0.2:9000 (Connection timed out): start one of them again")
        set_link("box2", "down")
        begin = time.monotonic()
        failed = post("box1", "/v1/completions", LONG)
        self.assertEqual(failed["error"]["message"], error.replace("10 s", f"{PATIENCE} s"))
        self.assertGreater(time.monotonic() - begin, PATIENCE)
        self.assertEqual(json.loads(shell("box1", "curl -s localhost:8000/health"))["status"], "ready")
        self.assertIn("box1 connects to it within 3 s", section)
        set_link("box2", "up")
        wait_for(lambda: is_up("box1", "worker", "10.0.0.2:9000"), lambda: server.lines, at_most=4)
        self.require_answers("box1")
        self.processes[0].process.kill()  # the host is switched off, and on again
        self.processes[0].process.wait()
        command = next(command for command in recipe("Two boxes: a GPU in one, memory in the other")[0] if command.is_server())
        self.processes[0] = Process(command)
        wait_for(lambda: is_up("box1", "worker", "10.0.0.2:9000"), lambda: server.lines)
        self.require_answers("box1")
        self.require_end()

    def test_four_boxes(self):
        (*_, server), section = self.follow("Four boxes: any worker may be lost")
        self.require_answers("box1")
        for i in (2, 3, 4):
            with self.subTest(lost=i):
                address = f"10.0.0.{i}:9000"
                down = self.says(section, "worker 10.0.0.3:9000 is down: silent for 500 ms").replace("10.0.0.3:9000", address)
                up = self.says(section, "worker 10.0.0.3:9000 is up").replace("10.0.0.3:9000", address)
                n_up = server.lines.count(up)
                got = []
                asks = threading.Thread(target=lambda: got.append(post("box1", "/v1/completions", LONG)))
                asks.start()
                wait_for(lambda: re.search(r"^tandem:requests_running{.*} 1$", metrics("box1"), re.M), lambda: "an answer runs")
                set_link(f"box{i}", "down")
                server.wait_for_line(down)
                self.assertFalse(is_up("box1", "worker", address))
                asks.join()
                self.assertEqual(got[0]["choices"][0]["text"], self.long_text)
                self.require_answers("box1")
                set_link(f"box{i}", "up")
                wait_for(lambda: server.lines.count(up) > n_up, lambda: server.lines, at_most=5)
                self.require_answers("box1")
        self.require_end()

    def test_a_worker_is_replaced(self):
        (*_, server), section = self.follow("Four boxes: any worker may be lost")
        self.assertIn("change the line in `workers.txt`", section)
        set_link("box4", "down")
        self.processes[2].process.kill()
        commands = [command for command in recipe("Four boxes: any worker may be lost")[0] if "10.0.0.4" in command.text and command.is_server()]
        commands[0].box = "box1"  # another host, with another address
        commands[0].text = commands[0].text.replace("10.0.0.4", "10.0.0.1")
        self.processes[2] = Process(commands[0])
        self.processes[2].wait_for_line("listening on 10.0.0.1:9000")
        shell("box1", "sed -i s/10.0.0.4/10.0.0.1/ workers.txt")
        server.wait_for_line("..10.0.0.1:9000 is up..")
        set_link("box3", "down")  # only box2 and the newcomer are left
        self.require_answers("box1")
        self.require_end()

    def test_prefill_and_decode(self):
        (_, decode), section = self.follow("Two boxes: prompts on one, answers on the other")
        self.assertGreater(float(re.search(r"^tandem:fetched_prompt_tokens_total{.*} (\S+)$", metrics("box2"), re.M)[1]), 256)
        self.require_answers("box2")
        down = self.says(section, "prefill server 10.0.0.1:9100 is down: silent for 2000 ms")
        shell("box2", "curl -s localhost:8000/flush_cache -d {}")
        set_link("box1", "down")
        self.require_answers("box2")
        decode.wait_for_line(down)
        set_link("box1", "up")
        wait_for(lambda: is_up("box2", "prefill_server", "10.0.0.1:9100"), lambda: decode.lines, at_most=5)
        self.require_answers("box2")
        self.assertEqual(answer("box1", self.questions[0]), self.expected[0])  # it answers too
        self.require_end()


if __name__ == "__main__":
    if "--in-namespaces" not in sys.argv:
        enter_namespaces()
    sys.argv.remove("--in-namespaces")
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
