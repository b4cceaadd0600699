"""A short form of tools/worker_faults.py, and runs of it that must fail.

    python3 tests/worker_faults_test.py PATH_OF_TANDEM
"""
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

TANDEM = sys.argv[1] if len(sys.argv) > 1 else "build/tandem"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import worker_faults  # noqa: E402

KINDS = {"kill", "stop", "cut", "silence", "drain", "restart"}


class WorkerFaults(unittest.TestCase):
    def run_tool(self, *arguments):
        """The exit status and the report."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "report.json"
            status = worker_faults.main([TANDEM, "--questions", "48", "--report", str(file), *arguments])
            return status, json.loads(file.read_text(encoding="utf-8"))

    def test_no_answer_is_lost(self):
        status, report = self.run_tool("--faults", "20", "--streams", "16", "--interval", "0.6", "--seconds", "0.2", "1.2")
        self.assertEqual((status, report["problems"], report["lost"], report["different"]), (0, [], 0, 0))
        self.assertEqual(len(report["faults"]), 20)
        self.assertEqual({fault["kind"] for fault in report["faults"]}, KINDS)
        self.assertGreater(report["answers_under_faults"], 20)
        self.assertLess(report["under_faults"]["p99"], 2)
        self.assertGreater(report["quiet"]["gaps"], 100)

    def test_another_text_is_found(self):
        read = worker_faults.read_references

        async def one_is_wrong(server, asked):
            references = await read(server, asked)
            references[asked[0]]["content"] += "."
            return references
        with mock.patch.object(worker_faults, "read_references", one_is_wrong):
            status, report = self.run_tool("--faults", "1", "--streams", "4", "--interval", "2")
        self.assertEqual((status, report["lost"]), (1, 0))
        self.assertGreater(report["different"], 0)
        self.assertLess(report["different"], report["answers"])

    def test_lost_answers_are_found(self):
        """All workers are killed, for longer than the server's patience."""
        with mock.patch.object(worker_faults, "neighbours", lambda worker: set()):
            status, report = self.run_tool("--faults", "4", "--streams", "4", "--interval", "0.2", "--kinds", "kill",
                                           "--seconds", "3", "3", "--patience", "0.5")
        self.assertEqual((status, report["different"]), (1, 0))
        self.assertGreater(report["lost"], 0)
        self.assertTrue(any("have had no worker for 0.5 s" in problem for problem in report["problems"]), report["problems"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
