"""Experts move between workers, which are processes, while a server answers with them; workers are killed and started
again meanwhile.

    python3 tests/worker_moves_processes_test.py PATH_OF_TANDEM
"""
import subprocess
import sys
import time
import unittest

from running_server import TANDEM, TINY, Server
from workers_test import BACKBONE, QUESTIONS, Streams, Worker, is_up, server_of, text_of, wait_for

MOVE = ["--rebalance", "on-request", "--balance-window", "64"]


def moving(experts):
    return Worker(experts, arguments=["--experts-move"])


def report_of(server):
    """GET /rebalance, once nothing moves."""
    for _ in range(3000):
        report = server.get("/rebalance")[1]
        if report["state"] not in ("planning", "loading"):
            return report
        time.sleep(0.02)
    raise AssertionError(report)


def begin(server):
    status, answer = server.post("/rebalance", "")
    if status != 202:
        raise AssertionError(f"{status} {answer}")


def experts_of(server):
    return server.get("/experts")[1]


class WorkersWhoseExpertsMove(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        alone = Server("--threads", "1").wait_ready()
        cls.want = {question: text_of(alone, question) for question in QUESTIONS}
        alone.stop()

    def check(self, answers):
        self.assertGreater(len(answers), 0)
        for question, errors, text in answers:
            self.assertEqual((errors, text), ([], self.want[question]), question)

    def test_answers_go_on_while_experts_move(self):
        workers = [moving("0-7"), moving("8-15")]
        server = server_of(workers, "--worker-deadline", "10000", *MOVE)
        streams = Streams(server, 4)
        streams.wait_for_more()
        before = experts_of(server)
        begin(server)
        report = report_of(server)
        streams.wait_for_more()
        after = experts_of(server)
        self.assertEqual((report["state"], report["waves_moved"]), ("done", report["waves"]), report)
        self.assertGreater(report["experts"], 0)
        self.assertGreater(report["bytes"], 0)
        self.assertGreater(report["balancedness_after"], report["balancedness_before"])
        moved = sum(a != b for old, new in zip(before["layers"], after["layers"])
                    for a, b in zip(old["ranks"], new["ranks"]))
        self.assertGreaterEqual(moved, report["experts"])
        self.assertEqual({rank for layer in after["layers"] for ranks in layer["ranks"] for rank in ranks}, {1, 2})
        # A worker that is killed and started again is brought to what has moved.
        for worker in workers:
            worker.kill()
            time.sleep(0.2)
            worker.start()
            wait_for(lambda lost=worker: is_up(server, lost), "the worker is up")
            streams.wait_for_more()
        begin(server)
        self.assertEqual(report_of(server)["state"], "done")
        streams.wait_for_more()
        self.check(streams.end())
        # A server that comes later sees where experts are now; it keeps what it uses when the first one goes.
        second = server_of(workers, "--worker-deadline", "10000")
        self.assertEqual(text_of(second, QUESTIONS[0]), self.want[QUESTIONS[0]])
        self.assertEqual(server.stop(), 0)
        self.assertEqual(text_of(second, QUESTIONS[1]), self.want[QUESTIONS[1]])
        self.assertEqual(second.stop(), 0)
        for worker in workers:
            self.assertEqual(worker.stop(), 0)

    def test_a_worker_is_killed_while_experts_move(self):
        for seconds in (0, 0.005, 0.02, 0.1):  # it is planned, loaded, or moved then
            with self.subTest(seconds=seconds):
                workers = [moving("0-7"), moving("8-15")]
                server = server_of(workers, "--worker-deadline", "10000", "--worker-patience", "60", *MOVE)
                streams = Streams(server, 4)
                streams.wait_for_more()
                begin(server)
                time.sleep(seconds)
                workers[1].kill()
                time.sleep(0.3)
                workers[1].start()  # steps, and so moves, may wait for it
                report = report_of(server)
                if report["state"] == "failed":
                    self.assertIn(f"worker {workers[1].address} was lost", report["error"])
                else:
                    self.assertEqual(report["state"], "done")
                wait_for(lambda: is_up(server, workers[1]), "the worker is up")  # pylint: disable=cell-var-from-loop
                streams.wait_for_more()
                begin(server)
                self.assertEqual(report_of(server)["state"], "done")
                streams.wait_for_more()
                self.check(streams.end())
                self.assertEqual(server.stop(), 0)
                for worker in workers:
                    self.assertEqual(worker.stop(), 0)

    def test_auto_begins_by_itself(self):
        workers = [moving("0-7"), moving("8-15")]
        server = server_of(workers, "--worker-deadline", "10000", "--rebalance", "auto", "--rebalance-below", "0.99",
                           "--rebalance-period", "0.2", "--balance-window", "32")
        streams = Streams(server, 4)
        wait_for(lambda: server.get("/rebalance")[1]["number"] >= 2, "two rebalances")
        self.check(streams.end())
        self.assertEqual(report_of(server)["state"], "done")
        self.assertEqual(server.stop(), 0)

    def refused(self, command, *words):
        done = subprocess.run([TANDEM, *command], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2, done.stderr)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, done.stderr)
        for word in words:
            self.assertIn(word, errors[0])

    def test_refusals(self):
        fixed, free = Worker("0-7"), moving("8-15")
        serve = ["serve", TINY, "--port", "0", "--workers", f"{fixed.address},{free.address}", *BACKBONE]
        self.refused([*serve, *MOVE], "--rebalance: experts move between two or more workers", "of these 2 1 is so")
        self.refused([*serve, "--hot-experts", "live"], "--hot-experts live and --workers")
        self.refused(["worker", TINY, "--experts", "standby", "--experts-move"], "--experts standby and --experts-move")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
