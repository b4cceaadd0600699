"""Experts move between workers, which are processes, while a server with the emulated GPU answers; a worker is killed and
started again meanwhile.

    python3 tests/gpu_worker_moves_test.py PATH_OF_TANDEM_WITH_THE_EMULATED_GPU
"""
import concurrent.futures
import os
import time
import unittest
import unittest.mock

from running_server import Server, chat
from worker_moves_processes_test import MOVE, begin, experts_of, moving, report_of
from workers_test import QUESTIONS, is_up, server_of, wait_for

ASKED = QUESTIONS[:4]
FEW = {"max_tokens": 8}  # the emulated GPU takes 50 ms for a token


def text_of(server, question):
    return server.ok("/v1/chat/completions", chat(question, **FEW))["choices"][0]["message"]


class WorkersOfAGpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        alone = Server("--device", "cpu", "--threads", "1").wait_ready()
        cls.want = [text_of(alone, question) for question in ASKED]
        alone.stop()

    def served(self, memory, *arguments):
        workers = [moving("0,2,4,6,8,10,12,14"), moving("1,3,5,7,9,11,13,15")]  # a GPU has the first experts
        with unittest.mock.patch.dict(os.environ, TANDEM_GPU_MEMORY=memory):
            server = server_of(workers, "--device", "cuda", "--ctx", "128", "--chunk", "32", "--max-batch", "2", "--draft", "off",
                               "--worker-deadline", "4000", "--worker-patience", "60", *arguments)
        return workers, server

    def answer_while(self, server, work):
        """Returns what `work` does while two clients ask; all answers must be there and right."""
        with concurrent.futures.ThreadPoolExecutor(2) as clients:
            answers = [clients.submit(text_of, server, question) for question in ASKED]
            result = work()
            self.assertEqual([answer.result() for answer in answers], self.want)
        return result

    def end(self, workers, server):
        self.assertEqual(server.stop(), 0)
        for worker in workers:
            self.assertEqual(worker.stop(), 0)

    def moved(self, server):
        begin(server)
        return report_of(server)

    def test_experts_of_workers_move_and_those_of_the_gpu_stay(self):
        workers, server = self.served("4000000", *MOVE)
        self.answer_while(server, lambda: None)
        before = experts_of(server)
        report = self.answer_while(server, lambda: self.moved(server))
        after = experts_of(server)
        self.assertEqual((report["state"], report["waves_moved"]), ("done", report["waves"]), report)
        self.assertGreater(report["experts"], 0)
        self.assertGreater(report["bytes"], 0)
        self.assertGreater(report["balancedness_after"], report["balancedness_before"])
        self.assertNotIn("gpu_share_before", report)
        self.assertTrue(0 < before["gpu_share"] < 1, before)
        self.assertEqual(len(after["load"]), 3)
        self.assertNotEqual([layer["ranks"] for layer in after["layers"]], [layer["ranks"] for layer in before["layers"]])
        for old, new in zip(before["layers"], after["layers"]):
            self.assertEqual(new["gpu"], old["gpu"])
            for expert, (was, now) in enumerate(zip(old["ranks"], new["ranks"])):
                self.assertEqual(was == [0], expert in old["gpu"])
                self.assertEqual(now == [0], expert in old["gpu"])
        # A worker that is killed and started again is brought to what has moved.
        for worker in workers:
            worker.kill()
            time.sleep(0.2)
            worker.start()
            wait_for(lambda lost=worker: is_up(server, lost), "the worker is up")
            self.answer_while(server, lambda: None)
        self.end(workers, server)

    def test_a_worker_is_killed_while_experts_move(self):
        # Half of the experts, or less, are on the GPU. It is planned, loaded, or moved then.
        for memory, seconds in (("4000000", 0), ("3500000", 0.02), ("4000000", 0.1)):
            with self.subTest(memory=memory, seconds=seconds):
                workers, server = self.served(memory, *MOVE)
                self.answer_while(server, lambda: None)

                def lose():
                    begin(server)
                    time.sleep(seconds)
                    workers[1].kill()
                    time.sleep(0.3)
                    workers[1].start()  # steps, and so moves, may wait for it
                    return report_of(server)

                report = self.answer_while(server, lose)
                if report["state"] == "failed":
                    self.assertIn(f"worker {workers[1].address} was lost", report["error"])
                else:
                    self.assertEqual(report["state"], "done")
                wait_for(lambda: is_up(server, workers[1]), "the worker is up")  # pylint: disable=cell-var-from-loop
                self.assertEqual(self.answer_while(server, lambda: self.moved(server))["state"], "done")
                self.answer_while(server, lambda: None)
                self.end(workers, server)

    def test_auto_begins_by_itself(self):
        workers, server = self.served("4000000", "--rebalance", "auto", "--rebalance-below", "0.99", "--rebalance-period", "0.2",
                                      "--balance-window", "16")
        self.answer_while(server, lambda: wait_for(lambda: server.get("/rebalance")[1]["number"] >= 1, "a rebalance"))
        self.assertEqual(report_of(server)["state"], "done")
        self.answer_while(server, lambda: None)
        self.end(workers, server)


if __name__ == "__main__":
    unittest.main(argv=["gpu_worker_moves_test"], verbosity=1)
